"""Which threshold to serve with: the fastest first token among those that are GO everywhere."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from blasst.evals.cells import Results
from blasst.evals.thresholds import Point, key_of, name_of
from blasst.evals.verdict import DEFAULT_MARGIN, Outcome, judge, overall


@dataclass(frozen=True)
class Candidate:
    """ttft_ratio: TTFT over that of dense, geometric mean over the lengths; NaN: not measured."""

    point: Point
    outcome: Outcome
    ttft_ratio: float


@dataclass(frozen=True)
class Recommendation:
    """point None: serve dense. outcome: GO where a threshold is better than dense in both ways."""

    point: Point
    outcome: Outcome
    reason: str
    candidates: tuple[Candidate, ...]


def recommend(results: Results, margin: float = DEFAULT_MARGIN) -> Recommendation:
    """Among the measured thresholds. margin: points that may be lost. Raises InputError."""
    found = []
    for point in results.points:
        if point is not None:
            verdicts = judge(results, [point], margin)
            found.append(Candidate(point, overall(verdicts), _ttft_ratio(results, point)))
    good = [c for c in found if c.outcome == "GO" and math.isfinite(c.ttft_ratio)]
    candidates = tuple(found)
    if good:
        best = min(good, key=lambda c: c.ttft_ratio)
        if best.ttft_ratio < 1.0:
            words = f"GO at every length, TTFT {best.ttft_ratio - 1:+.1%} against dense"
            return Recommendation(best.point, "GO", words, candidates)
        return Recommendation(
            None, "NO-GO", "every threshold that is GO is slower than dense", candidates
        )
    if any(c.outcome == "GO" for c in found):
        return Recommendation(None, "INCONCLUSIVE", "TTFT is not measured", candidates)
    if any(c.outcome == "INCONCLUSIVE" for c in found) or not found:
        return Recommendation(
            None, "INCONCLUSIVE", "no threshold is shown to be GO at every length", candidates
        )
    return Recommendation(None, "NO-GO", "every threshold loses too much somewhere", candidates)


def as_words(found: Recommendation) -> str:
    lines = [
        f"{c.outcome:<12}  {name_of(c.point):<12}  TTFT "
        + ("not measured" if math.isnan(c.ttft_ratio) else f"{c.ttft_ratio - 1:+.1%}")
        for c in found.candidates
    ]
    return "\n".join([*lines, f"recommended: {name_of(found.point)} ({found.reason})"])


def as_json(found: Recommendation) -> dict[str, object]:
    return {
        "recommended": key_of(found.point),
        "outcome": found.outcome,
        "reason": found.reason,
        "candidates": [
            {
                "threshold": key_of(c.point),
                "outcome": c.outcome,
                "ttft_ratio": None if math.isnan(c.ttft_ratio) else c.ttft_ratio,
            }
            for c in found.candidates
        ],
    }


def _ttft_ratio(results: Results, point: Point) -> float:
    """Each length: mean over the tasks of both medians; NaN when a length was not timed."""
    logs = []
    for length in results.lengths:
        pairs = [
            (results.cell(point, task, length).ttft_s, results.cell(None, task, length).ttft_s)
            for task in results.tasks
        ]
        timed = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and b > 0]
        if not timed:
            return math.nan
        logs.append(math.log(sum(a for a, _ in timed) / sum(b for _, b in timed)))
    return math.exp(statistics.fmean(logs))
