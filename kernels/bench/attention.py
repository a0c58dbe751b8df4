"""Named problems, timed in turns: dense, dialled skip rates, peers; medians and their ratios."""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from blasst.kernels.bench.peers import peer
from blasst.kernels.bench.problems import (
    PROBLEMS,
    Inputs,
    Ours,
    Run,
    Shape,
    geometry_for,
    in_pages,
    make_inputs,
    ours,
)
from blasst.kernels.errors import UnsupportedError

FLUSH_BYTES = 256 << 20  # more than any L2 cache
WARM_UP = 1  # rounds
PACKAGES = ("triton", "nvidia-cutlass-dsl", "flash-attn-4", "vllm")


@dataclass(frozen=True)
class Cell:
    """One row of the result. wall_s: median over the rounds (on a GPU: the device's own time);
    cpu_s: of the whole process; tflops: of dense attention over wall_s.

    over_dense, over_peer: this time over ours when dense is asked, and over the first peer's, on
    the same inputs; medians of the rounds' ratios. skip_rate: as counted. least, most: of the
    ratios over what ran beside it, and near_s: its median; None without Plan.beside.
    """

    problem: str
    tokens: int
    what: str
    skip_rate: float
    wall_s: float
    cpu_s: float
    tflops: float
    over_dense: float
    cpu_over_dense: float
    over_peer: float | None
    least: float | None = None
    most: float | None = None
    near_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to time. lengths in tokens, for problems without their own; skip rates 0..1; rounds:
    each runs everything once, in another order; impls: the first one's dense is "over dense".

    together: all skip rates beside one dense run, and peers on the data of skip rate 0, instead of
    dense and peers on the data of each rate; for a CPU, where they take the longest.

    pages: sizes; ours is timed on the same keys in such pages too. beside: instead of rounds of
    everything, the first peer (without one: dense) runs before and after every two calls of each
    contender, and ratios are over the mean of these two. Neighbours share the clock of a card
    whose power limit moves it by more than 5%.
    """

    problems: Sequence[str]
    lengths: Sequence[int]
    skip_rates: Sequence[float]
    peers: Sequence[str]
    impls: Sequence[str]
    device: str
    dtype: str
    rounds: int
    together: bool = False
    pages: Sequence[int] = ()
    beside: bool = False


@dataclass(frozen=True)
class Contender:
    """name: of the row; ours: None for a peer."""

    name: str
    run: Run
    ours: Ours | None = None

    @property
    def skip_rate(self) -> float:
        return (self.ours.skip_rate or 0.0) if self.ours is not None else 0.0


Progress = Callable[[str], None]


def measure(plan: Plan, progress: Progress) -> tuple[list[Cell], dict[str, str]]:
    """(all cells, why peers were left out). Raises UnsupportedError when ours cannot run."""
    cells: list[Cell] = []
    left_out: dict[str, str] = {}
    for problem in plan.problems:
        fixed = PROBLEMS[problem].tokens
        for tokens in [fixed] if fixed is not None else plan.lengths:
            shape = replace(PROBLEMS[problem], tokens=tokens)
            for group in _groups(plan, shape, left_out, progress):
                cells += _time(plan, problem, shape, group, progress)
    return cells, left_out


def _groups(
    plan: Plan, shape: Shape, left_out: dict[str, str], progress: Progress
) -> Iterator[list[Contender]]:
    """Contenders to interleave."""
    geometry = geometry_for(plan.impls[0], shape, plan.device, plan.dtype)
    dtype = getattr(torch, plan.dtype)

    def inputs(rate: float) -> Inputs:
        return make_inputs(shape, rate, device=plan.device, dtype=dtype, geometry=geometry)

    if not plan.together:
        for rate in plan.skip_rates:
            x = inputs(rate)
            yield [*_dense(plan, x, left_out, progress), *_votes(plan, x, rate)]
        return
    x = inputs(0.0)
    group = _dense(plan, x, left_out, progress)
    for rate in plan.skip_rates:
        group += _votes(plan, inputs(rate) if rate else x, rate)
    yield group


def _dense(plan: Plan, x: Inputs, left_out: dict[str, str], progress: Progress) -> list[Contender]:
    found = []
    for impl in plan.impls:
        found += _ours(plan, x, impl, "dense", vote=False)
    for name in plan.peers:
        if name in left_out:
            continue
        try:
            found.append(Contender(name, peer(name, x)))
        except UnsupportedError as e:
            left_out[name] = str(e)
            progress(f"left out: {e}")
    return found


def _votes(plan: Plan, x: Inputs, rate: float) -> list[Contender]:
    return [c for impl in plan.impls for c in _ours(plan, x, impl, f"vote {rate:.0%}", vote=True)]


def _ours(plan: Plan, x: Inputs, impl: str, what: str, *, vote: bool) -> list[Contender]:
    """On the keys as the problem has them, and in pages."""
    name = what if len(plan.impls) == 1 else f"{impl} {what}"
    kinds = {name: x} | {f"{name}, pages of {p}": in_pages(x, p) for p in plan.pages}
    made = [(kind, ours(impl, inputs, vote=vote)) for kind, inputs in kinds.items()]
    return [Contender(kind, one.run, one) for kind, one in made]


def _time(
    plan: Plan, problem: str, shape: Shape, group: Sequence[Contender], progress: Progress
) -> list[Cell]:
    if plan.beside:
        return _time_beside(plan, problem, shape, group, progress)
    stopwatch = Stopwatch(plan.device)
    walls: dict[str, list[float]] = {c.name: [] for c in group}
    cpus: dict[str, list[float]] = {c.name: [] for c in group}
    for i in range(-WARM_UP, plan.rounds):
        progress(f"{problem}, {shape.tokens} tokens: round {i + 1} of {plan.rounds}")
        # A new order each round: what ran before decides the card's clock and what its cache holds.
        for contender in random.Random(i).sample(group, len(group)):
            wall, cpu = stopwatch.time(contender.run)
            if i >= 0:
                walls[contender.name].append(wall)
                cpus[contender.name].append(cpu)
    dense = group[0].name
    against = next((c.name for c in group if c.ours is None), None)
    return [
        _cell(
            problem,
            shape,
            c,
            (walls[c.name], cpus[c.name]),
            over_dense=_ratio(walls[c.name], walls[dense]),
            cpu_over_dense=_ratio(cpus[c.name], cpus[dense]),
            over_peer=None if against is None else _ratio(walls[c.name], walls[against]),
        )
        for c in group
    ]


def _cell(
    problem: str,
    shape: Shape,
    c: Contender,
    times: tuple[Sequence[float], Sequence[float]],
    **ratios: Any,
) -> Cell:
    """times: wall and processor seconds of its runs; ratios: the other fields of a cell."""
    assert shape.tokens is not None
    wall, cpu = map(statistics.median, times)
    return Cell(
        problem, shape.tokens, c.name, c.skip_rate, wall, cpu, shape.flops / wall / 1e12, **ratios
    )


@dataclass(frozen=True)
class Beside:
    """Of each round: wall and processor seconds, and both over those of what ran beside it; near:
    wall seconds of that."""

    near: list[float]
    walls: list[float]
    cpus: list[float]
    over: list[float]
    cpu_over: list[float]


def _time_beside(
    plan: Plan, problem: str, shape: Shape, group: Sequence[Contender], progress: Progress
) -> list[Cell]:
    stopwatch = Stopwatch(plan.device)
    peers = [c for c in group if c.ours is None]
    base = peers[0] if peers else group[0]
    found = {}
    for c in group:
        progress(f"{problem}, {shape.tokens} tokens: {c.name} beside {base.name}")
        for _ in range(WARM_UP):
            c.run()
            base.run()
        runs = [base, *[c, c, base] * plan.rounds]
        found[c.name] = _beside([stopwatch.time(contender.run) for contender in runs])
    dense = found[group[0].name]
    return [
        _cell(
            problem,
            shape,
            c,
            (mine.walls, mine.cpus),
            over_dense=statistics.median(mine.over) / statistics.median(dense.over),
            cpu_over_dense=statistics.median(mine.cpu_over) / statistics.median(dense.cpu_over),
            over_peer=statistics.median(mine.over) if peers else None,
            least=min(mine.over),
            most=max(mine.over),
            near_s=statistics.median(mine.near),
        )
        for c in group
        for mine in [found[c.name]]
    ]


def _beside(times: Sequence[tuple[float, float]]) -> Beside:
    """times: (wall, processor) of the base, and after it of each round's two calls and the base."""
    columns = []
    for each in zip(*times, strict=True):
        bases = each[::3]
        calls = [sum(each[i : i + 2]) / 2 for i in range(1, len(each), 3)]
        near = [(a + b) / 2 for a, b in pairwise(bases)]
        columns.append((near, calls, [_over(c, n) for c, n in zip(calls, near, strict=True)]))
    (near, walls, over), (_, cpus, cpu_over) = columns
    return Beside(near, walls, cpus, over, cpu_over)


class Stopwatch:
    """Times one run: by the clock on a CPU; on a GPU by its events, its cache flushed before."""

    def __init__(self, device: str) -> None:
        self.flush = None if device == "cpu" else torch.empty(FLUSH_BYTES // 4, device=device)

    def time(self, run: Run) -> tuple[float, float]:
        """(wall or device seconds, processor seconds of the process)."""
        if self.flush is None:
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            return time.perf_counter() - wall, time.process_time() - cpu
        self.flush.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        cpu = time.process_time()
        start.record()
        run()
        end.record()
        cpu = time.process_time() - cpu
        end.synchronize()
        return start.elapsed_time(end) / 1e3, cpu


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(_over(a, b) for a, b in zip(times, base, strict=True))


def _over(time: float, base: float) -> float:
    """The processor time of a run may be too short for its clock."""
    return time / base if base else float(time == base)


def machine(device: str) -> dict[str, object]:
    """Where and when the numbers come from."""
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    where: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 1),
    }
    if device != "cpu":
        where["gpu"] = torch.cuda.get_device_name()
        where["packages"] = {name: v for name in PACKAGES if (v := _version(name))}
    return where


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
