"""Operands of instructions with effects, as functions of the warp that executes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify.errors import ExecutionError, UnknownOpcodeError
from blasst.kernels.verify.parse import Instruction, split_operands
from blasst.kernels.verify.registers import Array, Layout

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

Mask = Array | None
Effect = Callable[["Block", "Warp", Mask], int]
Reader = Callable[["Warp"], Array]
Writer = Callable[["Warp", Mask, Array], None]

DONE = 0
SPIN = 1  # done, but a test of a barrier failed
RETRY = 2  # not done: the same instruction again later
PARKED = 3  # done, but the warp sleeps until it is woken
CONVERGE = 4  # not done: needs the lanes of other branches first

_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]$")


@dataclass(frozen=True)
class Operands:
    """modifiers: the parts of the opcode behind the name under which it is registered."""

    ins: Instruction
    layout: Layout
    modifiers: frozenset[str]

    def allow(self, *names: str) -> None:
        """Refuses modifiers that the caller does not model."""
        unknown = sorted(self.modifiers - set(names))
        if unknown:
            raise UnknownOpcodeError(
                f"opcode {self.ins.opcode}: modifier .{unknown[0]} is not known "
                f"({self.ins.where}): {str(self.ins)[:120]}"
            )

    def one_of(self, *names: str) -> str:
        """The one modifier of the opcode that is among the names."""
        found = [name for name in names if name in self.modifiers]
        if len(found) != 1:
            raise self.unknown(f"needs one of {', '.join(names)}")
        return found[0]

    def unknown(self, reason: str) -> UnknownOpcodeError:
        ins = self.ins
        return UnknownOpcodeError(f"{ins.opcode}: {reason} ({ins.where}): {str(ins)[:120]}")

    def error(self, warp: Warp, message: str) -> ExecutionError:
        """For a run: names warp, role, instruction and line."""
        return ExecutionError(f"{warp.name}: {message}; {self.ins.opcode} at {self.ins.where}")

    def count(self) -> int:
        return len(self.ins.operands)

    def read(self, at: int | str, kind: str) -> Reader:
        token = self.ins.operands[at] if isinstance(at, int) else at
        bank, row = self.layout.source(self.ins, token, kind)
        return lambda warp: warp.banks[bank][row]

    def write(self, at: int | str, kind: str) -> Writer:
        token = self.ins.operands[at] if isinstance(at, int) else at
        bank, row = self.layout.target(self.ins, token, kind)

        def store(warp: Warp, mask: Mask, value: Array) -> None:
            if mask is None:
                warp.banks[bank][row][:] = value
            else:
                np.copyto(warp.banks[bank][row], value, where=mask, casting="unsafe")

        return store

    def parts(self, at: int) -> list[str]:
        """Tokens of a vector operand, or the one token."""
        return split_operands(self.ins.operands[at].strip("{}"))

    def rows(self, at: int) -> list[int]:
        """Rows of the 32-bit registers of a vector operand."""
        return [self.layout.source(self.ins, token, "b32").row for token in self.parts(at)]

    def address(self, at: int | str) -> Reader:
        """int64 addresses of `[register + offset]` or `[symbol + offset]`."""
        token = self.ins.operands[at] if isinstance(at, int) else at
        m = _ADDRESS.match(token)
        if m is None:
            raise self.unknown(f"address {token} is not known")
        offset = int(m[2], 0) if m[2] else 0
        slot = self.layout.register(m[1], self.ins)
        kind = "b32" if (slot and slot[0] == 32) else "b64"
        bank, row = self.layout.source(self.ins, m[1], kind)
        return lambda warp: warp.banks[bank][row].astype(np.int64) + offset


def lanes(mask: Mask) -> Any:
    """Indices of the lanes that take part."""
    return range(32) if mask is None else np.flatnonzero(mask)


def first(mask: Mask) -> int:
    """The first lane that takes part."""
    return 0 if mask is None else int(mask.argmax())


def uniform(values: Array, mask: Mask) -> int:
    """The value of the first lane that takes part."""
    return int(values[first(mask)])
