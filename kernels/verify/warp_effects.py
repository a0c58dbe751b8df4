"""Instructions in which the lanes of a warp work together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify.memory_effects import SPACES
from blasst.kernels.verify.operands import CONVERGE, DONE, Effect, Mask, Operands, uniform
from blasst.kernels.verify.registers import LANES, Array

if TYPE_CHECKING:
    from collections.abc import Callable

    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.memory import Storage
    from blasst.kernels.verify.warp import Warp

    _Lanes = Callable[[Warp], Array]

LANE = np.arange(LANES)


def _bits(values: Array) -> int:
    """A 32-bit word from 32 booleans."""
    return int(np.packbits(values, bitorder="little").view(np.uint32)[0])


def _active(mask: Mask) -> Array:
    return np.ones(LANES, np.bool_) if mask is None else mask


def _missing(warp: Warp, mask: Mask, members: int) -> bool:
    """Whether lanes that the instruction names, and that have not ended, are elsewhere."""
    if mask is None:
        return False
    here = _bits(mask)
    alive = 0
    for group in warp.groups:
        alive |= _bits(_active(group.mask))
    return bool(members & alive & ~here)


def _with_members(ops: Operands, at: int, body: Any) -> Effect:
    """body(block, warp, mask) once all lanes of the member mask are here."""
    members = ops.read(at, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if _missing(warp, mask, uniform(members(warp), mask)):
            return CONVERGE
        body(block, warp, mask)
        return DONE

    return run


def elect(ops: Operands) -> Effect:
    """One lane, the same for equal masks: which one is the schedule's choice."""
    ops.allow("sync")
    names = ops.ins.operands[0].split("|")
    lane_out = ops.write(names[0], "b32")
    chosen_out = ops.write(names[1], "pred")

    def body(block: Block, warp: Warp, mask: Mask) -> None:
        active = _active(mask)
        lane = block.schedule.leader if active[block.schedule.leader] else int(active.argmax())
        lane_out(warp, mask, np.full(LANES, lane, np.uint32))
        chosen_out(warp, mask, np.equal(lane, LANE))

    return _with_members(ops, 1, body)


def shuffle(ops: Operands) -> Effect:
    """shfl.sync.{idx,bfly,up,down}.b32 d{|p}, a, b, c, members."""
    ops.allow("sync", "b32", "idx", "bfly", "up", "down")
    mode = ops.one_of("idx", "bfly", "up", "down")
    names = ops.ins.operands[0].split("|")
    target = ops.write(names[0], "b32")
    valid_out = ops.write(names[1], "pred") if len(names) > 1 else None
    source, by, clamp = ops.read(1, "b32"), ops.read(2, "b32"), ops.read(3, "b32")

    def body(block: Block, warp: Warp, mask: Mask) -> None:
        c = clamp(warp).astype(np.int64)
        b = by(warp).astype(np.int64) & 31
        segment = (c >> 8) & 31
        low, limit = LANE & segment, c & 31
        high = (LANE & segment) | (limit & ~segment)
        lane: Array = {"idx": low | (b & ~segment), "bfly": LANE ^ b, "down": LANE + b,
                       "up": LANE - b}[mode]  # fmt: skip
        valid: Array = lane >= high if mode == "up" else lane <= high
        lane = np.where(valid, lane, LANE)
        target(warp, mask, source(warp)[lane].copy())
        if valid_out is not None:
            valid_out(warp, mask, valid)

    return _with_members(ops, 4, body)


def vote(ops: Operands) -> Effect:
    ops.allow("sync", "all", "any", "uni", "ballot", "pred", "b32")
    mode = ops.one_of("all", "any", "uni", "ballot")
    token = ops.ins.operands[1]
    source, negated = ops.read(token.lstrip("!"), "pred"), token.startswith("!")
    target = ops.write(0, "b32" if mode == "ballot" else "pred")

    def body(block: Block, warp: Warp, mask: Mask) -> None:
        value = ~source(warp) if negated else source(warp)
        active = _active(mask)
        if mode == "ballot":
            target(warp, mask, np.full(LANES, _bits(value & active), np.uint32))
            return
        chosen = value[active]
        result = {
            "all": bool(chosen.all()),
            "any": bool(chosen.any()),
            "uni": bool(chosen.all() or not chosen.any()),
        }[mode]
        target(warp, mask, np.full(LANES, result, np.bool_))

    return _with_members(ops, 2, body)


def reduce(ops: Operands) -> Effect:
    """redux.sync of integers, and min/max of float32 (sm_100a)."""
    names = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
             "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
    ops.allow("sync", "u32", "s32", "b32", "f32", "NaN", "abs", *names)
    if "abs" in ops.modifiers:
        raise ops.unknown(".abs is not known")
    name = ops.one_of(*names)
    kind = ops.ins.opcode.rsplit(".", 1)[1]
    source, target = ops.read(1, kind), ops.write(0, kind)
    combine: Any = names[name]
    if kind == "f32" and "NaN" not in ops.modifiers:
        combine = {"min": np.fmin, "max": np.fmax}[name]

    def body(block: Block, warp: Warp, mask: Mask) -> None:
        values = source(warp)
        result = combine.reduce(values[_active(mask)], dtype=values.dtype)
        target(warp, mask, np.full(LANES, result, values.dtype))

    return _with_members(ops, 2, body)


def active_mask(ops: Operands) -> Effect:
    ops.allow("b32")
    target = ops.write(0, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        target(warp, mask, np.full(LANES, _bits(_active(mask)), np.uint32))
        return DONE

    return run


def warp_sync(ops: Operands) -> Effect:
    ops.allow()
    return _with_members(ops, 0, lambda block, warp, mask: warp.meet())


def match(ops: Operands) -> Effect:
    """match.any.sync.b32 d, a, members."""
    ops.allow("any", "sync", "b32")
    ops.one_of("any")
    source, target = ops.read(1, "b32"), ops.write(0, "b32")

    def body(block: Block, warp: Warp, mask: Mask) -> None:
        values, active = source(warp), _active(mask)
        found = [_bits((values == values[lane]) & active) for lane in range(LANES)]
        target(warp, mask, np.array(found, np.uint32))

    return _with_members(ops, 2, body)


def set_registers(ops: Operands) -> Effect:
    """setmaxnreg: counted by the block, which must own what its warps hold."""
    ops.allow("inc", "dec", "sync", "aligned", "u32")
    count = int(ops.ins.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise ops.unknown("the register count must be a multiple of 8 from 24 to 256")
    grows = "inc" in ops.modifiers

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        return block.registers.resize(ops, warp, count, grows)

    return run


def _row_lanes(ops: Operands, at: int, count: int) -> _Lanes:
    """The addresses that the lanes of `count` matrices hold in operand `at`."""
    place = ops.address(at)
    return lambda warp: place(warp)[: 8 * count]


def _matrix_rows(
    ops: Operands, block: Block, warp: Warp, mask: Mask, lanes: _Lanes, *, writes: bool
) -> tuple[Storage, Array]:
    """Where the rows of the matrices are: lane 8 * i + r names row r of matrix i, 16 bytes."""
    if not warp.converged(mask):
        raise ops.error(warp, "lanes of the warp are not all here")
    storage, at = block.memory.find("shared", lanes(warp), 16)
    warp.touch(None)
    if block.races is not None:
        block.races.generic(warp, storage, at, 16, writes, ops.ins)
    return storage, at


def store_matrix(ops: Operands) -> Effect:
    """stmatrix of 8 x 8 matrices of 16 bits."""
    ops.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *SPACES)
    count, transposed = int(ops.one_of("x1", "x2", "x4")[1]), "trans" in ops.modifiers
    lanes = _row_lanes(ops, 0, count)
    sources = [ops.read(token, "b32") for token in ops.parts(1)]

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        storage, at = _matrix_rows(ops, block, warp, mask, lanes, writes=True)
        for i, source in enumerate(sources):
            matrix = source(warp).view(np.uint16).reshape(8, 8)
            matrix = matrix.T if transposed else matrix
            rows = at[8 * i : 8 * i + 8, None] + 2 * np.arange(8)
            storage.store(rows, matrix, 2)
        return DONE

    return run


def load_matrix(ops: Operands) -> Effect:
    """ldmatrix of 8 x 8 matrices of 16 bits."""
    ops.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *SPACES)
    count, transposed = int(ops.one_of("x1", "x2", "x4")[1]), "trans" in ops.modifiers
    lanes = _row_lanes(ops, 1, count)
    targets = [ops.write(token, "b32") for token in ops.parts(0)]

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        storage, at = _matrix_rows(ops, block, warp, mask, lanes, writes=False)
        for i, target in enumerate(targets):
            matrix = storage.load(at[8 * i : 8 * i + 8, None] + 2 * np.arange(8), 2)
            matrix = np.ascontiguousarray(matrix.T if transposed else matrix)
            target(warp, None, matrix.reshape(64).view(np.uint32))
        return DONE

    return run


TABLE = {
    "elect": elect,
    "shfl": shuffle,
    "vote": vote,
    "redux": reduce,
    "match": match,
    "activemask": active_mask,
    "bar.warp.sync": warp_sync,
    "setmaxnreg": set_registers,
    "stmatrix": store_matrix,
    "ldmatrix": load_matrix,
}
