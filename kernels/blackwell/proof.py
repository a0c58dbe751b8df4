"""The proof: executes the PTX of every build on its problems, and compares with the oracle.

python -m blasst.kernels.blackwell.proof [--part NAME] [--seeds N] [--workers N] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blasst.kernels.blackwell import proved
from blasst.kernels.blackwell.config import ROWS, Config
from blasst.kernels.blackwell.problems import Part, parts
from blasst.kernels.verify.build import build
from blasst.kernels.verify.plans import missing
from blasst.kernels.verify.subject import Workbench
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.subjects.attention import Shape
from blasst.kernels.verify.witness import fingerprint
from blasst.kernels.verify.workers import Ledger, add_options, spread

CHUNK = 256  # blocks of 128 x 128 that one task computes at most, times schedules: seconds
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Some schedules of one problem."""

    part: Part
    shape: Shape
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """Of one problem: wrong holds what was found; digests: the outputs' bits, one a schedule.

    wanted: schedules that were asked for; ptx: fingerprint of the kernel that ran.
    """

    part: str
    case: str
    ptx: str
    wanted: int
    schedules: int
    digests: frozenset[str]
    wrong: tuple[str, ...]
    seconds: float

    @property
    def whole(self) -> bool:
        return self.schedules >= self.wanted

    @property
    def ok(self) -> bool:
        return self.whole and not self.wrong and len(self.digests) == 1

    def __str__(self) -> str:
        state = "ok" if self.whole else f"ok so far, {self.wanted} are wanted"
        if self.wrong or len(self.digests) > 1:
            state = f"WRONG, {len(self.digests)} outputs: {'; '.join(self.wrong[:3])}"
        return (
            f"{self.part}: {self.case}: {self.schedules} schedules in {self.seconds:.1f} s: {state}"
        )


@functools.cache
def environment() -> str:
    """What the bits depend on, the kernel aside: inputs are of torch, exponentials of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"torch {torch.__version__}, {named[0] if named else platform.machine()}"


@functools.lru_cache(maxsize=2)
def _bench(config: Config) -> Workbench:
    return Workbench(blackwell.subject(config))


def compiled(config: Config) -> tuple[Config, str]:
    """The config and the fingerprint of its PTX; the build is in the cache afterwards."""
    return config, fingerprint(build(blackwell.subject(config).recipe))


def differing(kernels: dict[Config, str]) -> Iterator[str]:
    """A line for each build whose PTX is not the one that `proved` names."""
    names = {part.config: part.name for part in reversed(parts())}
    for config, ptx in kernels.items():
        name = names[config]
        known = proved.PTX.get(name, "nothing")
        if known != ptx[: len(known)]:
            yield f"{name}: the PTX is {ptx[:32]}, but {known} was proved; run the proof"


def run(task: Task) -> Row:
    """The task's schedules, with race detection."""
    bench = _bench(task.part.config)
    case = blackwell.case(task.part.config, task.shape)
    started = time.perf_counter()
    digests, wrong = set(), []
    for seed in task.seeds:
        verdict = bench.run(case, seed=seed)
        digests.add(verdict.digest)
        wrong += [f"schedule {seed}: {line}" for line in verdict.describe()]
    return {
        "part": task.part.name, "case": case.name, "ptx": fingerprint(bench.artifact),
        "where": environment(), "seeds": task.seeds, "digests": sorted(digests), "wrong": wrong,
        "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip


def cost(shape: Shape) -> int:
    """Blocks of the whole problem, causality and skips aside."""
    blocks = sum(-(-q // ROWS) * -(-k // ROWS) for q, k in shape.seqlens)
    return max(1, blocks * shape.num_heads)


class Proof:
    """Which schedules of which problems are wanted, and what is known of them.

    kernels: fingerprints. rows: what ran before; those of other kernels or environments are
    passed over. seeds: schedules of each problem, None = what each part asks for.
    """

    def __init__(
        self,
        chosen: Sequence[Part],
        kernels: dict[Config, str],
        rows: Iterable[Row],
        seeds: int | None = None,
    ) -> None:
        self.chosen, self.kernels, self.seeds = chosen, kernels, seeds
        self.rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        if row["where"] == environment():
            self.rows.setdefault((row["part"], row["case"], row["ptx"]), []).append(row)

    def wanted(self, part: Part) -> int:
        return part.seeds if self.seeds is None else self.seeds

    def _rows(self, part: Part, case: str) -> list[Row]:
        return self.rows.get((part.name, case, self.kernels[part.config]), [])

    def outcome(self, part: Part, case: str) -> Outcome:
        """Of what has run so far."""
        rows = self._rows(part, case)
        return Outcome(
            part.name, case, self.kernels[part.config], self.wanted(part),
            len({seed for r in rows for seed in r["seeds"]}),
            frozenset(digest for r in rows for digest in r["digests"]),
            tuple(line for r in rows for line in r["wrong"]),
            sum(r["seconds"] for r in rows),
        )  # fmt: skip

    def outcomes(self) -> Iterator[Outcome]:
        for part in self.chosen:
            for shape in part.shapes:
                yield self.outcome(part, blackwell.case(part.config, shape).name)

    def tasks(self) -> Iterator[Task]:
        """What has not run, in pieces of a few seconds."""
        for part in self.chosen:
            for shape in part.shapes:
                case = blackwell.case(part.config, shape)
                ran = {seed for r in self._rows(part, case.name) for seed in r["seeds"]}
                left = [seed for seed in range(self.wanted(part)) if seed not in ran]
                size = max(1, CHUNK // cost(shape))
                for at in range(0, len(left), size):
                    yield Task(part, shape, tuple(left[at : at + size]))


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """A row of Markdown for each part."""
    yield "| part | PTX | problems | schedules | wrong, racing, deadlocked or not bit-equal |"
    yield "|---|---|--:|--:|--:|"
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.part, []).append(outcome)
    for name, group in found.items():
        bad = sum(not o.ok for o in group)
        ran = sum(o.schedules for o in group)
        yield f"| {name} | {group[0].ptx[:16]} | {len(group)} | {ran} | {bad} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every problem is right under every schedule; 1: not, or not finished."""
    parser = argparse.ArgumentParser(prog="python -m blasst.kernels.blackwell.proof")
    parser.add_argument("--part", default="", help="only parts whose names hold this")
    parser.add_argument(
        "--seeds", type=int, help="schedules of each problem (default: what each part asks for)"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be at least 1")
    reason = missing("sm100")
    if reason is not None:
        parser.error(reason)
    started = time.monotonic()
    chosen = [part for part in parts() if options.part in part.name]
    ledger = Ledger(options.out)
    configs = list(dict.fromkeys(part.config for part in chosen))
    kernels = dict(spread(compiled, configs, options.workers))
    proof = Proof(chosen, kernels, ledger.rows, options.seeds)
    named = {part.name: part for part in chosen}
    limit = options.limit - (time.monotonic() - started)
    for row in spread(run, list(proof.tasks()), options.workers, limit):
        ledger.add(row)
        proof.add(row)
        outcome = proof.outcome(named[row["part"]], row["case"])
        if outcome.whole or outcome.wrong:
            print(outcome, flush=True)
    outcomes = list(proof.outcomes())
    print("\n".join([*table(outcomes), *differing(kernels)]))
    bad = [o for o in outcomes if not o.ok]
    print(f"{len(bad)} wrong or not finished" if bad else "all right")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
