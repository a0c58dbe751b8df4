"""GO, NO-GO or INCONCLUSIVE: is a threshold at most `margin` points worse than dense?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from blasst.evals.cells import Results
from blasst.evals.errors import InputError
from blasst.evals.metrics import token_agreement
from blasst.evals.stats import (
    Interval,
    fewest_pairs,
    mcnemar_exact,
    mean_difference,
    two_sided,
)
from blasst.evals.store import Record
from blasst.evals.thresholds import Point, key_of, name_of

Outcome = Literal["GO", "NO-GO", "INCONCLUSIVE"]
EXIT_CODES: dict[Outcome, int] = {"GO": 0, "NO-GO": 1, "INCONCLUSIVE": 2}
DEFAULT_MARGIN = 1.0
_FEWEST = 5
"""Pairs of each task. With one or two of 13 tasks each, 7 to 10% of thresholds that lose nothing
were NO-GO (120 simulated experiments); with five, 2%."""
_DENSE_FLOOR = 10.0
"""Points: a model that can do less than this without a threshold has nothing to lose."""


@dataclass(frozen=True)
class TaskDifference:
    """Points (0..100). interval: 95%. p: exact McNemar over the samples that changed. nll: mean
    increase of the gold NLL, nats a token. agreement: token agreement with the dense answers."""

    task: str
    pairs: int
    dense: float
    score: float
    interval: Interval
    worse: int
    better: int
    p: float
    nll: float
    agreement: float

    @property
    def difference(self) -> float:
        return self.score - self.dense


@dataclass(frozen=True)
class LengthVerdict:
    """One threshold at one length. difference, low, high, detectable, margin: points."""

    threshold: str
    length: int
    outcome: Outcome
    reason: str
    pairs: int
    needed: int
    difference: float
    low: float
    high: float
    detectable: float
    margin: float
    nll: float
    agreement: float
    tasks: tuple[TaskDifference, ...]


def judge(
    results: Results, points: Sequence[Point] | None = None, margin: float = DEFAULT_MARGIN
) -> list[LengthVerdict]:
    """For each point (None: all but dense) and each length. margin: points. Raises InputError."""
    if not 0 < margin < 100:
        raise InputError(f"margin {margin:g}: give points above 0 and below 100, usually 1")
    chosen = [p for p in results.points if p is not None] if points is None else list(points)
    known = {key_of(p) for p in results.points}
    for point in chosen:
        if key_of(point) not in known:
            raise InputError(f"the results hold no {name_of(point)}; measure it first")
    return [
        _judge_length(results, point, length, margin)
        for point in chosen
        for length in results.lengths
    ]


def overall(verdicts: Sequence[LengthVerdict]) -> Outcome:
    """NO-GO if any is, else INCONCLUSIVE if any is (or there are none), else GO."""
    found = {verdict.outcome for verdict in verdicts}
    if "NO-GO" in found:
        return "NO-GO"
    return "INCONCLUSIVE" if "INCONCLUSIVE" in found or not found else "GO"


def as_words(verdicts: Sequence[LengthVerdict]) -> str:
    """One line a verdict, and the outcome of all of them."""
    lines = [
        f"{v.outcome:<12}  {v.threshold:<12} {v.length:>7} tokens  {_points(v)}  {v.reason}"
        for v in verdicts
    ]
    return "\n".join([*lines, f"overall: {overall(verdicts)}"])


def as_json(verdicts: Sequence[LengthVerdict]) -> dict[str, Any]:
    """NaN becomes null."""
    return {
        "outcome": overall(verdicts),
        "exit_code": EXIT_CODES[overall(verdicts)],
        "verdicts": [_finite(asdict(verdict)) for verdict in verdicts],
    }


def _judge_length(results: Results, point: Point, length: int, margin: float) -> LengthVerdict:
    found = [
        (task, both)
        for task in results.tasks
        if (both := _pairs(results.accuracy, key_of(point), task, length))
    ]
    tasks = tuple(_task(task, both) for task, both in found)
    pairs, needed = sum(t.pairs for t in tasks), fewest_pairs(margin / 100)
    low = high = detectable = difference = math.nan
    if tasks:
        strata = [[vote["match"] - dense["match"] for dense, vote in both] for _, both in found]
        mean = mean_difference(strata)
        difference, detectable = 100 * mean.mean, 100 * mean.detectable
        low, high = 100 * mean.bounds.low, 100 * mean.bounds.high
    dense = statistics.fmean(t.dense for t in tasks) if tasks else math.nan
    missing = [task for task in results.tasks if task not in {t.task for t in tasks}]
    outcome, reason = _decide(
        low,
        high,
        margin,
        dense=dense,
        tasks=tasks,
        missing=missing,
        idle=_idle(results, point, found),
    )
    return LengthVerdict(
        threshold=name_of(point),
        length=length,
        outcome=outcome,
        reason=reason,
        pairs=pairs,
        needed=needed,
        difference=difference,
        low=low,
        high=high,
        detectable=detectable,
        margin=margin,
        nll=_mean(t.nll for t in tasks if math.isfinite(t.nll)),
        agreement=statistics.fmean(t.agreement for t in tasks) if tasks else math.nan,
        tasks=tasks,
    )


def _decide(
    low: float,
    high: float,
    margin: float,
    *,
    dense: float,
    tasks: Sequence[TaskDifference],
    missing: list[str],
    idle: str,
) -> tuple[Outcome, str]:
    if not tasks:
        return "INCONCLUSIVE", "no sample is measured both dense and under this threshold"
    least = min(tasks, key=lambda t: t.pairs)
    if least.pairs < _FEWEST:
        return "INCONCLUSIVE", (
            f"{least.pairs} pairs of {least.task}; under {_FEWEST} a task's scatter is not known"
        )
    # Of the mean over all tasks, those that are missing being as good as dense.
    if high * len(tasks) / (len(tasks) + len(missing)) < -margin:
        return "NO-GO", f"worse by more than {margin:g} points (95% sure)"
    if missing:
        return "INCONCLUSIVE", f"not measured: {', '.join(missing)}"
    if idle:
        return "INCONCLUSIVE", idle
    needed = fewest_pairs(margin / 100)
    if least.pairs * len(tasks) < needed:
        pairs = sum(t.pairs for t in tasks)
        few = f", but {least.pairs} of {least.task}" if least.pairs * len(tasks) < pairs else ""
        return "INCONCLUSIVE", (
            f"{pairs} pairs{few}; under {needed}, evenly over the tasks, a loss of {margin:g} "
            "cannot be excluded"
        )
    if dense < _DENSE_FLOOR:
        return "INCONCLUSIVE", f"dense scores {dense:.1f}: nothing can be lost, read the NLL"
    if low > -margin:
        return "GO", f"at most {max(0.0, -low):.2f} points worse (95% sure)"
    return "INCONCLUSIVE", f"a loss of {margin:g} points is neither excluded nor shown"


def _idle(
    results: Results, point: Point, found: Sequence[tuple[str, list[tuple[Record, Record]]]]
) -> str:
    """In words, if the threshold was not in force for some prompts: they say nothing about it."""
    floor = results.plan["server"].get("min_context") or 0
    votes = [vote for _, both in found for _, vote in both]
    short = sum(vote["prompt_tokens"] < floor for vote in votes)
    if point is None or not short:
        return ""
    return (
        f"{short} of {len(votes)} prompts are below min_context {floor} and ran dense; measure "
        "again with a smaller --min-context"
    )


def _pairs(
    records: Sequence[Record], threshold: str, task: str, length: int
) -> list[tuple[Record, Record]]:
    """(dense, with threshold) of the same token ids, and of the same answer budget where the
    records say theirs: a longer answer finds more."""
    here = [r for r in records if r["task"] == task and r["length"] == length]
    dense = {r["prompt_sha256"]: r for r in here if r["threshold"] == "dense"}
    return [
        (dense[r["prompt_sha256"]], r)
        for r in here
        if r["threshold"] == threshold
        and r["prompt_sha256"] in dense
        and _same_budget(r.get("budget"), dense[r["prompt_sha256"]].get("budget"))
    ]


def _same_budget(one: object, other: object) -> bool:
    return one is None or other is None or one == other


def _task(task: str, pairs: Sequence[tuple[Record, Record]]) -> TaskDifference:
    differences = [vote["match"] - dense["match"] for dense, vote in pairs]
    worse, better = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    interval = two_sided(differences)
    return TaskDifference(
        task=task,
        pairs=len(pairs),
        dense=100 * statistics.fmean(dense["match"] for dense, _ in pairs),
        score=100 * statistics.fmean(vote["match"] for _, vote in pairs),
        interval=Interval(100 * interval.low, 100 * interval.high),
        worse=worse,
        better=better,
        p=mcnemar_exact(worse, better),
        nll=_mean(
            vote["gold_nll"] - dense["gold_nll"]
            for dense, vote in pairs
            if vote["gold_nll"] is not None and dense["gold_nll"] is not None
        ),
        agreement=statistics.fmean(
            token_agreement(*_answers(vote, dense)) for dense, vote in pairs
        ),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else math.nan


def _answers(vote: Record, dense: Record) -> tuple[list[int | str], list[int | str]]:
    """Token ids where the server gave both, else words."""
    if vote.get("tokens") and dense.get("tokens"):
        return list(vote["tokens"]), list(dense["tokens"])
    return vote["prediction"].split(), dense["prediction"].split()


def _points(v: LengthVerdict) -> str:
    if not math.isfinite(v.difference):
        return "difference not measured"
    nll = f"{v.nll:+.4f}" if math.isfinite(v.nll) else "not measured"
    return (
        f"{v.difference:+.2f} points [{v.low:+.2f}, {v.high:+.2f}], {v.pairs} pairs, detectable "
        f"{v.detectable:.2f}, NLL {nll}, agreement {v.agreement:.1%};"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
