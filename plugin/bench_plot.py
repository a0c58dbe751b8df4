"""The picture of a TTFT table: time over stock against skip rate, one line a size."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Protocol

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 60, 450, 34, 290
LEAST, MOST = 0.6, 1.1
"""Ends of the axis; what lies outside is drawn at the edge."""


class Point(Protocol):
    """What is drawn of a cell; those without a skip rate are left out."""

    tokens: int
    batch: int
    skip_rate: float | None
    over_stock: float


def svg(cells: Iterable[Point]) -> str:
    """One panel; an empty one when nothing voted."""
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for c in cells:
        if c.skip_rate is not None:
            lines.setdefault((c.tokens, c.batch), []).append((c.skip_rate, c.over_stock))
    parts = [_text(LEFT, 18, "time to first token over stock, against skip rate", size=13)]
    for i in range(6):
        x, y = i / 5, LEAST + (MOST - LEAST) * i / 5
        parts += [_path([(x, LEAST), (x, MOST)], "#ddd"), _path([(0, y), (1, y)], "#ddd")]
        parts.append(_text(LEFT + x * (RIGHT - LEFT), BOTTOM + 16, f"{x:.0%}", "middle"))
        parts.append(_text(LEFT - 6, _at(0, y)[1] + 4, f"{y:.2f}", "end"))
    parts.append(_path([(0, 1), (1, 1)], "#000"))
    for i, ((tokens, batch), points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(_path(sorted(points), colour))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
                  for x, y in (_at(*p) for p in points)]  # fmt: skip
        name = f"{tokens} tokens" + (f" x {batch}" if batch > 1 else "")
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
