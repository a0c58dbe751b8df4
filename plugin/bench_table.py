"""The table of a TTFT benchmark: medians, how far noise may have moved them, break-even."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
STOCK = "stock"
LARGE_CHUNKS = ", large chunks"
"""Ends the names of those whose steps are not of the usual size."""

Rounds = Mapping[int, Sequence[float]]
"""Of one contender: seconds to the token of each prompt, by round."""


@dataclass
class Cell:
    """One line. page: tokens of a cache page, None for vLLM's default; ttft_s: mean of the prompts
    that came at once, median over the rounds; over_stock: median over the rounds of that mean over
    stock's in the same round, low and high its interval; last_s: of the slowest prompt."""

    tokens: int
    batch: int
    page: int | None
    contender: str
    skip_rate: float | None
    ttft_s: float
    over_stock: float
    low: float
    high: float
    last_s: float
    last_over_stock: float
    times_s: list[list[float]]


def cells_of(
    size: tuple[int, int, int | None],
    times: Mapping[str, Rounds],
    skip_rates: Mapping[str, float],
) -> list[Cell]:
    """The lines of one size (tokens, batch, page); those without a round that stock ran, too, are
    left out."""
    found = []
    for name, rounds in times.items():
        both = sorted(rounds.keys() & times[STOCK].keys())
        if not both:
            continue
        mean = [statistics.mean(rounds[i]) / statistics.mean(times[STOCK][i]) for i in both]
        last = [max(rounds[i]) / max(times[STOCK][i]) for i in both]
        low, high = interval(mean)
        found.append(
            Cell(
                *size,
                contender=name,
                skip_rate=skip_rates.get(name),
                ttft_s=statistics.median(statistics.mean(r) for r in rounds.values()),
                over_stock=statistics.median(mean),
                low=low,
                high=high,
                last_s=statistics.median(max(r) for r in rounds.values()),
                last_over_stock=statistics.median(last),
                times_s=[list(r) for r in rounds.values()],
            )
        )
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Holds the true median with a probability of CONFIDENCE, whatever the distribution: the
    narrowest pair of the sorted values that does, or the extremes where so few cannot."""
    ordered, n, k = sorted(values), len(values), 1
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) <= (1 - CONFIDENCE) * 2**n:
        k += 1
    return ordered[k - 1], ordered[n - k]


def markdown(cells: Sequence[Cell], where: Mapping[str, Any]) -> str:
    """One table; ratios over the stock backend of the same rounds."""
    lines = [
        f"{where['gpu']}, vLLM {where['vllm']}, torch {where['torch']}, chunks of "
        f"{where['chunk']} tokens (large ones: {where['large']}), pages of "
        f"{where['page'] or 'the default size'} where no other is named",
        "",
        "| prompt | at once | page | contender | skipped | TTFT, ms | over stock | interval | "
        "last, ms | over stock | rounds |",
        "|--:|--:|--:|---|--:|--:|--:|---|--:|--:|--:|",
    ]
    for c in cells:
        skipped = "" if c.skip_rate is None else f"{c.skip_rate:.1%}"
        last = f"{1e3 * c.last_s:.1f} | {c.last_over_stock:.3f}" if c.batch > 1 else "|"
        lines.append(
            f"| {c.tokens} | {c.batch} | {c.page or ''} | {c.contender} | {skipped} | "
            f"{1e3 * c.ttft_s:.1f} | {c.over_stock:.4f} | {c.low:.4f} to {c.high:.4f} | {last} | "
            f"{len(c.times_s)} |"
        )
    lines += [
        "",
        "| prompt | at once | page | a vote costs no time from | worst | best |",
        "|--:|--:|--:|--:|---|---|",
    ]
    for (tokens, batch, page), points in votes(cells).items():
        worst, best = max(points, key=lambda p: p[1]), min(points, key=lambda p: p[1])
        ends = " | ".join(f"{ratio - 1:+.1%} at {rate:.0%}" for rate, ratio in (worst, best))
        lines.append(f"| {tokens} | {batch} | {page or ''} | {break_even(points)} | {ends} |")
    return "\n".join(lines) + "\n"


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """The skip rate from which time to first token is not above stock. points: (skip rate, time
    over stock), ascending; between two of them the line is taken."""
    above = [i for i, (_, ratio) in enumerate(points) if ratio > 1]
    if not above:
        return f"{points[0][0]:.0%}"
    if above[-1] + 1 == len(points):
        return f"none up to {points[-1][0]:.0%}"
    (x0, y0), (x1, y1) = points[above[-1] : above[-1] + 2]
    return f"{x0 + (y0 - 1) / (y0 - y1) * (x1 - x0):.0%}"


def votes(
    cells: Sequence[Cell],
) -> dict[tuple[int, int, int | None], list[tuple[float, float]]]:
    """(skip rate, time over stock) of the cells that vote, by size; steps as large as stock's."""
    found: dict[tuple[int, int, int | None], list[tuple[float, float]]] = {}
    for c in cells:
        if c.skip_rate is not None and not c.contender.endswith(LARGE_CHUNKS):
            found.setdefault((c.tokens, c.batch, c.page), []).append((c.skip_rate, c.over_stock))
    return {size: sorted(points) for size, points in found.items()}
