"""The mutation score: each synchronisation instruction of every kind of build is left out.

python -m blasst.kernels.blackwell.mutation [--build NAME] [--every N] [--workers N] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blasst.kernels.blackwell.problems import Mutated, mutated
from blasst.kernels.verify.build import build
from blasst.kernels.verify.mutate import Mutator, candidates
from blasst.kernels.verify.plans import missing
from blasst.kernels.verify.subject import Workbench
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.witness import fingerprint
from blasst.kernels.verify.workers import Ledger, add_options, spread

Row = dict[str, Any]
Task = tuple[Mutated, int]  # number of a candidate


@functools.lru_cache(maxsize=1)
def _mutator(target: Mutated) -> Mutator:
    bench = Workbench(blackwell.subject(target.config))
    return Mutator(bench, [blackwell.case(target.config, shape) for shape in target.shapes])


def compiled(target: Mutated) -> tuple[Mutated, str, int]:
    """The target, the fingerprint of its PTX, and how many candidates it has."""
    artifact = build(blackwell.subject(target.config).recipe)
    return target, fingerprint(artifact), len(candidates(artifact.module.instructions))


def run(task: Task) -> Row:
    """One instruction left out."""
    target, number = task
    mutator = _mutator(target)
    started = time.perf_counter()
    mutant = mutator.mutant(number)
    return {
        "build": target.name, "ptx": fingerprint(mutator.bench.artifact), "number": number,
        "opcode": mutant.ins.opcode, "where": mutant.ins.where, "caught": mutant.caught,
        "why": mutant.why, "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip


def kinds(texts: Iterable[str]) -> str:
    """ "12 race, 3 deadlock" of texts that begin with these words and a colon."""
    found = Counter(text.split(":")[0] for text in texts)
    return ", ".join(f"{n} {name}" for name, n in found.most_common())


def table(found: dict[Mutated, list[Row]]) -> Iterator[str]:
    """A row of Markdown for each build."""
    yield "| build | PTX | instructions | noticed | survivors |"
    yield "|---|---|--:|---|---|"
    for target, rows in found.items():
        caught = [r["caught"] for r in rows if r["caught"]]
        left = [r["why"] for r in rows if not r["caught"]]
        ptx = rows[0]["ptx"][:16] if rows else ""
        yield (
            f"| {target.name} | {ptx} | {len(rows)} | {len(caught)}: {kinds(caught)} | "
            f"{len(left)}: {kinds(left)} |"
        )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m blasst.kernels.blackwell.mutation")
    parser.add_argument("--build", default="", help="only builds whose names hold this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th instruction")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error(f"--every {options.every} must be at least 1")
    reason = missing("sm100")
    if reason is not None:
        parser.error(reason)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: no survivor is unexplained; 1: one is, or it is not finished."""
    options = _options(arguments)
    started = time.monotonic()
    ledger = Ledger(options.out)
    targets = [target for target in mutated() if options.build in target.name]
    found: dict[Mutated, list[Row]] = {}
    tasks: list[Task] = []
    for target, ptx, count in spread(compiled, targets, options.workers):
        mine = [r for r in ledger.rows if (r["build"], r["ptx"]) == (target.name, ptx)]
        found[target] = mine
        ran = {row["number"] for row in mine}
        tasks += [(target, n) for n in range(0, count, options.every) if n not in ran]
    named = {target.name: target for target in targets}
    tasks.sort(key=lambda task: targets.index(task[0]))
    left = len(tasks)
    for row in spread(run, tasks, options.workers, options.limit - (time.monotonic() - started)):
        ledger.add(row)
        found[named[row["build"]]].append(row)
        left -= 1
        state = row["caught"] or f"SURVIVED, {row['why']}"
        print(f"{row['build']}: {row['opcode']} at {row['where']}: {state}", flush=True)
    print("\n".join(table({target: found[target] for target in targets})))
    unexplained = sum("unexplained" in r["why"] for rows in found.values() for r in rows)
    if left or unexplained:
        print(f"{left} not run, {unexplained} survivors unexplained")
    return int(bool(left or unexplained))


if __name__ == "__main__":
    sys.exit(main())
