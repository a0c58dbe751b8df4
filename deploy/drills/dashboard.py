"""The Grafana dashboard drawn without Grafana: its queries on a Prometheus, as one page of SVG.

Knows what our dashboard uses, statistics and time series; anything else is refused.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLES = {
    "$__rate_interval": "1m",
    "$__interval": "15s",
    "$model_name": ".*",
    "$prompt_length_class": ".*",
}
COLUMN_PX, ROW_PX = 50, 34
_LEFT, _TOP, _BOTTOM, _LEGEND_LINES = 64, 30, 18, 6
_POINTS = 240
_COLOURS = ("#3274d9", "#e0752d", "#299c46", "#a352cc", "#c4162a", "#0f8a8a", "#8f6b00", "#555555")


@dataclass(frozen=True)
class Line:
    """One series: (seconds since the epoch, value) in order of time."""

    legend: str
    points: Sequence[tuple[float, float]]


def expand(expression: str) -> str:
    """A panel's expression as Prometheus takes it, every variable being "all"."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def draw(prometheus: str, dashboard: Path, minutes: float) -> str:
    """The page of the last minutes. Raises OSError, and ValueError for a panel of another type."""
    board = json.loads(dashboard.read_text())
    end = time.time()
    parts = []
    for panel in board["panels"]:
        lines = [
            line
            for target in panel["targets"]
            for line in _query(prometheus, target, end - 60 * minutes, end)
        ]
        parts.append(_panel(panel, lines))
    height = ROW_PX * max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    return (
        "<!doctype html><meta charset=utf-8><style>body{margin:8px;background:#f4f5f5;"
        "font:12px sans-serif}svg{position:absolute;background:#fff;border:1px solid #ddd}"
        f"div{{position:relative;width:{24 * COLUMN_PX}px;height:{height}px}}</style>"
        f"<h3>{html.escape(board['title'])}</h3><div>{''.join(parts)}</div>"
    )


def _query(url: str, target: Mapping[str, Any], start: float, end: float) -> list[Line]:
    step = max(1.0, (end - start) / _POINTS)
    options = {"query": expand(target["expr"]), "start": start, "end": end, "step": step}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(options)}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    lines = []
    for series in found:
        values = [(float(t), float(v)) for t, v in series["values"]]
        points = [(t, v) for t, v in values if math.isfinite(v)]
        if points:
            lines.append(Line(_legend(target.get("legendFormat", ""), series["metric"]), points))
    return sorted(lines, key=lambda line: line.legend)


def _legend(text: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda m: labels.get(m[1], ""), text)


def _panel(panel: Mapping[str, Any], lines: Sequence[Line]) -> str:
    place = panel["gridPos"]
    width, height = place["w"] * COLUMN_PX - 8, place["h"] * ROW_PX - 8
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    if panel["type"] == "stat":
        body = _stat(lines, unit, width, height)
    elif panel["type"] == "timeseries":
        body = _series(lines, unit, width, height)
    else:
        raise ValueError(f"panel {panel['title']!r} is a {panel['type']}: not known here")
    left, top = place["x"] * COLUMN_PX, place["y"] * ROW_PX
    title = html.escape(panel["title"])
    return (
        f'<svg style="left:{left}px;top:{top}px" width="{width}" height="{height}">'
        f'<text x="8" y="18" font-weight="bold">{title}</text>{body}</svg>'
    )


def _stat(lines: Sequence[Line], unit: str, width: int, height: int) -> str:
    text = _number(lines[0].points[-1][1], unit) if lines else "No data"
    middle = f'x="{width / 2}" y="{height / 2 + 22}" text-anchor="middle"'
    return f'<text {middle} font-size="34" fill="#299c46">{text}</text>'


def _series(lines: Sequence[Line], unit: str, width: int, height: int) -> str:
    if not lines:
        return f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">No data</text>'
    values = [v for line in lines for _, v in line.points]
    times = [t for line in lines for t, _ in line.points]
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1.0
    first, last = min(times), max(max(times), min(times) + 1.0)
    shown = min(len(lines), _LEGEND_LINES)
    bottom = height - _BOTTOM - 14 * shown

    def x(at: float) -> float:
        return _LEFT + (at - first) / (last - first) * (width - _LEFT - 12)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - _TOP)

    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{width - 12}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#eee"/><text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end" '
            f'fill="#666">{_number(value, unit).removesuffix(" req/s")}</text>'
        )
    for at, anchor in ((first, "start"), (last, "end")):
        clock = time.strftime("%H:%M", time.gmtime(at))
        parts.append(
            f'<text x="{x(at):.0f}" y="{bottom + 14}" text-anchor="{anchor}">{clock}</text>'
        )
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        for run in _runs(line.points):
            path = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in run)
            style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
            parts.append(f'<polyline points="{path}" {style}/>')
        if number < shown:
            more = f" (+{len(lines) - shown} more)" if number == shown - 1 < len(lines) - 1 else ""
            text = html.escape(f"{line.legend}: {_number(line.points[-1][1], unit)}{more}")
            at = bottom + 28 + 14 * number
            parts.append(f'<text x="{_LEFT}" y="{at}" fill="{colour}">{text}</text>')
    return "".join(parts)


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Points without a gap between them: where there is no value, there is no line."""
    step = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=1.0)
    runs = [[points[0]]]
    for before, point in itertools.pairwise(points):
        if point[0] - before[0] > 1.5 * step:
            runs.append([])
        runs[-1].append(point)
    return runs


def _number(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    return f"{value:.4g}" + (" req/s" if unit == "reqps" else "")
