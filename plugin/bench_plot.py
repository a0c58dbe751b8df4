"""The picture of a TTFT table: time over stock against skip rate, one line a size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from blasst.plugin.bench_table import Cell, votes

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 60, 450, 34, 290
LEAST, MOST = 0.5, 1.1
"""Ends of the axis; what lies outside is drawn at the edge."""


def svg(cells: Sequence[Cell]) -> str:
    """One panel, without the cells that did not vote; an empty one when none did."""
    lines = votes(cells)
    parts = [_text(LEFT, 18, "time to first token over stock, against skip rate", size=13)]
    for i in range(6):
        x = i / 5
        parts.append(_path([(x, LEAST), (x, MOST)], "#ddd"))
        parts.append(_text(LEFT + x * (RIGHT - LEFT), BOTTOM + 16, f"{x:.0%}", "middle"))
    for i in range(7):
        y = LEAST + (MOST - LEAST) * i / 6
        parts.append(_path([(0, y), (1, y)], "#ddd"))
        parts.append(_text(LEFT - 6, _at(0, y)[1] + 4, f"{y:.2f}", "end"))
    parts.append(_path([(0, 1), (1, 1)], "#000"))
    for i, ((tokens, batch, page), points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(_path(points, colour))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
                  for x, y in (_at(*p) for p in points)]  # fmt: skip
        name = f"{tokens} tokens" + (f" x {batch}" if batch > 1 else "")
        name += f", pages of {page}" if page else ""
        parts.append(_text(RIGHT + 16, TOP + 14 + 16 * i, name, colour=colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _at(skip_rate: float, over: float) -> tuple[float, float]:
    share = (min(max(over, LEAST), MOST) - LEAST) / (MOST - LEAST)
    return LEFT + skip_rate * (RIGHT - LEFT), BOTTOM - share * (BOTTOM - TOP)


def _path(points: Iterable[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (_at(*p) for p in points))
    return f'<polyline points="{path}" fill="none" stroke="{colour}"/>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 11, colour: str = "#000"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
