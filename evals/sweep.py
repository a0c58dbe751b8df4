"""Thresholds x lengths x tasks: what is still missing in the results is measured, cell by cell."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from blasst.evals.errors import EvalsError
from blasst.evals.progress import Progress
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.thresholds import Point, key_of, name_of


@dataclass(frozen=True)
class Plan:
    """Every sample runs under every point; in the order of lengths, then of points."""

    points: Sequence[Point]
    samples: Sequence[Sample]

    def lengths(self) -> list[int]:
        return sorted({sample.length for sample in self.samples})

    def of_length(self, length: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.length == length]


def run_sweep(runner: Runner, plan: Plan, progress: Progress, stop_at: float | None = None) -> int:
    """Measure what is missing and return how many samples that were.

    stop_at: on time.monotonic(); no sample begins later. The deployment's own threshold is put
    back afterwards, also after an error or Ctrl-C.
    """
    runner.check_length(max(plan.lengths()))
    pending = count_pending(runner, plan)
    progress.restart(pending)
    if not pending:
        progress.say("everything is measured already")
        return 0
    runner.check_tokenizer(plan.samples[0])
    total = len(plan.samples) * len(plan.points)
    if pending < total:
        progress.say(f"resuming: {total - pending} of {total} samples are measured already")
    runner.store.append(_plan_record(runner, plan))
    try:
        for length in plan.lengths():
            _run_length(runner, plan, length, progress, stop_at)
    except BaseException:
        with contextlib.suppress(EvalsError):
            runner.restore()
        raise
    runner.restore()
    if progress.done < pending:
        progress.say(f"time is up: {pending - progress.done} samples are left out")
    return progress.done


def count_pending(runner: Runner, plan: Plan) -> int:
    return sum(len(runner.pending(plan.samples, point)) for point in plan.points)


def _run_length(
    runner: Runner, plan: Plan, length: int, progress: Progress, stop_at: float | None
) -> None:
    warm = False
    for point in plan.points:
        todo = runner.pending(plan.of_length(length), point)
        if not todo or (stop_at is not None and time.monotonic() >= stop_at):
            continue
        if not warm:
            runner.warm_up(todo[0])
            warm = True
        cell = f"{name_of(point)} at {length} tokens"

        def go_on(sample: Sample, cell: str = cell) -> bool:
            progress.step(f"{cell}, {sample.task}")
            return stop_at is None or time.monotonic() < stop_at

        runner.run_cell(point, todo, go_on)


def _plan_record(runner: Runner, plan: Plan) -> dict[str, object]:
    """Everything that is needed to do it again."""
    first = plan.samples[0]
    return {
        "kind": "plan",
        "fingerprint": runner.fingerprint,
        "server": runner.server,
        "thresholds": [key_of(point) for point in plan.points],
        "lengths": plan.lengths(),
        "tasks": list(dict.fromkeys(sample.task for sample in plan.samples)),
        "seeds": sorted({sample.seed for sample in plan.samples}),
        "samples": len(plan.samples),
        "prompt_format": first.prompt_format,
        "tokenizer_sha256": first.tokenizer_sha256,
        "max_tokens": runner.options.max_tokens,
        "blasst_version": version("blasst"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "command": ["blasst", *sys.argv[1:]],
        "at": time.time(),
    }
