"""Which instructions ran, how often, and which never did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from blasst.kernels.verify.findings import Findings
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.program import Program


@dataclass(frozen=True)
class Coverage:
    """reached, total: PTX instructions; missed: first instruction of each stretch that never ran.

    opcodes: warp instructions that ran, by opcode.
    """

    reached: int
    total: int
    missed: list[Instruction]
    opcodes: Counter[str]

    @property
    def share(self) -> float:
        return self.reached / self.total if self.total else 1.0

    def count(self, *prefixes: str) -> int:
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefixes))


def coverage(program: Program, runs: list[Findings]) -> Coverage:
    """Of several runs together."""
    instructions = program.instructions
    times = [0] * len(instructions)
    for step in program.steps:
        if step is None or step.at >= len(instructions):
            continue
        ran = sum(run.executed[step.at] for run in runs)
        for at in range(step.at, step.end):
            times[at] = ran
    opcodes: Counter[str] = Counter()
    missed = []
    for ins, ran in zip(instructions, times, strict=True):
        opcodes[ins.opcode] += ran
        if not ran and (ins.index == 0 or times[ins.index - 1]):
            missed.append(ins)
    return Coverage(sum(1 for t in times if t), len(times), missed, opcodes)
