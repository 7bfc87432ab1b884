"""The result of an evaluation as one HTML page: no scripts, nothing loaded from anywhere, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from convert.version import VERSION
from kimi_gguf.verify.plots import Series, bars, index_axis, linear_axis, lines, log_axis, scatter
from kimi_gguf.verify.report import LAYER_COLUMNS, error_note, facts, heading, layer_row, number, percent, totals
from kimi_gguf.verify.result import Estimate, EvalReport, Histogram, Load

GENERATOR = '<meta name="generator" content="kimi-gguf eval">'
"""By which a page of ours is known."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: EvalReport) -> str:
    """The whole page."""
    body = [
        "<header>",
        f"<h1>{escape(heading(report))}</h1>",
        f'<p class="facts">{escape(facts(report))}</p>',
        "</header><main>",
        *_alerts(report),
        _cards(report),
        *_figures(report),
        _totals(report),
        _layers(report),
        *_missing(report),
        "</main>",
        _footer(report),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            GENERATOR,
            f"<title>{escape(heading(report))}</title>",
            f"<style>{_style()}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _style() -> str:
    return (resources.files("kimi_gguf.verify") / "page.css").read_text()


def _alerts(report: EvalReport) -> Iterator[str]:
    for flag in report.flags:
        yield f'<p class="alert" role="alert"><b>Attention:</b> {escape(flag)}</p>'
    for missed in report.below_bar:
        yield f'<p class="alert" role="alert"><b>Below the bar:</b> {escape(missed)}</p>'


def _cards(report: EvalReport) -> str:
    cards: list[tuple[str, str]] = []
    if report.routing is not None:
        cards.append(("Same set of experts", percent(report.routing.exact)))
        cards.append(("Experts in common", percent(report.routing.overlap)))
    if report.output is not None:
        cards.append(("KL divergence, nats", number(report.output.kl)))
        cards.append(("Same likeliest token", percent(report.output.top1_agreement)))
        cards.append(("Perplexity ratio", number(report.output.perplexity_ratio, 6)))
    items = []
    for name, value in cards:
        main, _, error = value.partition(" ± ")
        small = f"<small>± {escape(error)}</small>" if error else ""
        items.append(f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(main)}{small}</dd></div>')
    return f'<dl class="cards">{"".join(items)}</dl>'


def _figures(report: EvalReport) -> Iterator[str]:
    routed = [layer for layer in report.layers if layer.routing is not None]
    layer_axis = index_axis("layer", len(report.layers))
    if routed:
        overlap = _series("experts in common", [(x.layer, x.routing.overlap) for x in routed if x.routing], 1)
        exact = _series("same set of experts", [(x.layer, x.routing.exact) for x in routed if x.routing], 2)
        lowest = min(y for series in (overlap, exact) for _, y, _ in series.points)
        y = linear_axis("share", _floor(lowest), 1.0, percent=True)
        worst = min(overlap.points, key=lambda point: point[1])
        text = (
            f"Share of the chosen experts that both models choose, and of tokens with the very same set, by layer. "
            f"Least in layer {worst[0]:g}: {100 * worst[1]:.2f} % in common."
        )
        yield lines("routing", "Routing overlap by layer", text, layer_axis, y, [overlap, exact])
    if report.output is not None:
        yield _kl_figure(report.output.kl_histogram, report.output.kl)
    loads = [(x.base_load, x.model_load) for x in report.layers if x.base_load and x.model_load]
    if loads:
        yield _load_figure([(a, b) for a, b in loads if a and b])
    errors = [(x.layer, x.hidden_error) for x in report.layers if x.hidden_error is not None]
    positive = [found.value for _, found in errors if found.value > 0]
    if positive:
        y = log_axis("relative error", min(positive), max(positive))
        series = _series("hidden state", [(n, found) for n, found in errors if found.value > 0], 1)
        last = errors[-1][1].value
        text = f"|model − baseline| / |baseline| of the hidden state after each layer; {last:.3g} after the last."
        yield lines("hidden", "Error by layer", text, layer_axis, y, [series])
    elif errors:
        text = "The hidden states of both models are equal, bit for bit, after every layer."
        yield lines("hidden", "Error by layer", text, layer_axis, linear_axis("relative error", 0.0, 1.0), [])
    if report.divergence is not None and any(report.divergence.first):
        yield _divergence_figure(report, report.divergence.first)


def _series(name: str, found: Sequence[tuple[int, Estimate]], colour: int) -> Series:
    return Series(name, tuple((float(layer), x.value, x.error) for layer, x in found), colour)


def _floor(lowest: float) -> float:
    """A round lower end that leaves some room below the lowest share."""
    span = max(1 - lowest, 1e-4) * 1.15
    return max(0.0, 1 - span)


def _kl_figure(histogram: Histogram, mean: Estimate) -> str:
    edges, counts = histogram.edges, histogram.counts
    total = sum(counts) + histogram.below + histogram.above
    rows = [
        (left, right, count / total, f"{left:.1g} to {right:.1g} nats: {count} positions")
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    # What lies below the first edge, zero above all, is drawn in a bar of its own.
    if histogram.below:
        text = f"below {edges[0]:.1g} nats: {histogram.below} positions"
        rows.insert(0, (edges[0] / 10**0.5, edges[0], histogram.below / total, text))
    seen = [(left, right) for left, right, share, _ in rows if share] or [(edges[0], edges[-1])]
    x = log_axis("KL divergence of a position, nats", seen[0][0] * 1.001, seen[-1][1] * 0.999)
    y = linear_axis("positions", 0.0, max(row[2] for row in rows) * 1.05 or 1.0, percent=True)
    text = (
        f"How far the next-token distribution moved, over {total:,} positions; mean {number(mean)} nats. "
        f"{histogram.below:,} positions lie below {edges[0]:.0e}, {histogram.above:,} above {edges[-1]:g}."
    )
    return bars("kl", "KL divergence", text, x, y, rows)


def _load_figure(loads: Sequence[tuple[Load, Load]]) -> str:
    points = [pair for base, model in loads for pair in zip(base.counts, model.counts, strict=True)]
    most = max(max(pair) for pair in points)
    x, y = (linear_axis(f"tokens per expert, {who}", 0.0, most * 1.03 + 1) for who in ("baseline", "model"))
    lost = sum(base > 0 and not model for base, model in points)
    gini = [sum(load.gini for load in side) / len(loads) for side in zip(*loads, strict=True)]
    text = (
        f"Each of {len(points):,} experts by the tokens that reach it in both models; on the diagonal nothing changed. "
        f"{lost} experts that the baseline uses are never reached. Gini coefficient {gini[0]:.3f} → {gini[1]:.3f}."
    )
    return scatter("load", "Expert load", text, (x, y), ((float(a), float(b)) for a, b in points))


def _divergence_figure(report: EvalReport, first: Sequence[int]) -> str:
    never = report.divergence.never if report.divergence else 0
    total = sum(first) + never
    rows = [(n - 0.5, n + 0.5, count / total, f"layer {n}: {count} tokens") for n, count in enumerate(first)]
    x = index_axis("layer", len(first))
    y = linear_axis("tokens", 0.0, max(row[2] for row in rows) * 1.05, percent=True)
    text = f"Where a token first reaches another set of experts; {never:,} of {total:,} tokens never do."
    return bars("divergence", "First divergence", text, x, y, rows)


def _totals(report: EvalReport) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in totals(report)
    )
    note = escape(error_note(report))
    return f'<table class="words"><caption>Whole model</caption><tbody>{rows}</tbody></table><p class="note">{note}</p>'


def _layers(report: EvalReport) -> str:
    head = "".join(f'<th scope="col">{escape(name.lstrip(">"))}</th>' for name in LAYER_COLUMNS)
    rows = []
    for layer in report.layers:
        first, *rest = (escape(cell) for cell in layer_row(layer))
        rows.append(f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>')
    table = f"<table><caption>By layer</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table by layer">{table}</div>'


def _missing(report: EvalReport) -> Iterator[str]:
    if report.missing:
        items = "".join(f"<li>{escape(k.replace('_', ' '))}: {escape(why)}</li>" for k, why in report.missing.items())
        yield f'<section class="note"><h2>Not measured</h2><ul>{items}</ul></section>'


def _footer(report: EvalReport) -> str:
    return (
        f"<footer>kimi-gguf {escape(VERSION)}, {escape(report.engine)} engine; figures of different engines do not "
        f"compare.<br>text SHA-256 {escape(report.text_sha256)}<br>model {escape(report.model.digest)}<br>"
        f"baseline {escape(report.baseline.digest)}</footer>"
    )
