"""Mutation score: each synchronisation instruction is left out in turn; does anyone notice?

A mutant is caught when a run deadlocks, fails, races, misuses something or gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blasst.kernels.verify.evidence import Evidence, Note
from blasst.kernels.verify.operands import DONE, Effect, Mask, Operands
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.program import Step
from blasst.kernels.verify.subject import Case, Verdict, Workbench

DROPPED = (
    "mbarrier.arrive", "tcgen05.commit", "tcgen05.wait", "cp.async.bulk.wait_group",
    "cp.async.wait", "fence.proxy", "fence.mbarrier_init", "bar.sync", "bar.arrive",
    "barrier.sync", "barrier.arrive", "barrier.cta.sync", "barrier.cta.arrive", "bar.warp.sync",
    "wgmma.fence", "wgmma.wait_group",
)  # fmt: skip
WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
SECOND = (1001, 1002)  # further schedules that a survivor of the first has to pass
REDUCTIONS = ("bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red")


@dataclass(frozen=True)
class Mutant:
    """ins: left out. caught: how, "" when nobody noticed; why: what explains a survivor."""

    ins: Instruction
    caught: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.ins.opcode} at {self.ins.where}: {self.caught or 'SURVIVED, ' + self.why}"


def candidates(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Every synchronisation instruction."""
    kinds = (*DROPPED, *WAITS, *REDUCTIONS)
    return [ins for ins in instructions if ins.opcode.startswith(kinds)]


class Mutator:
    """A kernel and cases that it is right on; `mutant` leaves one instruction out.

    Raises ValueError for a case that fails without a mutation.
    """

    def __init__(self, bench: Workbench, cases: Sequence[Case], seeds: Sequence[int] = (0,)):
        self.bench, self.cases, self.seeds = bench, cases, seeds
        self.evidence = Evidence()
        self.reached = np.zeros(len(bench.program.instructions) + 1, np.int64)
        for case in cases:
            verdict = bench.run(case, seed=seeds[0], evidence=self.evidence)
            if not verdict.ok:
                raise ValueError(f"{case.name} fails without a mutation: {verdict.describe()}")
            self.reached += verdict.run.findings.executed
        self.candidates = candidates(bench.program.instructions)

    def mutant(self, number: int) -> Mutant:
        """Of the candidate of this number."""
        ins = self.candidates[number]
        if not self.reached[ins.index]:
            return Mutant(ins, "", "not reached: no case executes it")
        step = self.bench.program.step(ins.index)
        kept = step.body
        step.body = _neutral(self.bench, ins, step)
        try:
            caught = self._try(self.seeds) or self._try(SECOND)
        finally:
            step.body = kept
        return Mutant(ins, caught, "" if caught else explain(ins, self.evidence.notes[ins.index]))

    def _try(self, seeds: Sequence[int]) -> str:
        for case in self.cases:
            for seed in seeds:
                found = classify(self.bench.run(case, seed=seed))
                if found:
                    return found
        return ""


def mutants(
    bench: Workbench,
    cases: Sequence[Case],
    *,
    seeds: Sequence[int] = (0,),
    chosen: Callable[[int], bool] = lambda index: True,
) -> Iterator[Mutant]:
    """One result per instruction. chosen: which of the candidates, by their number."""
    mutator = Mutator(bench, cases, seeds)
    for number in range(len(mutator.candidates)):
        if chosen(number):
            yield mutator.mutant(number)


def classify(verdict: Verdict) -> str:
    """How a run shows that something is wrong, "" when it does not."""
    if verdict.run.error:
        kind = "deadlock" if "deadlock" in verdict.run.error else "error"
        return f"{kind}: {verdict.run.error.splitlines()[-1].strip()}"
    for finding in verdict.run.findings.counts:
        return str(finding)
    return f"wrong result: {verdict.wrong[0]}" if verdict.wrong else ""


def _neutral(bench: Workbench, ins: Instruction, step: Step) -> Effect:
    """Waits pass at once, reductions return the warp's own vote, the rest does nothing."""
    if ins.opcode.startswith(WAITS):
        passed = Operands(ins, bench.program.layout, frozenset()).write(0, "pred")

        def skip_wait(block: object, warp: object, mask: Mask) -> int:
            passed(warp, mask, np.ones(32, np.bool_))  # type: ignore[arg-type]
            return DONE

        return skip_wait
    if ins.opcode.startswith(REDUCTIONS):
        return _own_vote(bench, ins)
    return lambda block, warp, mask: DONE


def _own_vote(bench: Workbench, ins: Instruction) -> Effect:
    ops = Operands(ins, bench.program.layout, frozenset())
    token = ins.operands[-1]
    vote = ops.read(token.lstrip("!"), "pred")
    wanted = "popc" not in ins.opcode
    result = ops.write(0, "pred" if wanted else "u32")

    def run(block: object, warp: object, mask: Mask) -> int:
        value = vote(warp)  # type: ignore[arg-type]
        value = ~value if token.startswith("!") else value
        total = int(value.sum())
        answer = np.full(32, total, np.uint32)
        if wanted:
            answer = np.full(32, total == 32 if ".and" in ins.opcode else total > 0, np.bool_)
        result(warp, mask, answer)  # type: ignore[arg-type]
        return DONE

    return run


def explain(ins: Instruction, note: Note) -> str:
    """The class of a survivor, with what the unmutated runs showed about it."""
    arrives = ins.opcode.startswith(("mbarrier.arrive", "tcgen05.commit", "bar.arrive"))
    if arrives and not note.observed:
        return "tail: no warp waits for a phase that this arrival completes"
    if ins.opcode.startswith(WAITS) and note.times and note.initial == note.times:
        return "first use: each time the barrier had not completed a phase, so it passed at once"
    if not note.followed and not arrives and note.times:
        return "drain: no memory access of the warp follows, so nothing is ordered by it"
    if note.times and not note.taught and not arrives:
        return "redundant: all that it orders was ordered before, each time"
    if ins.opcode.startswith("bar.warp.sync"):
        return "model: lanes run in lock step, and none arrives here for others' shared memory"
    if ins.opcode.startswith(REDUCTIONS):
        return "unexplained: no case has warps that vote differently here"
    return (
        "covered: without it every conflicting access that ran is still ordered by the rest, in "
        "all schedules tried"
    )
