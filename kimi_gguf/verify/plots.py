"""Plots as inline SVG, without scripts, fonts or anything from outside; colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 14, 46
_POINTS = 64
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        label: with its unit.
        low, high: ends, in data units.
        ticks: (value, text).
        log: positions go by the logarithm.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Series:
    """A named sequence of (x, y, standard error or None) and the number of its colour."""

    name: str
    points: tuple[tuple[float, float, float | None], ...]
    colour: int = 1


def linear_axis(label: str, low: float, high: float, count: int = 5, *, percent: bool = False) -> Axis:
    """An axis with round ticks inside [low, high]."""
    if high <= low:
        high = low + 1
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    values = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    digits = max(0, -math.floor(math.log10(step * (100 if percent else 1)) + 1e-9))
    texts = [f"{100 * v:.{digits}f} %" if percent else f"{v:.{digits}f}" for v in values]
    return Axis(label, low, high, tuple(zip(values, texts, strict=True)))


def index_axis(label: str, count: int) -> Axis:
    """An axis of whole numbers from 0, with half a step of room at both ends."""
    step = max(1, int(_round_step(count / 12))) if count > 12 else 1
    ticks = tuple((float(n), str(n)) for n in range(0, count, step))
    return Axis(label, -0.5, max(count - 0.5, 0.5), ticks)


def log_axis(label: str, low: float, high: float) -> Axis:
    """A logarithmic axis from one power of ten to another, both included."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    step = max(1, (last - first) // 6)
    ticks = tuple((10.0**e, f"10{str(e).translate(_RAISED)}") for e in range(first, last + 1, step))
    return Axis(label, 10.0**first, 10.0**last, ticks, log=True)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def lines(name: str, title: str, description: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """A line with dots for each series; whiskers are standard errors."""

    def body(place_x: Callable[[float], float], place_y: Callable[[float], float]) -> Iterator[str]:
        for one in series:
            path = " ".join(f"{place_x(px):.1f},{place_y(py):.1f}" for px, py, _ in one.points)
            yield f'<polyline class="line c{one.colour}" points="{path}"/>'
            for px, py, error in one.points:
                cx, cy = place_x(px), place_y(py)
                if error:
                    top, bottom = place_y(py + error), place_y(py - error)
                    ends = f'x1="{cx:.1f}" x2="{cx:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"'
                    yield f'<line class="line whisker c{one.colour}" {ends}/>'
                text = f"{one.name}, {x.label} {px:g}: {py:.6g}" + (f" ± {error:.2g}" if error else "")
                dot = f'class="dot c{one.colour}" cx="{cx:.1f}" cy="{cy:.1f}" r="3"'
                yield f"<circle {dot}><title>{escape(text)}</title></circle>"

    return _figure(name, title, description, x, y, body, [(s.name, s.colour) for s in series])


def bars(
    name: str, title: str, description: str, x: Axis, y: Axis, boxes: Iterable[tuple[float, float, float, str]]
) -> str:
    """A bar from y = low end to a value for each (left, right, value, text)."""

    def body(place_x: Callable[[float], float], place_y: Callable[[float], float]) -> Iterator[str]:
        for left, right, value, text in boxes:
            if not value:
                continue
            begin, end, top = place_x(left) + 0.5, place_x(right) - 0.5, place_y(value)
            size = f'width="{max(end - begin, 1):.1f}" height="{max(place_y(y.low) - top, 1):.1f}"'
            yield f'<rect class="bar" x="{begin:.1f}" y="{top:.1f}" {size}><title>{escape(text)}</title></rect>'

    return _figure(name, title, description, x, y, body, [])


def scatter(
    name: str, title: str, description: str, axis: tuple[Axis, Axis], points: Iterable[tuple[float, float]]
) -> str:
    """Points over a grid of cells, a circle per cell whose area grows with its points; and the diagonal."""
    x, y = axis

    def body(place_x: Callable[[float], float], place_y: Callable[[float], float]) -> Iterator[str]:
        low, high = max(x.low, y.low), min(x.high, y.high)
        ends = f'x1="{place_x(low):.1f}" y1="{place_y(low):.1f}" x2="{place_x(high):.1f}" y2="{place_y(high):.1f}"'
        yield f'<line class="guide" {ends}/>'
        cells: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for px, py in points:
            cells.setdefault((int(x.share(px) * _POINTS), int(y.share(py) * _POINTS)), []).append((px, py))
        for members in cells.values():
            cx = place_x(sum(px for px, _ in members) / len(members))
            cy = place_y(sum(py for _, py in members) / len(members))
            radius = min(2 + math.sqrt(len(members)), 12)
            text = f"{len(members)} experts near {members[0][0]:g} and {members[0][1]:g} tokens"
            yield f'<circle class="cell" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:.1f}"><title>{text}</title></circle>'

    return _figure(name, title, description, x, y, body, [])


def _figure(
    name: str,
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    body: Callable[[Callable[[float], float], Callable[[float], float]], Iterator[str]],
    legend: Sequence[tuple[str, int]],
) -> str:
    """A plot with axes, grid and legend, and its title and description for those who do not see it."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def place_x(value: float) -> float:
        return _LEFT + x.share(value) * (right - _LEFT)

    def place_y(value: float) -> float:
        return bottom - y.share(value) * (bottom - _TOP)

    parts = [
        f'<figure id="{name}"><h2>{escape(title)}</h2>',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">',
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>',
    ]
    for value, text in y.ticks:
        at = place_y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in x.ticks:
        at = place_x(value)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text class="label" x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    turn = f'transform="rotate(-90 14 {middle_y})"'
    parts.append(f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" {turn}>{escape(y.label)}</text>')
    parts += body(place_x, place_y)
    parts.append("</svg>")
    if len(legend) > 1:
        keys = "".join(f'<span><i class="key k{colour}"></i>{escape(text)}</span>' for text, colour in legend)
        parts.append(f'<p class="legend">{keys}</p>')
    parts.append(f"<figcaption>{escape(description)}</figcaption></figure>")
    return "\n".join(parts)
