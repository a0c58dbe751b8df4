"""Which threshold to serve with: the fastest first token among those that are GO everywhere."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from blasst.evals.cells import Results
from blasst.evals.errors import InputError
from blasst.evals.stats import student95
from blasst.evals.thresholds import Point, key_of, name_of
from blasst.evals.verdict import DEFAULT_MARGIN, Outcome, judge, overall


@dataclass(frozen=True)
class Speed:
    """ratio: TTFT over that of dense, geometric mean over prompts, then lengths; NaN where a length
    was not timed. high: its one-sided 95% bound; infinite with too few prompts."""

    ratio: float
    high: float


@dataclass(frozen=True)
class Candidate:
    """ttft: its ratio to that of dense."""

    point: Point
    outcome: Outcome
    ttft: Speed


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
            found.append(Candidate(point, overall(verdicts), _speed(results, point)))
    candidates = tuple(found)
    good = [c for c in found if c.outcome == "GO" and math.isfinite(c.ttft.ratio)]
    if faster := [c for c in good if c.ttft.high < 1.0]:
        best = min(faster, key=lambda c: c.ttft.ratio)
        words = f"GO at every length, TTFT {best.ttft.ratio - 1:+.1%} against dense"
        return Recommendation(best.point, "GO", words, candidates)
    if good and min(c.ttft.ratio for c in good) >= 1.0:
        return Recommendation(
            None, "NO-GO", "every threshold that is GO is slower than dense", candidates
        )
    if good:
        words = "no threshold that is GO is shown to be faster than dense; raise --timed"
        return Recommendation(None, "INCONCLUSIVE", words, candidates)
    if any(c.outcome == "GO" for c in found):
        return Recommendation(None, "INCONCLUSIVE", "TTFT is not measured", candidates)
    if any(c.outcome == "INCONCLUSIVE" for c in found) or not found:
        return Recommendation(
            None, "INCONCLUSIVE", "no threshold is shown to be GO at every length", candidates
        )
    return Recommendation(None, "NO-GO", "every threshold loses too much somewhere", candidates)


def as_words(found: Recommendation) -> str:
    lines = [
        f"{c.outcome:<12}  {name_of(c.point):<12}  TTFT {_said(c.ttft)}" for c in found.candidates
    ]
    return "\n".join([*lines, f"recommended: {name_of(found.point)} ({found.reason})"])


def _said(speed: Speed) -> str:
    if math.isnan(speed.ratio):
        return "not measured"
    bound = f"at most {speed.high - 1:+.1%}" if math.isfinite(speed.high) else "of too few prompts"
    return f"{speed.ratio - 1:+.1%} ({bound})"


def as_json(found: Recommendation) -> dict[str, object]:
    return {
        "recommended": key_of(found.point),
        "outcome": found.outcome,
        "reason": found.reason,
        "candidates": [
            {
                "threshold": key_of(c.point),
                "outcome": c.outcome,
                "ttft_ratio": c.ttft.ratio if math.isfinite(c.ttft.ratio) else None,
                "ttft_ratio_high": c.ttft.high if math.isfinite(c.ttft.high) else None,
            }
            for c in found.candidates
        ],
    }


def _speed(results: Results, point: Point) -> Speed:
    """Of prompts that were timed under both."""
    seconds: dict[tuple[str, int], dict[str, float]] = {}
    for record in results.times:
        key = record["threshold"], record["length"]
        if not record["ttft_s"] > 0:
            raise InputError(
                f"sample {record.get('sample', '?')} has a TTFT of {record['ttft_s']} s: the "
                "results were edited; measure again with another --out"
            )
        seconds.setdefault(key, {})[record["prompt_sha256"]] = float(record["ttft_s"])
    means, errors = [], []
    for length in results.lengths:
        ours = seconds.get((key_of(point), length), {})
        dense = seconds.get((key_of(None), length), {})
        logs = [math.log(ours[p] / dense[p]) for p in ours.keys() & dense.keys()]
        if not logs:
            return Speed(math.nan, math.nan)
        means.append(statistics.fmean(logs))
        variance = statistics.variance(logs) if len(logs) > 1 else math.inf
        errors.append((variance / len(logs), len(logs) - 1))
    mean, total = statistics.fmean(means), sum(square for square, _ in errors)
    if not math.isfinite(total):
        return Speed(math.exp(mean), math.inf)
    # Welch and Satterthwaite: a length of few prompts that scatter decides.
    shares = sum(square**2 / freedom for square, freedom in errors)
    freedom = total**2 / shares if shares else math.inf
    bound = mean + student95(freedom) * math.sqrt(total) / len(means)
    return Speed(math.exp(mean), math.exp(bound))
