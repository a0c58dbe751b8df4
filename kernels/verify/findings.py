"""What a run found: races and misuse, each once with a count, and which instructions ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from blasst.kernels.verify.parse import Instruction


@dataclass(frozen=True)
class Finding:
    """kind: race or misuse. at: index of the instruction, -1 when it is not one instruction."""

    kind: str
    what: str
    where: str
    at: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


@dataclass
class Findings:
    """executed: how often the step at each address ran."""

    instructions: list[Instruction]
    counts: Counter[Finding] = field(default_factory=Counter)
    executed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executed = [0] * (len(self.instructions) + 1)

    def add(self, kind: str, what: str, where: str, at: int) -> None:
        self.counts[Finding(kind, what, where, at)] += 1

    def race(self, relation: str, what: str, agent: str, ins: int, other: str, by: int) -> None:
        """relation: RAW, WAR, WAW or PROXY; ins, by: the instructions, -1 for unknown."""
        verb = {
            "RAW": "reads {} before a write",
            "WAR": "writes {} before a read",
            "WAW": "writes {} before a write",
            "PROXY": "reads {} without fence.proxy.async after a write",
        }[relation].format(what)
        where = f"{agent}, {self._line(ins)}"
        self.add(
            "race", f"{relation}: {verb} by {other}, {self._line(by)}, is known done", where, ins
        )

    def _line(self, at: int) -> str:
        if at < 0:
            return "unknown line"
        ins = self.instructions[at]
        return f"{ins.opcode} at {ins.where}"
