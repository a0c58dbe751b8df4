"""A module made executable: segments of register arithmetic, branches and effects, by address."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blasst.kernels.verify.effects import decode_effect
from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.parse import Instruction, Module, parse
from blasst.kernels.verify.registers import Layout
from blasst.kernels.verify.segments import WIDE, Flow, MicroOp, compile_segment
from blasst.kernels.verify.semantics import lookup

SEGMENT, BRANCH, EXIT, EFFECT = range(4)
BRANCHES = ("bra", "bra.uni")
EXITS = ("ret", "ret.uni", "exit")
PRODUCT = "wgmma.mma_async"
NO_ROWS: frozenset[int] = frozenset()


@dataclass(slots=True)
class Step:
    """What stands at an address. end: address of the next step in program order.

    guard: row of the predicate, -1 for none. body: Segment, branch target or effect.
    reads, writes: 32-bit registers; dirties: those that a wgmma uses too. flow: in order, what
    values each operation takes.
    """

    kind: int
    at: int
    end: int
    guard: int = -1
    negated: bool = False
    body: Any = None
    reads: frozenset[int] = NO_ROWS
    writes: frozenset[int] = NO_ROWS
    dirties: frozenset[int] = NO_ROWS
    flow: tuple[Flow, ...] = ()


class Program:
    """Steps of a kernel, addressed by instruction index; the last address ends the kernel."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.layout = Layout(module)
        self.steps: list[Step | None] = [None] * (len(module.instructions) + 1)
        self._decode()
        self.product_rows = self._product_rows()
        for step in self.steps:
            if step is not None and not self._is_product(step):
                step.dirties = (step.reads | step.writes) & self.product_rows

    @classmethod
    def from_text(cls, ptx: str) -> Program:
        return cls(parse(ptx))

    @property
    def instructions(self) -> list[Instruction]:
        return self.module.instructions

    def step(self, at: int) -> Step:
        step = self.steps[at]
        assert step is not None, f"a jump into the middle of a segment, to {at}"
        return step

    def _decode(self) -> None:
        leaders = {self._target(i) for i in self.instructions if i.opcode in BRANCHES}
        pending: list[MicroOp] = []
        first = 0
        for ins in self.instructions:
            if ins.index in leaders:
                self._flush(pending, first, ins.index)
            try:
                micro = lookup(ins, self.layout)
                step = self._step(ins) if micro is None else None
            except (ValueError, IndexError) as e:
                raise VerifyError(
                    f"cannot read the operands of {ins} in line {ins.ptx_line} of the PTX: {e}"
                ) from e
            if micro is None:
                self._flush(pending, first, ins.index)
                self.steps[ins.index] = step
                continue
            if not pending:
                first = ins.index
            pending.extend(micro)
        end = len(self.instructions)
        self._flush(pending, first, end)
        self.steps[end] = Step(EXIT, end, end)

    def _target(self, ins: Instruction) -> int:
        return self.module.label(ins.operands[0], ins.scope)

    def _flush(self, pending: list[MicroOp], first: int, end: int) -> None:
        if pending:
            body = compile_segment(pending, first)
            self.steps[first] = Step(
                SEGMENT, first, end, body=body, reads=body.reads, writes=body.writes, flow=body.flow
            )
            pending.clear()

    def _step(self, ins: Instruction) -> Step:
        guard = -1
        if ins.predicate is not None:
            guard = self.layout.source(ins, ins.predicate, "pred").row
        place = (ins.index, ins.index + 1, guard, ins.negated)
        if ins.opcode in BRANCHES:
            return Step(BRANCH, *place, body=self._target(ins))
        if ins.opcode in EXITS:
            return Step(EXIT, *place)
        first_is_target = not ins.operands or not ins.operands[0].startswith("[")
        taken = ins.operands[first_is_target:]
        return Step(
            EFFECT,
            *place,
            body=decode_effect(ins, self.layout),
            reads=self._rows(ins, taken),
            flow=(Flow(tuple(self._keys(ins, taken)), -1, copy=False, fresh=False),),
            writes=self._rows(ins, ins.operands[:first_is_target]),
        )

    def _keys(self, ins: Instruction, operands: tuple[str, ...]) -> Iterator[int]:
        """Of the registers of 32 and 64 bits that are named in the operands."""
        words = " ".join(operands)
        for bracket in "[]{},|+":
            words = words.replace(bracket, " ")
        for slot in (self.layout.register(word, ins) for word in words.split()):
            if slot is not None and slot[0] in (32, 64):
                yield slot[1] + (WIDE if slot[0] == 64 else 0)

    def _rows(self, ins: Instruction, operands: tuple[str, ...]) -> frozenset[int]:
        """32-bit registers that are named in the operands."""
        return frozenset(key for key in self._keys(ins, operands) if key < WIDE)

    def _is_product(self, step: Step) -> bool:
        return step.kind == EFFECT and self.instructions[step.at].opcode.startswith(PRODUCT)

    def _product_rows(self) -> frozenset[int]:
        rows: set[int] = set()
        for ins in self.instructions:
            if ins.opcode.startswith(PRODUCT):
                rows |= self._rows(ins, ins.operands)
        return frozenset(rows)
