"""Which opcodes are pure register arithmetic, and how one becomes micro-operations."""

from __future__ import annotations

from blasst.kernels.verify import float_ops, integer_ops, move_ops
from blasst.kernels.verify.errors import UnknownOpcodeError
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.registers import Layout, Ref
from blasst.kernels.verify.segments import MicroOp
from blasst.kernels.verify.signature import Signature

TABLE: dict[str, Signature] = {**integer_ops.TABLE, **float_ops.TABLE, **move_ops.TABLE}


def lookup(ins: Instruction, layout: Layout) -> list[MicroOp] | None:
    """Micro-operations of an arithmetic instruction, None for any other."""
    guard: tuple[Ref, bool] | None = None
    moved = move_ops.decode(ins, layout)
    signature = TABLE.get(f"{ins.opcode}/{len(ins.operands) - 1}") or TABLE.get(ins.opcode)
    if moved is None and signature is None:
        return None
    if ins.predicate is not None:
        guard = (layout.source(ins, ins.predicate, "pred"), ins.negated)
    if moved is None:
        assert signature is not None
        moved = _decode(ins, layout, signature)
    return [op._replace(guard=guard) for op in moved]


def _decode(ins: Instruction, layout: Layout, signature: Signature) -> list[MicroOp]:
    targets = ins.operands[0].split("|")
    sources = ins.operands[1:]
    if len(sources) != len(signature.sources) or len(targets) > 1 + bool(signature.second):
        raise UnknownOpcodeError(
            f"{ins.opcode} with {len(ins.operands)} operands is not known ({ins.where}): {ins}"
        )
    refs = tuple(
        layout.source(ins, token, kind)
        for token, kind in zip(sources, signature.sources, strict=True)
    )
    ops = [MicroOp(signature.function, refs, layout.target(ins, targets[0], signature.target))]
    if len(targets) == 2:
        second = layout.target(ins, targets[1], signature.target)
        ops.insert(0, MicroOp(signature.second, refs, second))
        if ops[0].target in refs:
            raise UnknownOpcodeError(f"{ins}: a target is also a source ({ins.where})")
    return ops
