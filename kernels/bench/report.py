"""The result of `blasst bench attention` as a table and as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

from blasst.kernels.bench.attention import Cell
from blasst.kernels.instruments.timeline import ticks

FLOOR = 0.85
"""Of the time of FlashAttention-4 dense on an H200: what its tensor cores need at the rate of a
large matrix product. Skipping a share s of P @ V leaves FLOOR * (1 - s / 2)."""

_At = Callable[[float, float], str]
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 340, 56, 34, 130, 44


def markdown(
    cells: Sequence[Cell], where: Mapping[str, object], left_out: Mapping[str, str], command: str
) -> str:
    """The table of a measurement, with the command that repeats it."""
    gpu = where.get("gpu")
    packages = where.get("packages")
    versions = [f"torch {where['torch']}"]
    if isinstance(packages, Mapping):
        versions += [f"{name} {v}" for name, v in packages.items()]
    place = [str(where["date"]), f"commit {where['commit']}", str(gpu or where["cpu"]), *versions]
    place += [] if gpu else [f"{where['threads']} threads", f"load {where['load_1min']}"]
    peers = any(c.over_peer is not None for c in cells)
    titles = ["problem", "tokens", "what", "skip rate", "ms" if gpu else "wall ms"]
    titles += ["TFLOP/s"] if gpu else []
    titles += ["over dense", *(["over peer"] if peers else [])]
    titles += [] if gpu else ["cpu ms", "cpu over dense"]
    lines = [", ".join(place) + ".", "", f"    {command}", ""]
    lines += [f"Left out: {reason}" for reason in left_out.values()] + [""] * bool(left_out)
    lines += ["| " + " | ".join(titles) + " |", "|---|--:|---|" + "--:|" * (len(titles) - 3)]
    for c in cells:
        row = [c.problem, str(c.tokens), c.what, f"{c.skip_rate:.1%}", f"{c.wall_s * 1e3:.1f}"]
        if gpu:
            row[-1] = f"{c.wall_s * 1e3:.3f}"
            row.append(f"{c.tflops:.0f}")
        row.append(f"{c.over_dense:.2f}")
        if peers:
            row.append("" if c.over_peer is None else f"{c.over_peer:.3f}")
        if not gpu:
            row += [f"{c.cpu_s * 1e3:.1f}", f"{c.cpu_over_dense:.2f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def svg(cells: Sequence[Cell], *, floor: bool = True) -> str:
    """Time against skip rate, one panel a problem; floor: of an H200, drawn in.

    Times are over the first peer's, or over our own dense where there is none.
    """
    panels = list(dict.fromkeys((c.problem, c.tokens) for c in cells))
    parts = []
    for i, (problem, tokens) in enumerate(panels):
        mine = [c for c in cells if (c.problem, c.tokens) == (problem, tokens)]
        parts.append(f'<g transform="translate(0 {i * _HEIGHT})">{_panel(mine, floor)}</g>')
    height = max(1, len(panels)) * _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def _panel(cells: Sequence[Cell], floor: bool) -> str:
    peers = any(c.over_peer is not None for c in cells)
    lines: dict[str, list[tuple[float, float]]] = {}
    for c in cells:
        over = c.over_peer if peers and c.over_peer is not None else c.over_dense
        # "vote 50%" and "vote 95%" are one line; dense and peers are flat.
        name = re.sub(r" \d+%", "", c.what)
        lines.setdefault(name, []).append((c.skip_rate, over))
    for name, points in lines.items():
        if "vote" not in name:
            level = sum(y for _, y in points) / len(points)
            lines[name] = [(0.0, level), (1.0, level)]
    top = max([1.2, *(y for points in lines.values() for _, y in points)]) * 1.05

    def at(x: float, y: float) -> str:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        return f"{_LEFT + x * (right - _LEFT):.1f},{bottom - y / top * (bottom - _TOP):.1f}"

    title = f"{cells[0].problem}, {cells[0].tokens} tokens"
    unit = "time over the first peer's" if peers else "time over our dense"
    parts = [
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}: {unit} against skip rate</text>'
    ]
    parts += _grid(at, top)
    if floor:
        least = [(s / 20, FLOOR * (1 - s / 40)) for s in range(21)]
        parts.append(_line("floor", least, "#555", at, dashed=True))
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 12}" y="{_TOP + 12}">- - floor {FLOOR} (1 - s/2)</text>'
        )
    for i, (name, points) in enumerate(lines.items()):
        parts.append(_line(name, sorted(points), _COLOURS[i % len(_COLOURS)], at, dots=True))
        x, y = _WIDTH - _RIGHT + 12, _TOP + 30 + 16 * i
        parts.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" '
                     f'fill="{_COLOURS[i % len(_COLOURS)]}"/>')  # fmt: skip
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
    return "".join(parts)


def _grid(at: _At, top: float) -> list[str]:
    parts = []
    for x in ticks(0.0, 1.0, 5):
        parts.append(f'<polyline points="{at(x, 0)} {at(x, top)}" stroke="#ddd"/>')
        left, below = at(x, 0).split(",")
        parts.append(
            f'<text x="{left}" y="{float(below) + 14}" text-anchor="middle">{x:.0%}</text>'
        )
    for y in ticks(0.0, top):
        parts.append(f'<polyline points="{at(0, y)} {at(1, y)}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{float(at(0, y).split(",")[1]) + 4}" '
            f'text-anchor="end">{y:.2f}</text>'
        )
    return parts


def _line(
    name: str,
    points: Sequence[tuple[float, float]],
    colour: str,
    at: _At,
    *,
    dashed: bool = False,
    dots: bool = False,
) -> str:
    path = " ".join(at(x, y) for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}>'
        f"<title>{escape(name)}"
    )
    marks = [at(x, y).split(",") for x, y in points] if dots and "vote" in name else []
    circles = (f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in marks)
    return line + "</title></polyline>" + "".join(circles)
