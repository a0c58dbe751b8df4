"""Bulk copies between global and shared memory: TMA tensor boxes and plain runs of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.groups import committing
from blasst.kernels.verify.operands import DONE, RETRY, Effect, Mask, Operands, Reader, lanes
from blasst.kernels.verify.parse import Instruction, split_operands
from blasst.kernels.verify.registers import PARAMETER_WINDOW, Array
from blasst.kernels.verify.tensor_map import TensorMap

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

DIMENSIONS = tuple(f"{n}d" for n in range(1, 6))
COMMON = (*DIMENSIONS, "tile", "global", "shared::cta", "shared::cluster", "L2::cache_hint")
_TENSOR = re.compile(r"\[\s*(\S+?)\s*,\s*(\{.*\})\s*\]$")
REDUCTIONS = ("add", "min", "max")


@dataclass(eq=False)
class BulkLoad:
    """Global to shared memory; its bytes count on the mbarrier. clock: of the issuing thread."""

    warp: Warp
    ins: Instruction
    source: Array
    target: Array
    inside: Array
    unit: int
    barrier: int
    clock: Any

    def run(self, block: Block) -> None:
        shared = block.memory.shared
        values = np.zeros(len(self.target), f"u{self.unit}")
        if self.inside.any():
            storage, at = block.memory.find("global", self.source[self.inside], self.unit)
            values[self.inside] = storage.load(at, self.unit)
            if block.races is not None:
                block.races.bulk_global(self, storage, at, False)
        barrier = block.mbarriers.get(self.barrier)
        if barrier is None:
            raise ExecutionError(f"{self.warp.name}: the mbarrier of a copy has gone")
        if block.races is not None:
            block.races.bulk_load(self, barrier)
        shared.store(self.target, values, self.unit)
        barrier.transfer(len(self.target) * self.unit)


@dataclass(eq=False)
class BulkStore:
    """Shared to global memory, in the issuing thread's bulk group. reduction: None = overwrite."""

    warp: Warp
    ins: Instruction
    source: Array
    target: Array
    inside: Array
    unit: int
    reduction: tuple[str, Any] | None
    clock: Any
    done: bool = False

    def run(self, block: Block) -> None:
        values = block.memory.shared.load(self.source, self.unit)
        if block.races is not None:
            block.races.bulk_store(self)
        if self.inside.any():
            storage, at = block.memory.find("global", self.target[self.inside], self.unit)
            if not storage.writable:
                raise ExecutionError(f"{self.warp.name}: a bulk store writes input {storage.name}")
            if block.races is not None:
                block.races.bulk_global(self, storage, at, True)
            values = values[self.inside]
            if self.reduction is not None:
                name, number = self.reduction
                old, new = storage.load(at, self.unit).view(number), values.view(number)
                combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
                values = combine(old, new).view(values.dtype)
            storage.store(at, values, self.unit)
        self.done = True


def _tensor_operand(ops: Operands, at: int) -> tuple[Reader, list[Reader]]:
    m = _TENSOR.match(ops.ins.operands[at])
    if m is None:
        raise ops.unknown("the tensor operand is not known")
    coordinates = split_operands(m[2].strip("{}"))
    return ops.read(m[1], "b64"), [ops.read(token, "s32") for token in coordinates]


def _descriptor(block: Block, ops: Operands, warp: Warp, address: int) -> TensorMap:
    known = block.launch.maps.get(address)
    if known is None:
        if address < PARAMETER_WINDOW:
            raise ops.error(warp, f"the TMA descriptor at {address:#x} is no kernel parameter")
        index, offset = address - PARAMETER_WINDOW >> 16, address & 0xFFFF
        if offset % 64:
            raise ops.error(warp, "the TMA descriptor is not aligned to 64 bytes")
        known = TensorMap.decode(block.launch.parameters[index][offset:])
        block.launch.maps[address] = known
    return known


def tensor_copy(ops: Operands) -> Effect:
    """cp.async.bulk.tensor.Nd: the destination is named first."""
    ops.allow(*COMMON, "mbarrier::complete_tx::bytes", "bulk_group")
    return _tensor_load(ops) if ".mbarrier::" in ops.ins.opcode else _tensor_store(ops, None)


def tensor_reduce(ops: Operands) -> Effect:
    ops.allow(*COMMON, "bulk_group", *REDUCTIONS)
    return _tensor_store(ops, ops.one_of(*REDUCTIONS))


def _tensor_load(ops: Operands) -> Effect:
    to, barrier = ops.address(0), ops.address(2)
    tensor, coordinates = _tensor_operand(ops, 1)

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        clock = None if block.races is None else block.races.issue(warp)
        for lane in lanes(mask):
            described = _descriptor(block, ops, warp, int(tensor(warp)[lane]))
            at = [int(c(warp)[lane]) for c in coordinates]
            source, target, inside = described.elements(at, int(to(warp)[lane]))
            _check_shared(block, ops, warp, target, described.element)
            where = int(barrier(warp)[lane])
            found = block.mbarrier(ops, warp, where)
            if block.races is not None:
                block.races.use_barrier(warp, found, ops.ins, asynchronous=True)
            block.copies.append(
                BulkLoad(warp, ops.ins, source, target, inside, described.element, where, clock)
            )
        return DONE

    return run


def _tensor_store(ops: Operands, reduction: str | None) -> Effect:
    origin = ops.address(1)
    tensor, coordinates = _tensor_operand(ops, 0)

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        clock = None if block.races is None else block.races.issue(warp)
        issued = set()
        for lane in lanes(mask):
            at = [int(c(warp)[lane]) for c in coordinates]
            described = _descriptor(block, ops, warp, int(tensor(warp)[lane]))
            # The hardware takes one copy from a warp whose lanes all ask for the same one.
            key = (described.base, *at, int(origin(warp)[lane]))
            if key in issued:
                continue
            issued.add(key)
            target, source, inside = described.elements(at, key[-1])
            _check_shared(block, ops, warp, source, described.element)
            number = None if reduction is None else (reduction, _number(ops, described))
            job = BulkStore(warp, ops.ins, source, target, inside, described.element, number, clock)
            warp.bulk.open.append(job)
            block.copies.append(job)
        return DONE

    return run


def _number(ops: Operands, described: TensorMap) -> Any:
    """The type that a reduction works in: float32, the only one of its width in use here."""
    if described.element != 4:
        raise ops.unknown("reductions are known for float32 tensors only")
    return np.float32


def _check_shared(block: Block, ops: Operands, warp: Warp, at: Array, unit: int) -> None:
    try:
        block.memory.find("shared", at, unit)
    except ExecutionError as e:
        raise ops.error(warp, str(e)) from None


def plain_copy(ops: Operands) -> Effect:
    """cp.async.bulk of `size` bytes: global to shared (mbarrier) or back (bulk group)."""
    ops.allow(*COMMON, "mbarrier::complete_tx::bytes", "bulk_group")
    loads = ".mbarrier::" in ops.ins.opcode
    to, origin, size = ops.address(0), ops.address(1), ops.read(2, "b32")
    barrier = ops.address(3) if loads else None
    if not loads and ".global." not in ops.ins.opcode:
        raise ops.unknown("copies between blocks of a cluster are not supported")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        clock = None if block.races is None else block.races.issue(warp)
        for lane in lanes(mask):
            count = int(size(warp)[lane])
            if count % 16:
                raise ops.error(warp, f"a bulk copy of {count} bytes: not a multiple of 16")
            units = np.arange(count // 8) * 8
            source, target = int(origin(warp)[lane]) + units, int(to(warp)[lane]) + units
            inside = np.ones(len(units), np.bool_)
            _check_shared(block, ops, warp, target if loads else source, 8)
            if barrier is not None:
                where = int(barrier(warp)[lane])
                found = block.mbarrier(ops, warp, where)
                if block.races is not None:
                    block.races.use_barrier(warp, found, ops.ins, asynchronous=True)
                block.copies.append(
                    BulkLoad(warp, ops.ins, source, target, inside, 8, where, clock)
                )
            else:
                job = BulkStore(warp, ops.ins, source, target, inside, 8, None, clock)
                warp.bulk.open.append(job)
                block.copies.append(job)
        return DONE

    return run


def bulk_wait(ops: Operands) -> Effect:
    """wait_group{.read} N: all but the last N groups; .read: only until they have read."""
    ops.allow("read")
    left = int(ops.ins.operands[0])
    reads_only = "read" in ops.modifiers

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        jobs = warp.bulk.but_last(left)
        if any(not job.done for job in jobs):
            return RETRY
        block.drained[warp] = len(jobs)
        if block.races is not None:
            for job in jobs:
                block.races.joined_bulk(warp, job, reads_only)
        return DONE

    return run


def prefetch(ops: Operands) -> Effect:
    return lambda block, warp, mask: DONE


TABLE = {
    "cp.async.bulk.tensor": tensor_copy,
    "cp.reduce.async.bulk.tensor": tensor_reduce,
    "cp.async.bulk": plain_copy,
    "cp.async.bulk.commit_group": committing(lambda warp: warp.bulk),
    "cp.async.bulk.wait_group": bulk_wait,
    "cp.async.bulk.prefetch": prefetch,
    "prefetch": prefetch,
    "prefetchu": prefetch,
}
