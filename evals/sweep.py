"""Thresholds x lengths x tasks: what is still missing in the results is measured.

A group (a task at a length) is measured under every threshold before the next group begins.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from blasst.evals.errors import EvalsError, InputError
from blasst.evals.eta import Costs, Eta, Job
from blasst.evals.machine import describe_machine
from blasst.evals.progress import Progress
from blasst.evals.runner import Pass, Runner
from blasst.evals.samples import Sample
from blasst.evals.store import Record
from blasst.evals.thresholds import Point, key_of, name_of
from blasst.evals.timebox import Pace, TimeBox, left_out_words

_MARGIN = 1.2
"""On what a group is expected to take: the machine may have a slower moment."""


@dataclass(frozen=True)
class Group:
    """Samples of one task and length that are compared with each other under all points."""

    which: Pass
    task: str
    length: int
    samples: tuple[Sample, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plan:
    """Every sample runs under every point. by_round: the first sample of every group before any
    second one. chunk: samples of a task and length that stay together under all points (0: all).
    timed: None measures time and answers in one pass, one request at a time; a number makes an
    accuracy pass first and then times so many samples of each task and length. notes: for the
    report. machine: a line about it, as it was before the server. data: where the texts are from.
    """

    points: Sequence[Point]
    samples: Sequence[Sample]
    by_round: bool = False
    chunk: int = 0
    timed: int | None = None
    notes: Sequence[str] = ()
    machine: str = field(default_factory=describe_machine)
    data: Mapping[str, str] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        return sorted({sample.length for sample in self.samples})

    def measurements(self) -> list[tuple[Pass, Sample]]:
        """All of them, each once for every point."""
        if self.timed is None:
            return [("both", sample) for sample in self.samples]
        first = [s for s in self.samples if s.index < self.timed]
        answers: list[tuple[Pass, Sample]] = [("accuracy", sample) for sample in self.samples]
        return answers + [("ttft", sample) for sample in first]

    def groups(self) -> list[Group]:
        """Answers before times, short lengths first. The points begin with another one in each
        group, so that a machine that becomes slower or faster favours none."""
        found: dict[tuple[bool, int, int, str, int], list[Sample]] = {}
        for which, sample in self.measurements():
            size = 1 if self.by_round or which == "ttft" else self.chunk
            number = sample.index // size if size else 0
            rank = number if self.by_round else 0
            key = (which == "ttft", rank, sample.length, sample.task, number)
            found.setdefault(key, []).append(sample)
        # By pass, round and length only: tasks stay in their own order.
        groups = sorted(found.items(), key=lambda item: item[0][:3])
        kind: Pass = "both" if self.timed is None else "accuracy"
        return [
            Group(
                "ttft" if timed else kind,
                task,
                length,
                tuple(samples),
                _rotated(self.points, number),
            )
            for number, ((timed, _, length, task, _), samples) in enumerate(groups)
        ]


def run_sweep(
    runner: Runner,
    plan: Plan,
    progress: Progress,
    box: TimeBox | None = None,
    costs: Costs | None = None,
) -> int:
    """Measure what is missing and return how many measurements that were.

    costs: of the estimate, for the time left. box: groups that do not fit are left out whole, and
    one line says which; the first one always runs. The deployment's own threshold is put back
    afterwards, also after an error or Ctrl-C.
    """
    pending = announce(runner, plan, progress, box, costs=costs)
    if not pending:
        return 0
    try:
        left = _run_groups(runner, plan.groups(), progress, box)
    except BaseException:
        with contextlib.suppress(EvalsError):
            runner.restore()
        raise
    runner.restore()
    if left:
        planned = [(s.task, s.length) for s in plan.samples]
        missing = [(s.task, s.length) for group in left for s in group.samples]
        progress.say("the time is up; " + left_out_words(planned, missing))
    return pending - count_pending(runner, plan)


def announce(
    runner: Runner,
    plan: Plan,
    progress: Progress,
    box: TimeBox | None = None,
    others: Sequence[Runner] = (),
    costs: Costs | None = None,
    workers: int = 1,
) -> int:
    """Check that the plan can run, write it down, set the progress; how much there is to do."""
    check_plan(runner, plan)
    killed = [(r, words) for r in (runner, *others) if (words := r.recover())]
    for _, words in killed:
        progress.say(words)
    pending = count_pending(runner, plan)
    if not pending:
        progress.say("everything is measured already")
        for other, _ in killed:
            other.restore()
        return 0
    prompts = [len(sample.prompt) for sample in plan.samples]
    if short := sum(tokens < runner.floor for tokens in prompts):
        progress.say(
            f"{short} of {len(prompts)} prompts are below min_context {runner.floor} and run dense "
            "under every threshold: no verdict will be GO where they are (--min-context)"
        )
    total = len(plan.measurements()) * len(plan.points)
    if missing := runner.identity.not_noted:
        progress.say(
            f"the results do not note their server's {', '.join(missing)}: taken as this one's"
        )
    if pending < total:
        progress.say(f"resuming: {total - pending} of {total} measurements are there already")
    before = {r.sidecar.url: r.before() for r in (runner, *others)}
    runner.store.append(_plan_record(runner, plan) | {"before": before})
    known = costs or Costs.unknown(min(prompts), max(prompts))
    eta = Eta(all_jobs(runner, plan), known, runner.options.concurrency, workers)
    progress.restart(pending, eta, None if box is None else box.end)
    return pending


def check_plan(runner: Runner, plan: Plan) -> None:
    """Raises InputError for samples that this server cannot measure, or in which no threshold would
    be in force."""
    runner.check_length(max(max(plan.lengths()), max(sample.need for sample in plan.samples)))
    if not count_pending(runner, plan):
        return
    runner.check_in_force(plan.points, max(len(sample.prompt) for sample in plan.samples))
    made = {(sample.tokenizer_sha256, sample.prompt_format) for sample in plan.samples}
    if len(made) > 1:
        raise InputError(
            f"the samples are of {len(made)} tokenizers or prompt formats, and a server has one; "
            "make them again with one --model"
        )
    runner.check_tokenizer(plan.samples[0])


def all_jobs(runner: Runner, plan: Plan) -> Iterator[Job]:
    """What is still to be measured."""
    for group in plan.groups():
        for point in group.points:
            yield from jobs_of(runner, group, point)


def jobs_of(runner: Runner, group: Group, point: Point, *, cold: bool = False) -> list[Job]:
    """What is missing of a group under one point, as it is sent. cold: with the warm-up that goes
    first where there was none yet."""
    todo = runner.pending(group.samples, point, group.which)
    if not todo:
        return []
    together, answers = group.which == "accuracy", group.which != "ttft"
    warm_up = cold and not together and not runner.is_warm(point, todo[0])
    return [
        Job(
            (group.which, group.length, point is not None and len(sent[0].prompt) >= runner.floor),
            # The threshold that is set, its probe, and the counters.
            3 if sent[0] is todo[0] else 1,
            tuple((len(s.prompt), answers and runner.wants_nll(s)) for s in sent)
            + ((len(todo[0].prompt), False),) * (warm_up and sent[0] is todo[0]),
            sum(runner.budget(s) for s in sent) if answers else 0,
        )
        for sent in ([todo] if together else [[sample] for sample in todo])
    ]


def count_pending(runner: Runner, plan: Plan) -> int:
    return sum(
        len(runner.pending([sample], point, which))
        for point in plan.points
        for which, sample in plan.measurements()
    )


def pending_in(runner: Runner, group: Group) -> int:
    return sum(len(runner.pending(group.samples, point, group.which)) for point in group.points)


def _run_groups(
    runner: Runner, groups: Sequence[Group], progress: Progress, box: TimeBox | None
) -> list[Group]:
    """Returns the groups that the time box left out."""
    pace, left, begun = Pace(), [], False
    for group in groups:
        number = pending_in(runner, group)
        if not number:
            continue
        one = pace.predict(group.length) or 0.0
        start = time.monotonic()
        if box is not None and begun and start + one * number * _MARGIN > box.end:
            left.append(group)
            continue
        # Something must be there to compare, however slow the machine is.
        latest = box.hard_end - one if box is not None and begun else None
        begun = True
        if run_group(runner, group, progress, latest, boxed=box is not None):
            pace.add(group.length, (time.monotonic() - start) / number)
        else:
            left.append(group)
    return left


def run_group(
    runner: Runner, group: Group, progress: Progress, latest: float | None, *, boxed: bool
) -> bool:
    """Measure the group under all its points; False when it was still running at `latest`.

    boxed: results are kept only when all of them are there, else each one as soon as it is.
    """
    kept: list[Record] = []
    for point in group.points:
        if latest is not None and time.monotonic() >= latest:
            return False
        todo = runner.pending(group.samples, point, group.which)
        what = f"{name_of(point)}, {group.task} at {group.length}"
        jobs = iter(jobs_of(runner, group, point, cold=True))
        since, waited = time.monotonic(), runner.waited_s

        def go_on(sample: Sample, last: bool, what: str = what, jobs: Iterator[Job] = jobs) -> bool:
            nonlocal since, waited
            if not last:
                progress.note()
                return True
            now = time.monotonic()
            progress.learn([next(jobs)], now - since, runner.waited_s - waited)
            since, waited = now, runner.waited_s
            progress.step(what)
            return latest is None or time.monotonic() < latest

        if todo and not runner.run_cell(
            point, todo, go_on, kept.append if boxed else runner.store.append, group.which
        ):
            return False
    for record in kept:
        runner.store.append(record)
    return True


def _rotated(points: Sequence[Point], by: int) -> tuple[Point, ...]:
    first = by % len(points)
    return (*points[first:], *points[:first])


def _plan_record(runner: Runner, plan: Plan) -> dict[str, object]:
    """Everything that is needed to do it again."""
    first = plan.samples[0]
    return {
        "kind": "plan",
        "fingerprint": runner.fingerprint,
        "server": runner.identity.server,
        "kernels": runner.kernels,
        "thresholds": [key_of(point) for point in plan.points],
        "lengths": plan.lengths(),
        "tasks": list(dict.fromkeys(sample.task for sample in plan.samples)),
        "seeds": sorted({sample.seed for sample in plan.samples}),
        "samples": len(plan.samples),
        "mode": ", ".join(dict.fromkeys(sample.mode for sample in plan.samples)),
        "timed": plan.timed,
        "concurrency": runner.options.concurrency,
        "data": dict(plan.data),
        "prompt_format": first.prompt_format,
        "tokenizer_sha256": first.tokenizer_sha256,
        "max_tokens": runner.options.max_tokens,
        "blasst_version": version("blasst"),
        "python": platform.python_version(),
        "machine": plan.machine,
        "notes": list(plan.notes),
        "command": ["blasst", *sys.argv[1:]],
        "at": time.time(),
    }
