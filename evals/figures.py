"""The report's summary plots: whole-suite scores, time against length, differences per task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from blasst.evals.cells import Results
from blasst.evals.plots import Chart, Series, Span, XyChart, line_chart, span_chart, xy_chart
from blasst.evals.thresholds import Point, name_of
from blasst.evals.verdict import LengthVerdict


def summary(results: Results) -> list[str]:
    """Score against threshold, score against skip rate, TTFT against length."""
    names = [name_of(point).removeprefix("MAG ") for point in results.points]
    score = [
        Series(f"{length} tokens", [mean_score(results, p, length) for p in results.points])
        for length in results.lengths
    ]
    rates = [
        Series(
            f"{length} tokens",
            [skip_rate(results, p, length) for p in results.points],
        )
        for length in results.lengths
    ]
    times = [
        Series(name_of(p), [mean_ttft(results, p, length) for length in results.lengths])
        for p in results.points
    ]
    return [
        line_chart(Chart("Mean score against threshold", "0..100", names, score)),
        xy_chart(
            XyChart("Mean score against skip rate", "skip rate", "0..100", rates, score, names)
        ),
        line_chart(
            Chart(
                "TTFT against length", "seconds", [str(n) for n in results.lengths], times, low=0.0
            )
        ),
    ]


def differences(verdicts: Sequence[LengthVerdict]) -> list[str]:
    """One plot a verdict: each task's difference from dense, and the mean over the tasks."""
    figures = []
    for verdict in verdicts:
        if not verdict.tasks:
            continue
        spans = [Span(t.task, t.difference, t.interval.low, t.interval.high) for t in verdict.tasks]
        spans.append(Span("mean", verdict.difference, verdict.low, verdict.high))
        title = f"{verdict.threshold} at {verdict.length} tokens: {verdict.outcome}"
        figures.append(span_chart(title, spans, -verdict.margin))
    return figures


def mean_score(results: Results, point: Point, length: int) -> float:
    """Over the tasks measured at this length; NaN without any, and where one of them is missing
    under this threshold: means of different tasks are no curve."""
    wanted = {c.task for c in results.cells if c.length == length and math.isfinite(c.score)}
    scores = [results.cell(point, task, length).score for task in sorted(wanted)]
    return _mean(scores) if all(map(math.isfinite, scores)) else math.nan


def mean_ttft(results: Results, point: Point, length: int) -> float:
    return _mean(results.cell(point, task, length).ttft_s for task in results.tasks)


def skip_rate(results: Results, point: Point, length: int) -> float:
    """Over the tiles of all tasks. Dense skips nothing, NaN where nothing was measured."""
    cells = [results.cell(point, task, length) for task in results.tasks]
    visited = sum(cell.visited for cell in cells)
    if point is None:
        return 0.0 if any(cell.samples for cell in cells) else math.nan
    return sum(cell.skipped for cell in cells) / visited if visited else math.nan


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan
