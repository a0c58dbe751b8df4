"""How long the rest of a sweep takes: a model in tokens, fitted to what was measured on the way."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Kind = tuple[str, int, bool]
"""Pass, nominal length, and whether the prompts run under a threshold."""
Vector = tuple[float, ...]

WAIT_S = 0.5
"""Until counters show what was sent; and until a threshold that was set is in force."""
_USUAL_POWER = 1.4
"""A prefill's time over its length, between its matrix products and its attention."""
_TRUST = 0.5
"""Weight of what is expected beforehand, in measured jobs."""
_UNKNOWN_TRUST = 0.01
_TOGETHER = 0.75
"""Decoding of c requests at once takes c ** -0.75 of the time, until it is measured."""
_SWEEPS = 60
_APART = 1.3


@dataclass(frozen=True)
class Ends:
    """Seconds at two lengths in tokens, and a power law through them."""

    low: tuple[int, float]
    high: tuple[int, float]

    def at(self, tokens: int) -> float:
        (n0, s0), (n1, s1) = self.low, self.high
        if not self._apart:
            return s1 * tokens / n1
        power = math.log(max(s1, 1e-9) / max(s0, 1e-9)) / math.log(n1 / n0)
        return s1 * float((tokens / n1) ** min(2.5, max(0.0, power)))

    @property
    def _apart(self) -> bool:
        """Far enough for what lies between to be seen above the noise."""
        return self.high[0] > _APART * self.low[0]

    def place(self, tokens: int) -> float:
        """0 at the low end, 1 at the high one, in between on a scale of ratios."""
        n0, n1 = self.low[0], self.high[0]
        if not self._apart:
            return 0.0
        return min(1.0, max(0.0, math.log(max(tokens, 1) / n0) / math.log(n1 / n0)))


@dataclass(frozen=True)
class Costs:
    """What a dense request takes that is alone, in seconds: its prefill, the gold answer's NLL, a
    token of the answer. measured False: only how they grow with the length is known."""

    prefill: Ends
    nll: Ends
    token_s: float
    measured: bool = True

    @classmethod
    def unknown(cls, low: int, high: int) -> Costs:
        """low, high: tokens of the shortest and longest prompt."""
        ends = Ends((low, (low / high) ** _USUAL_POWER), (high, 1.0))
        return cls(ends, ends, 0.01, measured=False)


@dataclass(frozen=True)
class Job:
    """What is sent together: one request, or those of a cell of the accuracy pass. waits: for a
    threshold, for counters. prompts: tokens, and whether the gold NLL is asked for."""

    kind: Kind
    waits: int
    prompts: tuple[tuple[int, bool], ...]
    answer_tokens: int

    def parts(self, costs: Costs) -> Vector:
        """Seconds of work as foreseen: prefills as far as they are short, as far as they are long,
        answers. Each has a factor that measurements correct."""
        short = long = 0.0
        for tokens, nll in self.prompts:
            seconds = costs.prefill.at(tokens) + (costs.nll.at(tokens) if nll else 0.0)
            place = costs.prefill.place(tokens) if costs.measured else 0.0
            short, long = short + seconds * (1 - place), long + seconds * place
        return (short, long, costs.token_s * self.answer_tokens)


class _Factors:
    """Of one pass: non-negative least squares of relative errors, drawn to what was foreseen."""

    def __init__(self, foreseen: Vector, trust: float) -> None:
        size = len(foreseen)
        weights = [trust / max(f, 1e-3) ** 2 for f in foreseen]
        self._square = [[weights[i] * (i == j) for j in range(size)] for i in range(size)]
        self._line = [w * f for w, f in zip(weights, foreseen, strict=True)]
        self.values = list(foreseen)

    def add(self, parts: Vector, seconds: float) -> None:
        weight = 1 / max(seconds, 1e-3) ** 2
        for i, part in enumerate(parts):
            self._line[i] += weight * part * seconds
            for j, other in enumerate(parts):
                self._square[i][j] += weight * part * other
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._square):
                rest = sum(row[j] * v for j, v in enumerate(self.values) if j != i)
                self.values[i] = max(0.0, (self._line[i] - rest) / row[i])

    def seconds(self, parts: Vector) -> float:
        return sum(f * p for f, p in zip(self.values, parts, strict=True))


@dataclass
class _Sum:
    """Of one kind: parts that are left, parts and seconds of work of what is done."""

    left: list[float]
    done: list[float]
    jobs: int = 0
    seconds: float = 0.0


class Eta:
    """Thread-safe. jobs: all that there is to do. concurrency: requests at once in the accuracy
    pass. workers: endpoints that share the jobs."""

    def __init__(
        self, jobs: Iterable[Job], costs: Costs, concurrency: int = 1, workers: int = 1
    ) -> None:
        self._costs, self._concurrency, self._workers = costs, concurrency, workers
        self._sums: dict[Kind, _Sum] = {}
        self._factors: dict[str, _Factors] = {}
        self._waits_left, self._waits, self._waited_s = 0, _TRUST, _TRUST * WAIT_S
        self._lock = threading.Lock()
        for job in jobs:
            self._waits_left += job.waits
            found = self._of(job.kind).left
            found[:] = [a + b for a, b in zip(found, job.parts(costs), strict=True)]

    def done(self, jobs: Sequence[Job], seconds: float, waited_s: float | None = None) -> None:
        """Jobs that took so long one after the other, and how much of it were waits (None: not
        known)."""
        with self._lock:
            waits = sum(job.waits for job in jobs)
            if waited_s is None:
                waited_s = min(seconds, waits * self._wait_s)
            self._waits_left = max(0, self._waits_left - waits)
            self._waits, self._waited_s = self._waits + waits, self._waited_s + waited_s
            parts = [job.parts(self._costs) for job in jobs]
            foreseen = [
                self._factors_of(j.kind[0]).seconds(p) for j, p in zip(jobs, parts, strict=True)
            ]
            work = max(0.0, seconds - waited_s) / max(sum(foreseen), 1e-9)
            for job, part, share in zip(jobs, parts, foreseen, strict=True):
                found = self._of(job.kind)
                found.left = [max(0.0, a - b) for a, b in zip(found.left, part, strict=True)]
                found.done = [a + b for a, b in zip(found.done, part, strict=True)]
                found.jobs, found.seconds = found.jobs + 1, found.seconds + work * share
                self._factors_of(job.kind[0]).add(part, work * share)

    def left(self) -> float:
        """Seconds."""
        with self._lock:
            work = sum(map(self._left_of, list(self._sums)))
            return (work + self._waits_left * self._wait_s) / self._workers

    @property
    def _wait_s(self) -> float:
        return self._waited_s / self._waits

    def _left_of(self, kind: Kind) -> float:
        return self._factor_of(kind) * self._factors_of(kind[0]).seconds(tuple(self._of(kind).left))

    def _factor_of(self, kind: Kind) -> float:
        """By which jobs of this kind take longer than the model of their pass has it."""
        which, length, voting = kind
        found, before = self._of(kind), 1.0
        if which == "ttft" and voting:  # what a threshold saves, answers have shown
            before = self._factor_of(("accuracy", length, True))
            before /= self._factor_of(("accuracy", length, False))
        foreseen = self._factors_of(which).seconds(tuple(found.done))
        # One more job, as foreseen: the first ones of a kind say little.
        spare = foreseen / found.jobs if found.jobs else 1.0
        return max(1e-3, found.seconds + before * spare) / max(1e-3, foreseen + spare)

    def _of(self, kind: Kind) -> _Sum:
        return self._sums.setdefault(kind, _Sum([0.0] * 3, [0.0] * 3))

    def _factors_of(self, which: str) -> _Factors:
        if which not in self._factors:
            together = self._concurrency if which == "accuracy" else 1
            measured, before = self._costs.measured, self._factors.get("accuracy")
            prefill = 1.0 if measured or before is None else before.values[0]
            foreseen = (prefill, prefill, together**-_TOGETHER)
            self._factors[which] = _Factors(foreseen, _TRUST if measured else _UNKNOWN_TRUST)
        return self._factors[which]
