"""Timelines of warps, as numbers, as a Chrome trace and as a picture. Standard library alone.

One lane a warp, one colour a step; where the times come from (clock reads, a model) is the
caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = {
    "wait scores": "#9ecae8",
    "wait keys": "#c6dbef",
    "wait values": "#6baed6",
    "wait P.V": "#4a90c2",
    "wait empty": "#dbe9f6",
    "wait": "#9ecae8",
    "max": "#41ab5d",
    "vote": "#8856a7",
    "exp2": "#f58518",
    "skip": "#e3e3e3",
    "store P": "#b5833a",
    "issue products": "#2c5f9e",
    "issue QK": "#2c5f9e",
    "issue PV": "#b5346b",
    "load": "#17807e",
    "rescale": "#d4b106",
    "output": "#7f7f7f",
}
"""Of the steps that kernels share; other steps get the next of _OTHERS."""
_OTHERS = ("#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#4c78a8", "#eeca3b", "#bab0ac")
MARK_COLOUR = "#d62728"

_LEFT, _TOP, _ROW, _GAP, _AXIS = 130, 34, 18, 5, 26


@dataclass(frozen=True)
class Span:
    """One step of one lane: start <= end, in the timeline's unit. visit: key block, -1 = none."""

    lane: str
    step: str
    start: float
    end: float
    visit: int = -1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise ValueError(
                f"span {self.step!r} of lane {self.lane!r} runs from {self.start} to {self.end}; "
                "both must be finite and in order"
            )


@dataclass(frozen=True)
class Mark:
    """Something without duration, such as a product that was left out: a red tick."""

    lane: str
    step: str
    at: float
    visit: int = -1


@dataclass(frozen=True)
class Timeline:
    """lanes: in the order of the picture, each span's and mark's among them.

    unit: of all times, such as "cycles" or "ns"; ns_per_unit: for the Chrome trace.
    """

    title: str
    unit: str
    lanes: Sequence[str]
    spans: Sequence[Span]
    marks: Sequence[Mark] = field(default_factory=tuple)
    ns_per_unit: float = 1.0

    def __post_init__(self) -> None:
        used = {s.lane for s in self.spans} | {m.lane for m in self.marks}
        unknown = used - set(self.lanes)
        if unknown:
            raise ValueError(f"lane {min(unknown)!r} is not one of {', '.join(self.lanes)}")

    @property
    def steps(self) -> list[str]:
        """In the order of their first appearance."""
        return list(dict.fromkeys(s.step for s in self.spans))

    @property
    def extent(self) -> tuple[float, float]:
        """First and last time; (0, 0) when it is empty."""
        times = [t for s in self.spans for t in (s.start, s.end)] + [m.at for m in self.marks]
        return (min(times), max(times)) if times else (0.0, 0.0)


@dataclass(frozen=True)
class StepTotal:
    """Of one step on a set of lanes. share: of these lanes' time from first start to last end."""

    count: int
    total: float
    median: float
    share: float


def step_totals(timeline: Timeline, lanes: Sequence[str] | None = None) -> dict[str, StepTotal]:
    """Time in each step, over `lanes` (None = all): waits before scores as a number."""
    chosen = set(timeline.lanes if lanes is None else lanes)
    durations: dict[str, list[float]] = {}
    ends: dict[str, tuple[float, float]] = {}
    for s in timeline.spans:
        if s.lane not in chosen:
            continue
        durations.setdefault(s.step, []).append(s.end - s.start)
        first, last = ends.get(s.lane, (s.start, s.end))
        ends[s.lane] = min(first, s.start), max(last, s.end)
    whole = sum(last - first for first, last in ends.values())
    return {
        step: StepTotal(len(d), sum(d), _median(d), sum(d) / whole if whole else 0.0)
        for step, d in durations.items()
    }


def early_share(timeline: Timeline, step: str, limit: float) -> tuple[int, int]:
    """(spans of `step` no longer than `limit`, all of them): how often what it waits for is early.

    limit: in the timeline's unit, what the step takes when nothing is waited for.
    """
    durations = [s.end - s.start for s in timeline.spans if s.step == step]
    return sum(d <= limit for d in durations), len(durations)


def chrome_trace(timeline: Timeline) -> dict[str, object]:
    """The JSON object that chrome://tracing and Perfetto open; times in microseconds."""
    thread = {lane: i for i, lane in enumerate(timeline.lanes)}
    to_us = timeline.ns_per_unit / 1e3
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.title}}
    ]
    for lane, i in thread.items():
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
        )
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": i, "args": {"sort_index": i}}
        )
    events += [
        {
            "ph": "X",
            "name": s.step,
            "pid": 0,
            "tid": thread[s.lane],
            "ts": s.start * to_us,
            "dur": (s.end - s.start) * to_us,
            **_visit(s.visit),
        }
        for s in timeline.spans
    ]
    events += [
        {
            "ph": "i",
            "s": "t",
            "name": m.step,
            "pid": 0,
            "tid": thread[m.lane],
            "ts": m.at * to_us,
            **_visit(m.visit),
        }
        for m in timeline.marks
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": timeline.unit}}


def svg(timeline: Timeline, *, window: tuple[float, float] | None = None, width: int = 1400) -> str:
    """A picture of the times in `window` (None = all), in the timeline's unit; width in pixels."""
    first, last = timeline.extent if window is None else window
    if window is not None and not first < last:
        raise ValueError(f"window {first} to {last} is empty; give its start before its end")
    scale = (width - _LEFT - 20) / ((last - first) or 1.0)
    row = {lane: _TOP + i * (_ROW + _GAP) for i, lane in enumerate(timeline.lanes)}
    bottom = _TOP + len(row) * (_ROW + _GAP)
    colours = step_colours(timeline.steps)
    shown = [s for s in timeline.spans if s.end > first and s.start < last]
    marks = [m for m in timeline.marks if first <= m.at <= last]
    parts = [f'<text x="8" y="20" font-size="14">{escape(timeline.title)}</text>']
    for lane, y in row.items():
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(lane)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 20}" height="{_ROW}" '
                     'fill="#fafafa"/>')  # fmt: skip
    for s in shown:
        x0, x1 = ((min(max(t, first), last) - first) * scale + _LEFT for t in (s.start, s.end))
        block = "" if s.visit < 0 else f", visit {s.visit}"
        parts.append(
            f'<rect x="{x0:.2f}" y="{row[s.lane]}" width="{max(x1 - x0, 0.2):.2f}" '
            f'height="{_ROW}" fill="{colours[s.step]}"><title>{escape(s.step)}{block}: '
            f"{s.end - s.start:g} {escape(timeline.unit)}</title></rect>"
        )
    for m in marks:
        x = (m.at - first) * scale + _LEFT
        parts.append(
            f'<rect x="{x - 1:.2f}" y="{row[m.lane] - 2}" width="2" height="{_ROW + 4}" '
            f'fill="{MARK_COLOUR}"><title>{escape(m.step)}</title></rect>'
        )
    parts += _axis(first, last, scale, bottom, timeline.unit)
    height = bottom + _AXIS + 26
    parts += _legend(colours, sorted({m.step for m in marks}), height - 14, width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def step_colours(steps: Sequence[str]) -> Mapping[str, str]:
    """One colour a step: the shared one, or the next that is free."""
    others = iter(_OTHERS * (1 + len(steps) // len(_OTHERS)))
    return {step: COLOURS.get(step) or next(others) for step in steps}


def ticks(first: float, last: float, about: int = 8) -> list[float]:
    """Round numbers in [first, last], about `about` of them."""
    if not first < last:
        return [first]
    rough = (last - first) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    at = math.ceil(first / step)
    return [i * step for i in range(at, math.floor(last / step) + 1)]


def _axis(first: float, last: float, scale: float, y: float, unit: str) -> list[str]:
    parts = []
    for t in ticks(first, last):
        x = (t - first) * scale + _LEFT
        parts.append(f'<path d="M{x:.2f} {_TOP} V{y + 4}" stroke="#999" stroke-width="0.4"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle">{t:g}</text>')
    parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(unit)}</text>')
    return parts


def _legend(colours: Mapping[str, str], marks: Sequence[str], y: float, width: int) -> list[str]:
    parts, x = [], float(_LEFT)
    for name, colour in (*colours.items(), *((m, MARK_COLOUR) for m in marks)):
        room = 26 + 6.5 * len(name)
        if x + room > width:
            break
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
        x += room
    return parts


def _visit(visit: int) -> dict[str, object]:
    return {} if visit < 0 else {"args": {"visit": visit}}


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2
