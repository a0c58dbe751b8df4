"""The time left, on simulated servers: within a factor of 1.5 from the first tenth of a run on."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from blasst.evals.eta import Costs, Ends, Eta, Job
from blasst.evals.progress import Progress
from blasst.evals.runner import RunOptions
from blasst.evals.samples import Sample
from blasst.evals.store import Record
from blasst.evals.sweep import Plan, all_jobs, run_group
from blasst.evals.thresholds import Point, parse_points

POINTS = parse_points(["dense", "4500", "1500"], [], [])
TASKS = {"niah_single_1": 128, "vt": 30, "qa_1": 32}


@dataclass(frozen=True)
class World:
    """How long a server takes. host_s, linear, square: of a prefill. step_s: of a token of one
    answer; batched: how much of that more answers share. early: answers end after this share of
    their budget. nll: of a prefill. saved: by a threshold, at the longest prompt."""

    host_s: float
    linear: float
    square: float
    step_s: float
    batched: float
    early: float = 1.0
    nll: float = 1.2
    saved: float = 0.3
    wait_s: float = 0.5

    def prefill(self, tokens: int, voting: bool, longest: int) -> float:
        less = self.saved * tokens / longest if voting else 0.0
        seconds = self.linear * tokens + self.square * tokens**2 * (1 - less)
        return max(self.host_s, seconds)

    def costs(self, low: int, high: int, nll: bool) -> Costs:
        def ends(factor: float) -> Ends:
            low_s, high_s = (factor * self.prefill(n, False, high) for n in (low, high))
            return Ends((low, low_s), (high, high_s))

        return Costs(ends(1.0), ends(self.nll if nll else 0.0), self.step_s)


class Server:
    """Stands for a Runner on a clock of its own."""

    def __init__(self, world: World, options: RunOptions, longest: int) -> None:
        self.world, self.options, self.longest = world, options, longest
        self.floor, self.now, self.waited_s = 512, 0.0, 0.0
        self.rng = random.Random(4)
        self.done: set[tuple[str, str, Any]] = set()
        self.warm: set[tuple[int, bool]] = set()
        self.store = SimpleNamespace(append=lambda record: None)

    def budget(self, sample: Sample) -> int:
        return sample.max_tokens

    def wants_nll(self, sample: Sample) -> bool:
        return self.options.nll is None or sample.index < self.options.nll

    def is_warm(self, point: Point, sample: Sample) -> bool:
        return (sample.length, point is None) in self.warm

    def pending(self, samples: Sequence[Sample], point: Point, which: str) -> list[Sample]:
        return [s for s in samples if (which, s.id, point) not in self.done]

    def wait(self, times: int) -> None:
        seconds = sum(self.rng.uniform(0.3, 1.7) for _ in range(times)) * self.world.wait_s
        self.now, self.waited_s = self.now + seconds, self.waited_s + seconds

    def run_cell(
        self,
        point: Point,
        samples: Sequence[Sample],
        go_on: Callable[[Sample, bool], bool],
        keep: Callable[[Record], None],
        which: str,
    ) -> bool:
        self.wait(2)
        if which != "accuracy" and not self.is_warm(point, samples[0]):
            self.now += self.world.prefill(len(samples[0].prompt), False, self.longest)
            self.warm.add((samples[0].length, point is None))
        for sent in [samples] if which == "accuracy" else [[s] for s in samples]:
            self.now += self.seconds(point, sent, which)
            self.wait(1)
            for sample in sent:
                self.done.add((which, sample.id, point))
                go_on(sample, sample is sent[-1])
        return True

    def seconds(self, point: Point, sent: Sequence[Sample], which: str) -> float:
        world = self.world
        total = 0.0
        for sample in sent:
            one = world.prefill(len(sample.prompt), point is not None, self.longest)
            asked = which != "ttft" and self.wants_nll(sample)
            total += one * (1 + world.nll * asked)
        if which != "ttft":
            share = 1 if len(sent) == 1 else 1 - world.batched * (1 - 1 / len(sent))
            tokens = world.early * sum(s.max_tokens for s in sent)
            total += world.step_s * share * tokens
        return total * self.rng.uniform(0.9, 1.1)


def samples_of(lengths: Sequence[int], count: int) -> list[Sample]:
    return [
        Sample(
            id=f"{task}/{length}/{index}",
            task=task,
            length=length,
            index=index,
            seed=1,
            prompt=(1,) * (length - budget),
            gold=(2,),
            answers=("a",),
            max_tokens=budget,
            needles=(),
            prompt_format="plain",
            tokenizer_sha256="0",
        )
        for length in lengths
        for task, budget in TASKS.items()
        for index in range(count)
    ]


GPU = World(0.02, 4e-6, 1.2e-10, 0.006, 0.95)
CPU = World(0.05, 1.5e-3, 8e-8, 0.06, 0.6)
WORLDS = {
    "gpu": GPU,
    "gpu, a slow model": World(0.05, 1e-4, 3e-10, 0.03, 0.9),
    "cpu": CPU,
    "cpu, answers end early": World(0.05, 1.5e-3, 8e-8, 0.06, 0.6, early=0.15),
    "quadratic": World(0.01, 1e-6, 4e-8, 0.01, 0.9, saved=0.4),
    "slow sidecar": World(0.02, 4e-6, 1.2e-10, 0.006, 0.95, wait_s=1.5),
    "nll is dear": World(0.02, 2e-5, 2e-9, 0.006, 0.9, nll=6.0),
}
RUNS: dict[str, tuple[tuple[int, ...], int, dict[str, Any], int | None]] = {
    "default": ((4096, 8192, 32768), 24, {"concurrency": 8}, 10),
    "nll of few": ((4096, 32768), 32, {"concurrency": 8, "nll": 8}, 4),
    "one at a time": ((1024, 8192), 8, {}, None),
    "one length": ((8192,), 24, {"concurrency": 8}, 10),
}


def simulate(
    world: World, run: str, monkeypatch: pytest.MonkeyPatch, costs: Costs | None = None
) -> list[tuple[float, float]]:
    """(share of the run that is over, time left as said / time left) at each step."""
    lengths, count, options, timed = RUNS[run]
    samples = samples_of(lengths, count)
    together = options.get("concurrency", 1)
    plan = Plan(POINTS, samples, chunk=together if timed is not None else 0, timed=timed)
    server: Any = Server(world, RunOptions(**options), max(len(s.prompt) for s in samples))
    low, high = (f(len(s.prompt) for s in samples) for f in (min, max))
    known = costs or world.costs(low, high, nll=True)
    clock = SimpleNamespace(monotonic=lambda: server.now, time=time.time)
    monkeypatch.setattr("blasst.evals.sweep.time", clock)
    eta = Eta(all_jobs(server, plan), known, together)
    said: list[tuple[float, float]] = []

    class Noting(Progress):
        def step(self, what: str) -> None:
            said.append((server.now, eta.left()))

    progress = Noting(0, quiet=True)
    progress.restart(1, eta)
    for group in plan.groups():
        run_group(server, group, progress, None, boxed=False)
    assert eta.left() == pytest.approx(0.0, abs=1e-6)
    end = server.now
    return [(now / end, left / (end - now)) for now, left in said if now < end]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_time_left_is_right_within_a_half_from_the_first_tenth_on(
    world: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulate(WORLDS[world], run, monkeypatch)
    wrong = [(at, ratio) for at, ratio in found if 0.1 <= at <= 0.97 and not 2 / 3 < ratio < 1.5]
    assert not wrong, f"{len(wrong)} of {len(found)}, worst {max(wrong, key=lambda w: abs(w[1]))}"


def test_costs_that_are_not_known_beforehand_are_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the demo."""
    found = simulate(CPU, "one at a time", monkeypatch, Costs.unknown(1000, 8100))
    wrong = [(at, ratio) for at, ratio in found if 0.2 <= at <= 0.97 and not 0.6 < ratio < 1.7]
    assert not wrong


def test_jobs_of_a_group_that_come_together_are_learned_from() -> None:
    """As a Ray task gives them: one time for all, no word about waits."""
    jobs = [Job(("accuracy", 4096, voting), 3, ((4000, False),) * 8, 800) for voting in (0, 1)]
    costs = Costs(Ends((4000, 1.0), (4000, 1.0)), Ends((4000, 0.0), (4000, 0.0)), 0.01)
    eta = Eta(jobs * 40, costs, 8, workers=2)
    assert eta.left() == pytest.approx(40 * (16 + 2 * 8 * 8**-0.75 + 3) / 2)
    for _ in range(20):
        eta.done(jobs, 100.0)
    assert eta.left() == pytest.approx(20 * 100 / 2, rel=0.05)


def test_nothing_is_below_zero_and_zero_costs_are_no_error() -> None:
    job = Job(("both", 4096, False), 1, ((4000, True),), 10)
    nothing = Ends((4000, 0.0), (8000, 0.0))
    eta = Eta([job], Costs(nothing, nothing, 0.0))
    for seconds, waited in ((0.0, 0.0), (1.0, 2.0), (1.0, None)):
        eta.done([job], seconds, waited)
        assert 0.0 <= eta.left() < 1.0


@pytest.mark.parametrize(("until", "said"), [(None, "16:40"), (30.0, "0:30")])
def test_the_line_says_what_is_left_and_ends_with_the_limit(until: float | None, said: str) -> None:
    stream = io.StringIO()
    progress = Progress(0, stream)
    job = Job(("both", 4096, False), 0, ((4000, False),), 0)
    ends = Ends((4000, 1000.0), (4000, 1000.0))
    now = time.monotonic()
    progress.restart(
        2, Eta([job, job], Costs(ends, ends, 0.0)), None if until is None else now + until
    )
    progress.learn([job], 1000.0, 0.0)
    progress.step("x")
    assert stream.getvalue().startswith("1/2  x  elapsed 0:00  left about ")
    assert stream.getvalue().endswith(said + "\n")
