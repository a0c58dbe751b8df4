"""Named problems, timed in turns: dense, dialled skip rates, peers; medians and their ratios."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.bench.peers import peer
from blasst.kernels.testing import Dialled, DialOptions, dialled_inputs, paged

PAGE_SIZE = 128


@dataclass(frozen=True)
class Shape:
    """Heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


PROBLEMS = {
    "smollm2-135m": Shape(9, 3, 64),
    "llama-8b": Shape(32, 8, 128),
}


@dataclass(frozen=True)
class Cell:
    """One row of the result. wall_s: median over the rounds; cpu_s: of the whole process.

    over_dense: this wall time over ours when dense is asked, median of the rounds' ratios.
    """

    problem: str
    tokens: int
    what: str
    skip_rate: float
    wall_s: float
    cpu_s: float
    over_dense: float
    cpu_over_dense: float


@dataclass(frozen=True)
class Plan:
    """What to time. lengths in tokens; skip rates 0..1; rounds: each runs everything once."""

    problems: Sequence[str]
    lengths: Sequence[int]
    skip_rates: Sequence[float]
    peers: Sequence[str]
    impl: str
    dtype: str
    rounds: int


def measure(plan: Plan, progress: Callable[[str], None]) -> list[Cell]:
    """All cells; every round runs each contender once, in turn, so that load hits all alike."""
    cells = []
    for problem in plan.problems:
        for tokens in plan.lengths:
            cells += _problem(plan, problem, tokens, progress)
    return cells


def _problem(plan: Plan, problem: str, tokens: int, progress: Callable[[str], None]) -> list[Cell]:
    shape = PROBLEMS[problem]
    contenders: dict[str, tuple[float, Callable[[], object]]] = {}
    for rate in (0.0, *plan.skip_rates):
        inputs = dialled_inputs(
            **asdict(shape),
            seqlen=tokens,
            skip_rate=rate,
            options=DialOptions(dtype=getattr(torch, plan.dtype)),
        )
        if not contenders:
            contenders["dense"] = (0.0, _ours(plan.impl, inputs, vote=False))
            for name in plan.peers:
                contenders[name] = (0.0, peer(name, inputs))
            if 0.0 not in plan.skip_rates:
                continue
        contenders[f"vote {rate:.0%}"] = inputs.skip_rate, _ours(plan.impl, inputs, vote=True)
    walls: dict[str, list[float]] = {name: [] for name in contenders}
    cpus: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(plan.rounds + 1):
        progress(f"{problem}, {tokens} tokens: round {i} of {plan.rounds}")
        for name, (_, run) in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            # Round 0 warms caches and thread pools.
            if i:
                walls[name].append(time.perf_counter() - wall)
                cpus[name].append(time.process_time() - cpu)
    return [
        Cell(
            problem,
            tokens,
            name,
            skip_rate,
            statistics.median(walls[name]),
            statistics.median(cpus[name]),
            _ratio(walls[name], walls["dense"]),
            _ratio(cpus[name], cpus["dense"]),
        )
        for name, (skip_rate, _) in contenders.items()
    ]


def _ours(impl: str, inputs: Dialled, *, vote: bool) -> Callable[[], object]:
    pages = paged(inputs.kv, PAGE_SIZE, transposed_keys=True)
    out = torch.empty_like(inputs.q)
    skip_lambda = inputs.skip_lambda if vote else None

    def run() -> object:
        return prefill_attention(
            inputs.q, pages, inputs.cu_seqlens_q, skip_lambda=skip_lambda, impl=impl, out=out
        )

    return run


def _ratio(times: Sequence[float], dense: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, dense, strict=True))


def machine() -> dict[str, object]:
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
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 1),
    }


def markdown(cells: Sequence[Cell], where: dict[str, object], command: str) -> str:
    """The table of a measurement, with the command that repeats it."""
    lines = [
        f"{where['date']}, commit {where['commit']}, {where['cpu']}, torch {where['torch']}, "
        f"{where['threads']} threads, load {where['load_1min']}.",
        "",
        f"    {command}",
        "",
        "| problem | tokens | what | skip rate | wall ms | over dense | cpu ms | cpu over dense |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {c.problem} | {c.tokens} | {c.what} | {c.skip_rate:.1%} | {c.wall_s * 1e3:.1f} "
        f"| {c.over_dense:.2f} | {c.cpu_s * 1e3:.1f} | {c.cpu_over_dense:.2f} |"
        for c in cells
    ]
    return "\n".join(lines) + "\n"
