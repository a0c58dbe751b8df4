"""Loads, stores, atomics, and cp.async copies of single lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.groups import committing
from blasst.kernels.verify.memory import Storage
from blasst.kernels.verify.operands import (
    DONE,
    RETRY,
    Effect,
    Mask,
    Operands,
    Reader,
    lanes,
    uniform,
)
from blasst.kernels.verify.parse import BYTES
from blasst.kernels.verify.registers import BANK_OF_TYPE, Array

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

HINTS = (
    "weak", "volatile", "relaxed", "cta", "cluster", "gpu", "sys", "nc", "ca", "cg", "cs", "lu",
    "cv", "wb", "wt", "L1::no_allocate", "L1::evict_last", "L1::evict_first", "L1::evict_normal",
    "L1::evict_unchanged", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint",
    "L2::evict_first", "L2::evict_last", "L2::evict_normal", "noftz",
)  # fmt: skip
"""Cache hints, and orders and scopes that one block on its own cannot tell apart."""
SPACES = {"shared": "shared", "shared::cta": "shared", "global": "global", "": "generic"}
TYPES = tuple(f"{letter}{bits}" for letter in "busf" for bits in (8, 16, 32, 64))


def _space(ops: Operands) -> str:
    named = [s for s in SPACES if s and s in ops.modifiers]
    return SPACES[named[0]] if named else SPACES[""]


def _shape(ops: Operands) -> tuple[str, int]:
    """(element type, elements) of a load or store."""
    ops.allow(*HINTS, *SPACES, *TYPES, "v2", "v4", "v8")
    kind = ops.ins.opcode.rsplit(".", 1)[1]
    if kind not in BANK_OF_TYPE:
        raise ops.unknown("the type is not known")
    vector = ops.modifiers & {"v2", "v4", "v8"}
    return kind, int(min(vector)[1]) if vector else 1


def _register_kind(kind: str) -> str:
    """Type of the register that takes a memory element: bytes live in 16 bits."""
    return {"b8": "b16", "u8": "b16", "s8": "b16"}.get(kind, f"b{kind[1:]}")


def _widen(raw: Array, kind: str) -> Array:
    return raw.view(np.int8).astype(np.int16).view(np.uint16) if kind == "s8" else raw


def _reach(
    ops: Operands, block: Block, warp: Warp, space: str, at: Array, size: int
) -> tuple[Storage, Array]:
    try:
        return block.memory.find(space, at, size)
    except ExecutionError as e:
        raise ops.error(warp, str(e)) from None


def load(ops: Operands) -> Effect:
    kind, count = _shape(ops)
    space, size = _space(ops), BYTES[kind[1:]]
    place = ops.address(1)
    targets = [ops.write(token, _register_kind(kind)) for token in ops.parts(0)]
    if len(targets) != count:
        raise ops.unknown("vector and registers differ")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        at = place(warp) if mask is None else place(warp)[mask]
        storage, at = _reach(ops, block, warp, space, at, size * count if count > 1 else size)
        if storage is block.memory.shared:
            warp.touch(mask)
        if block.races is not None:
            block.races.generic(warp, storage, at, size * count, False, ops.ins)
        for i, write in enumerate(targets):
            value = _widen(storage.load(at + i * size, size), kind)
            if mask is not None:
                full = np.zeros(32, value.dtype)
                full[mask] = value
                value = full
            write(warp, mask, value)
        return DONE

    return run


def store(ops: Operands) -> Effect:
    kind, count = _shape(ops)
    space, size = _space(ops), BYTES[kind[1:]]
    place = ops.address(0)
    sources = [ops.read(token, _register_kind(kind)) for token in ops.parts(1)]
    if len(sources) != count:
        raise ops.unknown("vector and registers differ")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        at = place(warp) if mask is None else place(warp)[mask]
        storage, at = _reach(ops, block, warp, space, at, size * count if count > 1 else size)
        if not storage.writable:
            raise ops.error(warp, f"writes to the input {storage.name}")
        if storage is block.memory.shared:
            warp.touch(mask)
        if block.races is not None:
            block.races.generic(warp, storage, at, size * count, True, ops.ins)
        for i, read in enumerate(sources):
            value = read(warp) if mask is None else read(warp)[mask]
            storage.store(at + i * size, value, size)
        return DONE

    return run


ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, a, b: old + a,
    "min": lambda old, a, b: min(old, a),
    "max": lambda old, a, b: max(old, a),
    "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a,
    "xor": lambda old, a, b: old ^ a,
    "exch": lambda old, a, b: a,
    "cas": lambda old, a, b: b if old == a else old,
    "inc": lambda old, a, b: type(old)(0) if old >= a else old + type(old)(1),
    "dec": lambda old, a, b: a if old == 0 or old > a else old - type(old)(1),
}
NUMBERS = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
           "u64": np.uint64, "s64": np.int64, "b64": np.uint64}  # fmt: skip


def _atomic(ops: Operands, returns: bool) -> Effect:
    ops.allow(*HINTS, *SPACES, *TYPES, *ATOMICS)
    space, name = _space(ops), ops.one_of(*ATOMICS)
    kind = ops.ins.opcode.rsplit(".", 1)[1]
    if kind not in NUMBERS:
        raise ops.unknown("the type is not known")
    number, size = NUMBERS[kind], BYTES[kind[1:]]
    operands = ops.count() - int(returns)
    place = ops.address(int(returns))
    bits = f"b{kind[1:]}"
    a = ops.read(1 + int(returns), bits)
    b: Reader | None = ops.read(2 + int(returns), bits) if operands > 2 else None
    write = ops.write(0, bits) if returns else None
    combine = ATOMICS[name]

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        chosen = np.fromiter(lanes(mask), np.int64)
        storage, at = _reach(ops, block, warp, space, place(warp)[chosen], size)
        if not storage.writable:
            raise ops.error(warp, f"writes to the input {storage.name}")
        if storage is block.memory.shared:
            warp.touch(mask)
        if block.races is not None:
            block.races.atomic(warp, storage, at, size, ops.ins)
        old = np.zeros(32, number)
        first, second = a(warp).view(number), (b(warp) if b else a(warp)).view(number)
        for lane, where in zip(chosen, at, strict=True):
            cell = storage.views[size][(where - storage.base) // size :][:1].view(number)
            old[lane] = cell[0]
            cell[0] = combine(cell[0], first[lane], second[lane])
        if write is not None:
            write(warp, mask, old.view(f"u{size}"))
        return DONE

    return run


def atom(ops: Operands) -> Effect:
    return _atomic(ops, True)


def red(ops: Operands) -> Effect:
    return _atomic(ops, False)


@dataclass(eq=False)
class LaneCopy:
    """cp.async of one instruction: bytes of global memory to shared memory, zeros behind them."""

    warp: Warp
    ins: Any
    target: Array
    source: Array
    sizes: Array
    unit: int
    clock: Any
    done: bool = False

    def run(self, block: Block) -> None:
        for to, origin, size in zip(self.target, self.source, self.sizes, strict=True):
            data = np.zeros(self.unit, np.uint8)
            if size:
                storage, at = block.memory.find("global", np.array([origin]), 1)
                start = int(at[0]) - storage.base
                data[:size] = storage.data[start : start + size]
            start = int(to) - block.memory.shared.base
            block.memory.shared.data[start : start + self.unit] = data
        if block.races is not None:
            block.races.lane_copy(self)
        self.done = True


def copy_async(ops: Operands) -> Effect:
    """cp.async.{ca,cg}.shared.global [to], [from], unit {, bytes};"""
    ops.allow("ca", "cg", *SPACES, *HINTS)
    to, origin = ops.address(0), ops.address(1)
    unit = int(ops.ins.operands[2], 0)
    size = ops.read(3, "b32") if ops.count() > 3 else None

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        chosen = np.fromiter(lanes(mask), np.int64)
        sizes = size(warp)[chosen] if size else np.full(len(chosen), unit)
        target = to(warp)[chosen]
        _reach(ops, block, warp, "shared", target, unit)
        clock = None if block.races is None else block.races.issue(warp)
        source = origin(warp)[chosen]
        if (sizes > 0).any():
            read = source[sizes > 0]
            _reach(ops, block, warp, "global", read, unit if (sizes == unit).all() else 1)
        job = LaneCopy(warp, ops.ins, target, source, sizes, unit, clock)
        warp.copies.open.append(job)
        block.copies.append(job)
        return DONE

    return run


def copy_wait(ops: Operands) -> Effect:
    """wait_group N, or wait_all, which waits for copies that no group holds too."""
    ops.allow()
    everything = ops.ins.opcode.endswith("wait_all")
    left = None if everything else ops.read(0, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        keep = 0 if left is None else uniform(left(warp), mask)
        jobs = warp.copies.jobs() if everything else warp.copies.but_last(keep)
        if any(not job.done for job in jobs):
            return RETRY
        if block.races is not None:
            for job in jobs:
                block.races.joined_copy(warp, job)
        return DONE

    return run


TABLE = {
    "ld": load,
    "st": store,
    "atom": atom,
    "red": red,
    "cp.async": copy_async,
    "cp.async.commit_group": committing(lambda warp: warp.copies),
    "cp.async.wait_group": copy_wait,
    "cp.async.wait_all": copy_wait,
}
