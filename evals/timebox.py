"""A sweep under a time limit: how long the next group will take, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_POWER = 1.5
"""A prefill's time over its length: between its matrix products and its attention."""


def work_of(length: int) -> float:
    """Time of a measurement at `length` tokens, in no unit."""
    return float(length**_POWER)


@dataclass(frozen=True)
class TimeBox:
    """On time.monotonic(). No group begins that is not expected to end by `end`; one that is
    still running at `hard_end` is dropped whole."""

    end: float
    hard_end: float


class Pace:
    """Seconds of one measurement at each length, the latest groups weighing most."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, length: int, seconds: float) -> None:
        before = self._seconds.get(length, seconds)
        self._seconds[length] = (before + seconds) / 2

    def predict(self, length: int) -> float | None:
        """Scaled from the nearest length where this one was not measured; None before any was."""
        if not self._seconds:
            return None
        near = min(self._seconds, key=lambda known: abs(known - length))
        return self._seconds[near] * work_of(length) / work_of(near)


Cell = tuple[str, int]
"""Task and length."""


def left_out_words(planned: Iterable[Cell], missing: Iterable[Cell]) -> str:
    """One line; both hold a task and length once for each sample."""
    total, gone = Counter(planned), Counter(missing)
    parts = []
    if whole := [_name(cell) for cell, n in gone.items() if n == total[cell]]:
        parts.append("left out: " + ", ".join(whole))
    fewer: dict[tuple[int, int], list[str]] = {}
    for cell, n in gone.items():
        if n < total[cell]:
            fewer.setdefault((total[cell] - n, total[cell]), []).append(_name(cell))
    for (had, wanted), names in fewer.items():
        plural = "" if had == 1 else "s"
        parts.append(f"{had} sample{plural} instead of {wanted}: " + ", ".join(names))
    return "; ".join(parts)


def _name(cell: Cell) -> str:
    return f"{cell[0]} at {cell[1]}"
