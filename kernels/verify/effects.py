"""Every opcode with effects, by the parts of its name that decide its meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blasst.kernels.verify import (
    barrier_effects,
    bulk_effects,
    memory_effects,
    tensor_effects,
    warp_effects,
    wgmma_effects,
)
from blasst.kernels.verify.errors import UnknownOpcodeError
from blasst.kernels.verify.operands import Effect, Operands
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.registers import Layout

EFFECTS: dict[str, Callable[[Operands], Any]] = {
    **memory_effects.TABLE,
    **barrier_effects.TABLE,
    **warp_effects.TABLE,
    **bulk_effects.TABLE,
    **tensor_effects.TABLE,
    **wgmma_effects.TABLE,
}


def decode_effect(ins: Instruction, layout: Layout) -> Effect:
    """What an instruction that is no plain arithmetic does; raises UnknownOpcodeError."""
    parts = ins.opcode.split(".")
    for length in range(len(parts), 0, -1):
        decode = EFFECTS.get(".".join(parts[:length]))
        if decode is not None:
            effect: Effect = decode(Operands(ins, layout, frozenset(parts[length:])))
            return effect
    raise UnknownOpcodeError(f"opcode {ins.opcode} is not known ({ins.where}): {str(ins)[:120]}")
