"""The result of an evaluation for people: totals first, then the worst layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kimi_gguf.console import table
from kimi_gguf.verify.result import Estimate, EvalReport, LayerResult, OutputResult, RoutingResult

SHOWN_LAYERS = 12


def number(found: Estimate | None, digits: int = 4) -> str:
    """``1.234 +- 0.005``; a dash where there is none."""
    if found is None:
        return "-"
    text = f"{found.value:.{digits}g}"
    return text if found.error is None else f"{text} ± {found.error:.2g}"


def percent(found: Estimate | None) -> str:
    """A share in per cent with as many decimals as its error justifies."""
    if found is None:
        return "-"
    value = 100 * found.value
    if not found.error:
        return f"{value:.6g} %"
    error = 100 * found.error
    decimals = min(max(1 - math.floor(math.log10(error)), 0), 6)
    return f"{value:.{decimals}f} % ± {error:.{decimals}f}"


def worst_first(report: EvalReport) -> list[LayerResult]:
    """Layers by falling damage: least overlap of experts first, then the largest error of the hidden state."""
    return sorted(report.layers, key=_damage)


def _damage(layer: LayerResult) -> tuple[float, float, int]:
    overlap = 1.0 if layer.routing is None else layer.routing.overlap.value
    error = 0.0 if layer.hidden_error is None else layer.hidden_error.value
    return overlap, -error, layer.layer


def report_text(report: EvalReport) -> str:
    """The whole report as text."""
    lines = [heading(report), facts(report), ""]
    rows = totals(report)
    width = max((len(name) for name, _ in rows), default=0)
    lines += [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += [error_note(report)] if rows else []
    layers = worst_first(report)
    if layers:
        lines += ["", f"worst layers of {len(layers)}", table(LAYER_COLUMNS, map(layer_row, layers[:SHOWN_LAYERS]))]
        if len(layers) > SHOWN_LAYERS:
            lines.append(f"and {len(layers) - SHOWN_LAYERS} better ones; --report FILE.json and --html FILE have all")
    if report.missing:
        lines += ["", *(f"not measured: {name.replace('_', ' ')}: {why}" for name, why in report.missing.items())]
    return "\n".join(lines)


def heading(report: EvalReport) -> str:
    """What is compared with what."""
    recipe = f" ({report.model.recipe})" if report.model.recipe else ""
    trace = ", recorded" if report.baseline_kind == "trace" else ""
    return f"{report.model.label}{recipe} against {report.baseline.label}{trace}"


def facts(report: EvalReport) -> str:
    """How it was measured."""
    forced = ", teacher-forced" if report.teacher_forced else ""
    return (
        f"{report.engine} engine{forced}; {report.tokens:,} tokens of {report.text_name} in {report.chunks} chunks of"
        f" {report.context}; {report.seconds:.0f} s"
    )


def error_note(report: EvalReport) -> str:
    """What the standard errors stand on."""
    found = report.output.kl if report.output else report.routing.exact if report.routing else None
    if found is None:
        return ""
    if found.over == "chunks":
        return f"± is one standard error, from the spread of {found.count} chunks."
    return "± is one standard error, from tokens as if they were independent: with fewer than 8 chunks it is too small."


def totals(report: EvalReport) -> list[tuple[str, str]]:
    """Names and values of everything that is measured over the whole model."""
    return [*_routing_rows(report.routing), *_divergence_rows(report), *_output_rows(report.output)]


def _routing_rows(routing: RoutingResult | None) -> Iterator[tuple[str, str]]:
    if routing is None:
        return
    yield "same set of experts", percent(routing.exact)
    yield "experts in common", percent(routing.overlap)
    yield "in common, by router weight", percent(routing.weighted_overlap)
    yield "heaviest expert changed", percent(routing.top1_changed)
    if routing.router_kl is not None:
        yield "KL of the router", f"{number(routing.router_kl)} nats"


def _divergence_rows(report: EvalReport) -> Iterator[tuple[str, str]]:
    found = report.divergence
    if found is None:
        return
    tokens = found.never + sum(found.first)
    yield "same experts in all layers", f"{found.never:,} of {tokens:,} tokens"
    if found.mean_layer is not None:
        yield "first difference", f"in layer {found.mean_layer:.1f} on average"


def _output_rows(output: OutputResult | None) -> Iterator[tuple[str, str]]:
    if output is None:
        return
    kl, quantiles = output.kl, output.kl_quantiles
    bound = " (estimated from the trace)" if output.from_trace else ""
    yield "KL divergence", f"{number(kl)} nats{bound}"
    shares = {"50 %": quantiles.median, "90 %": quantiles.p90, "99 %": quantiles.p99, "99.9 %": quantiles.p999}
    yield "KL quantiles", ", ".join(f"{share} {found.value:.3g}" for share, found in shares.items())
    yield "same likeliest token", percent(output.top1_agreement)
    yield "change of p(true token), RMS", percent(output.probability_rms)
    yield "perplexity", f"{number(output.model_perplexity)}; baseline {number(output.base_perplexity)}"
    yield "perplexity ratio", number(output.perplexity_ratio, 6)


LAYER_COLUMNS = (
    ">layer",
    "kind",
    ">same set",
    ">in common",
    ">weighted",
    ">top-1 changed",
    ">router KL",
    ">experts used",
    ">indexer",
    ">hidden error",
)


def layer_row(layer: LayerResult) -> tuple[str, ...]:
    """The cells of one layer, in the order of ``LAYER_COLUMNS``."""
    routing = layer.routing
    loads = (layer.base_load, layer.model_load)
    used = " → ".join(str(load.used) for load in loads if load is not None) or "-"
    return (
        str(layer.layer),
        layer.kind,
        percent(routing.exact if routing else None),
        percent(routing.overlap if routing else None),
        percent(routing.weighted_overlap if routing else None),
        percent(routing.top1_changed if routing else None),
        number(routing.router_kl if routing else None, 3),
        used,
        percent(layer.indexer_overlap),
        number(layer.hidden_error, 3),
    )
