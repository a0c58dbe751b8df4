"""Named problems, timed in turns: dense, dialled skip rates, peers; medians and their ratios."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from blasst.kernels.bench.peers import peer
from blasst.kernels.bench.problems import (
    PROBLEMS,
    Inputs,
    Ours,
    Run,
    Shape,
    geometry_for,
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
    the same inputs; medians of the rounds' ratios. skip_rate: as counted.
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


@dataclass(frozen=True)
class Plan:
    """What to time. lengths in tokens, for problems without their own; skip rates 0..1; rounds:
    each runs everything once, in another order; impls: the first one's dense is "over dense".

    together: all skip rates beside one dense run, and peers on the data of skip rate 0, instead of
    dense and peers on the data of each rate; for a CPU, where they take the longest.
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


@dataclass(frozen=True)
class Contender:
    """name: of the row; ours: None for a peer."""

    name: str
    run: Run
    ours: Ours | None = None


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
        dense = ours(impl, x, vote=False)
        found.append(Contender(_named(plan, impl, "dense"), dense.run, dense))
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
    votes = [(impl, ours(impl, x, vote=True)) for impl in plan.impls]
    return [Contender(_named(plan, impl, f"vote {rate:.0%}"), v.run, v) for impl, v in votes]


def _named(plan: Plan, impl: str, what: str) -> str:
    return what if len(plan.impls) == 1 else f"{impl} {what}"


def _time(
    plan: Plan, problem: str, shape: Shape, group: Sequence[Contender], progress: Progress
) -> list[Cell]:
    stopwatch = Stopwatch(plan.device)
    walls: dict[str, list[float]] = {c.name: [] for c in group}
    cpus: dict[str, list[float]] = {c.name: [] for c in group}
    for i in range(-WARM_UP, plan.rounds):
        progress(f"{problem}, {shape.tokens} tokens: round {i + 1} of {plan.rounds}")
        # Another one starts each round, so that none always runs behind the same one.
        first = i % len(group)
        for contender in (*group[first:], *group[:first]):
            wall, cpu = stopwatch.time(contender.run)
            if i >= 0:
                walls[contender.name].append(wall)
                cpus[contender.name].append(cpu)
    dense = group[0].name
    against = next((c.name for c in group if c.ours is None), None)
    assert shape.tokens is not None
    return [
        Cell(
            problem,
            shape.tokens,
            c.name,
            (c.ours.skip_rate or 0.0) if c.ours is not None else 0.0,
            statistics.median(walls[c.name]),
            statistics.median(cpus[c.name]),
            shape.flops / statistics.median(walls[c.name]) / 1e12,
            _ratio(walls[c.name], walls[dense]),
            _ratio(cpus[c.name], cpus[dense]),
            None if against is None else _ratio(walls[c.name], walls[against]),
        )
        for c in group
    ]


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
    return statistics.median(
        a / b if b else float(a == b) for a, b in zip(times, base, strict=True)
    )


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
