"""Plots as SVG text, drawn here: line charts, curves over a rate, intervals, a heat map.

NaN and missing values leave a gap; a single point is a dot.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#555555")
_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 46


@dataclass(frozen=True)
class Series:
    """One line; values run along the axis, NaN = not measured."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """x: names of the ordered positions. unit: what the y axis counts. low: where y begins."""

    title: str
    unit: str
    x: Sequence[str]
    series: Sequence[Series]
    low: float | None = None
    percent: bool = False


@dataclass(frozen=True)
class XyChart:
    """Series over a rate 0..1: value i of `along` is the place of value i of `series`. labels: of
    the positions, the same for every series."""

    title: str
    x_unit: str
    unit: str
    along: Sequence[Series]
    series: Sequence[Series]
    labels: Sequence[str]


@dataclass(frozen=True)
class Span:
    """A value with its interval."""

    name: str
    value: float
    low: float
    high: float


def line_chart(chart: Chart) -> str:
    """The chart as an <svg> element that scales with its container."""
    finite = [v for s in chart.series for v in s.values if math.isfinite(v)]
    ticks = nice_ticks(min(finite), max(finite), chart.low) if finite else [0.0, 1.0]
    low, high = ticks[0], ticks[-1]
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at_x(i: int) -> float:
        return _LEFT + inner_w * (i + 0.5) / max(1, len(chart.x))

    def at_y(value: float) -> float:
        return _TOP + inner_h * (1 - (value - low) / (high - low))

    parts = [_text(_LEFT, 17, chart.title, "title"), _y_unit(chart.unit)]
    for tick in ticks:
        y = at_y(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, _tick_name(tick, ticks, chart.percent), "end"))
    for i, name in enumerate(chart.x):
        parts.append(_text(at_x(i), _HEIGHT - _BOTTOM + 18, name, "middle"))
    if not finite:
        parts.append(_text(_LEFT + inner_w / 2, _TOP + inner_h / 2, "not measured", "middle"))
    for number, series in enumerate(chart.series):
        color = COLORS[number % len(COLORS)]
        points = [
            (at_x(i), at_y(v)) if math.isfinite(v) else None for i, v in enumerate(series.values)
        ]
        for run in _runs(points):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            parts.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>'
            )
        for i, point in enumerate(points):
            if point is not None:
                label = f"{series.name}, {chart.x[i]}: {series.values[i]:.4g}"
                parts.append(_dot(point, color, number, label))
    return _svg(_WIDTH, _HEIGHT, chart.title, parts)


def xy_chart(chart: XyChart) -> str:
    """The chart as an <svg> element; points that lack one of their two values are left out."""
    finite = [v for s in chart.series for v in s.values if math.isfinite(v)]
    ticks = nice_ticks(min(finite), max(finite)) if finite else [0.0, 1.0]
    low, high = ticks[0], ticks[-1]
    # Room for half of the last name.
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT - 10, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float] | None:
        if not (math.isfinite(x) and math.isfinite(y)):
            return None
        return _LEFT + inner_w * x, _TOP + inner_h * (1 - (y - low) / (high - low))

    parts = [_text(_LEFT, 17, chart.title, "title"), _y_unit(chart.unit)]
    for tick in ticks:
        y = _TOP + inner_h * (1 - (tick - low) / (high - low))
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, _tick_name(tick, ticks, False), "end"))
    for tenth in range(0, 11, 2):
        x = _LEFT + inner_w * tenth / 10
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{10 * tenth}%", "middle"))
    parts.append(_text(_LEFT + inner_w / 2, _HEIGHT - 10, chart.x_unit, "middle"))
    if not finite:
        parts.append(_text(_LEFT + inner_w / 2, _TOP + inner_h / 2, "not measured", "middle"))
    for number, (along, series) in enumerate(zip(chart.along, chart.series, strict=True)):
        color = COLORS[number % len(COLORS)]
        points = [at(x, y) for x, y in zip(along.values, series.values, strict=True)]
        known = [point for point in points if point is not None]
        if len(known) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(known))
            parts.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>'
            )
        for label, point, value in zip(chart.labels, points, series.values, strict=True):
            if point is not None:
                parts.append(_dot(point, color, number, f"{series.name}, {label}: {value:.4g}"))
    return _svg(_WIDTH, _HEIGHT, chart.title, parts)


def span_chart(title: str, spans: Sequence[Span], limit: float) -> str:
    """Each value with its interval on one line; zero and `limit` are marked."""
    finite = [v for s in spans for v in (s.value, s.low, s.high) if math.isfinite(v)]
    ticks = nice_ticks(min([*finite, limit, 0.0]), max([*finite, 0.0]))
    low, high = ticks[0], ticks[-1]
    left, step = 128, 20
    height = _TOP + step * len(spans) + 34
    inner_w = _WIDTH - left - _RIGHT

    def at(value: float) -> float:
        return left + inner_w * (value - low) / (high - low)

    bottom = height - 28
    parts = [_text(8, 17, title, "title")]
    for tick in ticks:
        parts.append(_text(at(tick), height - 12, _tick_name(tick, ticks, False), "middle"))
    for value, color in ((0.0, "#8a94a3"), (limit, COLORS[1])):
        parts.append(
            f'<line x1="{at(value):.1f}" x2="{at(value):.1f}" y1="{_TOP}" y2="{bottom}" '
            f'stroke="{color}" stroke-dasharray="3 3"/>'
        )
    for i, span in enumerate(spans):
        y = _TOP + step * (i + 0.5)
        parts.append(_text(left - 8, y + 4, span.name, "end"))
        if not all(map(math.isfinite, (span.value, span.low, span.high))):
            parts.append(_text(left + 4, y + 4, "not measured", "start"))
            continue
        parts.append(
            f'<line x1="{at(span.low):.1f}" x2="{at(span.high):.1f}" y1="{y}" y2="{y}" '
            f'stroke="{COLORS[0]}" stroke-width="2"/>'
        )
        label = f"{span.name}: {span.value:+.2f} [{span.low:+.2f}, {span.high:+.2f}]"
        parts.append(_dot((at(span.value), y), COLORS[0], 2, label))
    return _svg(_WIDTH, height, title, parts)


def legend(names: Sequence[str]) -> str:
    """The colours of the series, as HTML."""
    items = (
        f'<span class="key"><svg viewBox="0 0 12 12" width="12" height="12">'
        f"{_dot((6.0, 6.0), COLORS[i % len(COLORS)], i, '')}</svg>{html.escape(name)}</span>"
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[int], values: Sequence[Sequence[float]]
) -> str:
    """Rates 0..1 as a table of coloured squares; NaN is left white. columns: layer numbers."""
    size = max(14, min(26, 620 // max(1, len(columns))))
    left, top = 118, 44
    width, height = left + size * len(columns) + 10, top + size * len(rows) + 8
    parts = [_text(8, 17, title, "title"), _text(left - 8, top - 8, "layer", "end")]
    for j, column in enumerate(columns):
        if j % (1 if size >= 20 else 2) == 0:
            parts.append(_text(left + size * (j + 0.5), top - 8, str(column), "middle"))
    for i, name in enumerate(rows):
        parts.append(_text(left - 8, top + size * (i + 0.5) + 4, name, "end"))
        for j, column in enumerate(columns):
            value = values[i][j]
            known = math.isfinite(value)
            label = f"{name}, layer {column}: " + (f"{value:.1%}" if known else "not measured")
            parts.append(
                f'<rect x="{left + size * j}" y="{top + size * i}" width="{size - 1}" '
                f'height="{size - 1}" fill="{_shade(value) if known else "#fff"}" stroke="#ccc" '
                f'stroke-width="0.5"><title>{html.escape(label)}</title></rect>'
            )
    return _svg(width, height, title, parts)


def nice_ticks(low: float, high: float, floor: float | None = None) -> list[float]:
    """3 to 7 round numbers that cover low..high (from `floor` on, if given); never one alone."""
    if floor is not None:
        low = min(low, floor)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low if floor is not None else low - pad), high + pad
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _tick_name(value: float, ticks: Sequence[float], percent: bool) -> str:
    step = ticks[1] - ticks[0]
    if percent:
        value, step = value * 100, step * 100
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    # 2.5 and 0.25 need one digit more than their power of ten.
    digits += round(step * 10**digits, 6) % 1 > 0
    return f"{value:.{digits}f}" + ("%" if percent else "")


def _runs(points: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    """The stretches of two and more neighbours without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if len(run) > 1]


def _dot(at: tuple[float, float], color: str, number: int, label: str) -> str:
    """Circles and squares by turns; the first, drawn lowest, is larger and shows under others."""
    x, y = at
    title = f"<title>{html.escape(label)}</title>" if label else ""
    # The second time round the colours, the other shape.
    if (number + number // len(COLORS)) % 2:
        corner = f'x="{x - 3:.1f}" y="{y - 3:.1f}"'
        return f'<rect {corner} width="6" height="6" fill="{color}">{title}</rect>'
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{4.5 if number else 5.5}"'
    return f'<circle {place} fill="{color}">{title}</circle>'


def _shade(rate: float) -> str:
    """White to dark blue."""
    share = min(1.0, max(0.0, rate))
    red, green, blue = (round(255 + (dark - 255) * share) for dark in (8, 48, 107))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _y_unit(unit: str) -> str:
    middle = _TOP + (_HEIGHT - _TOP - _BOTTOM) / 2
    turned = f"translate(13,{middle:.0f}) rotate(-90)"
    return f'<text class="middle" transform="{turned}">{html.escape(unit)}</text>'


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{html.escape(title, quote=True)}">{"".join(parts)}</svg>'
    )
