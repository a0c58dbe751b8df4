"""tcgen05: tensor memory, its loads and stores, and products of the tensor core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.operands import (
    DONE,
    Effect,
    Mask,
    Operands,
    Reader,
    first,
    lanes,
    uniform,
)
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.products import Product, Tile, smem_tile
from blasst.kernels.verify.registers import POISON, Array

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

COLUMNS = 512
ROWS = 128
QUADRANT = 32
COLLECTOR = ("discard", "fill", "lastuse")


class TensorMemory:
    """128 lanes x 512 columns of 32 bits. owned: columns allocated; started: by alloc."""

    def __init__(self) -> None:
        self.cells = np.full((ROWS, COLUMNS), POISON, np.uint32)
        self.allocated: dict[int, int] = {}
        self.permit = True

    def clear(self) -> None:
        self.cells[:] = POISON
        self.allocated.clear()
        self.permit = True

    def check(self, column: int, count: int) -> None:
        """Raises ExecutionError unless the columns are allocated."""
        for start, owned in self.allocated.items():
            if start <= column and column + count <= start + owned:
                return
        raise ExecutionError(
            f"TMEM columns [{column}, {column + count}) are not allocated: {self.allocated}"
        )


def allocate(ops: Operands) -> Effect:
    """The first free columns; their address goes to shared memory."""
    ops.allow("cta_group::1", "sync", "aligned", "shared::cta", "b32")
    place, count = ops.address(0), ops.read(1, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        columns = uniform(count(warp), mask)
        tensor = block.tensor
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise ops.error(warp, f"{columns} TMEM columns: not a power of two from 32 to 512")
        if not tensor.permit:
            raise ops.error(warp, "tcgen05.alloc after relinquish_alloc_permit")
        start = max((a + n for a, n in tensor.allocated.items()), default=0)
        if start + columns > COLUMNS:
            raise ops.error(warp, f"no {columns} TMEM columns are free: {tensor.allocated}")
        tensor.allocated[start] = columns
        block.tensor_columns = max(block.tensor_columns, start + columns)
        storage, at = block.memory.find("shared", place(warp)[first(mask) :][:1], 4)
        if block.races is not None:
            block.races.generic(warp, storage, at, 4, True, ops.ins)
        storage.store(at, np.array([start], np.uint32), 4)
        return DONE

    return run


def deallocate(ops: Operands) -> Effect:
    """Every access to the columns must have happened before."""
    ops.allow("cta_group::1", "sync", "aligned", "b32")
    place, count = ops.read(0, "b32"), ops.read(1, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        start, columns = uniform(place(warp), mask) & 0xFFFF, uniform(count(warp), mask)
        if block.tensor.allocated.pop(start, None) != columns:
            raise ops.error(warp, f"dealloc of {columns} TMEM columns at {start}: never allocated")
        if block.races is not None:
            block.races.tensor_free(warp, start, columns, ops.ins)
        return DONE

    return run


def relinquish(ops: Operands) -> Effect:
    ops.allow("cta_group::1", "sync", "aligned")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        block.tensor.permit = False
        return DONE

    return run


def _columns(ops: Operands) -> int:
    """Registers of each lane; refuses shapes other than 32 lanes x 32 bits."""
    shapes = [m for m in ops.modifiers if m[0] == "x" and m[1:].isdigit()]
    ops.allow("sync", "aligned", "32x32b", "b32", *shapes)
    ops.one_of("32x32b")
    if len(shapes) != 1:
        raise ops.unknown("needs one repeat count")
    return int(shapes[0][1:])


def _window(block: Block, ops: Operands, warp: Warp, address: int, count: int) -> tuple[slice, int]:
    """(lanes that the warp may touch, first column)."""
    row, column = address >> 16, address & 0xFFFF
    quadrant = QUADRANT * (warp.id % 4)
    if row not in (0, quadrant):
        raise ops.error(warp, f"TMEM lane {row}: this warp reaches lanes {quadrant} and up")
    with block.guard(ops, warp):
        block.tensor.check(column, count)
    return slice(quadrant, quadrant + QUADRANT), column


def load(ops: Operands) -> Effect:
    """Registers may be used after wait::ld; a use before it is misuse, and is waited for."""
    count = _columns(ops)
    rows, place = ops.rows(0), ops.address(1)
    targets = [ops.write(token, "b32") for token in ops.parts(0)]
    if len(targets) != count:
        raise ops.unknown(f"{len(targets)} registers for {count} columns")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        window, column = _window(block, ops, warp, uniform(place(warp), mask), count)
        if block.races is not None:
            block.races.tensor_load(warp, column, count, rows, ops.ins)
        cells = block.tensor.cells[window, column : column + count]
        for i, target in enumerate(targets):
            target(warp, None, cells[:, i])
        return DONE

    return run


def store(ops: Operands) -> Effect:
    """Buffered until wait::st, the latest that the hardware may be."""
    count = _columns(ops)
    place = ops.address(0)
    sources = [ops.read(token, "b32") for token in ops.parts(1)]
    if len(sources) != count:
        raise ops.unknown(f"{len(sources)} registers for {count} columns")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        window, column = _window(block, ops, warp, uniform(place(warp), mask), count)
        if block.races is not None:
            block.races.tensor_store(warp, column, count, ops.ins)
        values = np.stack([source(warp) for source in sources], 1)
        warp.tensor_stores.append((window, column, values))
        return DONE

    return run


def wait(ops: Operands) -> Effect:
    ops.allow("sync", "aligned")
    stores = "wait::st" in ops.ins.opcode

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        if stores:
            flush_stores(block, warp)
        if block.races is not None:
            block.races.tensor_wait(warp, stores, ops.ins)
        return DONE

    return run


def flush_stores(block: Block, warp: Warp) -> None:
    for window, column, values in warp.tensor_stores:
        block.tensor.cells[window, column : column + values.shape[1]] = values
    warp.tensor_stores.clear()


@dataclass(eq=False)
class Mma:
    """One tcgen05.mma in the queue; a: descriptor, or column of TMEM."""

    warp: Warp
    ins: Instruction
    d: int
    a: int
    a_in_tensor: bool
    b: int
    shape: int
    accumulate: bool
    clock: Any

    def run(self, block: Block) -> None:
        product = Product.decode(self.shape)
        shared = block.memory.shared
        b_tile = smem_tile(self.b, product.n, product.b_transposed, "tcgen05")
        a_tile: Tile | None = None
        if self.a_in_tensor:
            block.tensor.check(self.a, 8)
            cells = np.ascontiguousarray(block.tensor.cells[:, self.a : self.a + 8])
            a = product.numbers(cells.view(np.uint16))
        else:
            a_tile = smem_tile(self.a, product.m, product.a_transposed, "tcgen05")
            a = a_tile.load(shared, product.bf16)
        b = b_tile.load(shared, product.bf16)
        block.tensor.check(self.d, product.n)
        if block.races is not None:
            block.races.mma(self, product.n, a_tile, b_tile)
        target = block.tensor.cells[:, self.d : self.d + product.n]
        result = a @ b.T
        if self.accumulate:
            result += target.view(np.float32)
        target[:] = result.view(np.uint32)
        block.products += 1


@dataclass(eq=False)
class Commit:
    """Arrives on a barrier when all earlier products of the queue are done."""

    warp: Warp
    ins: Instruction
    barrier: int
    clock: Any

    def run(self, block: Block) -> None:
        barrier = block.mbarriers.get(self.barrier)
        if barrier is None:
            raise ExecutionError(f"{self.warp.name}: the mbarrier of a commit has gone")
        if block.races is not None:
            block.races.commit(self, barrier)
        barrier.arrive()


def mma(ops: Operands) -> Effect:
    """[d], a-descriptor or [a], b-descriptor, instruction descriptor {, {lane mask}}, enable."""
    # The collector keeps an operand for later products; only reading it back is refused.
    ops.allow("cta_group::1", "kind::f16", *(f"collector::a::{u}" for u in COLLECTOR))
    d, b, shape = ops.address(0), ops.read(2, "b64"), ops.read(3, "b32")
    in_tensor = ops.ins.operands[1].startswith("[")
    a: Reader = ops.address(1) if in_tensor else ops.read(1, "b64")
    enable = ops.read(ops.count() - 1, "pred")
    masks = [ops.read(t, "b32") for t in ops.parts(4)] if ops.count() == 6 else []

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        clock = None if block.races is None else block.races.issue(warp)
        for lane in lanes(mask):
            if any(int(m(warp)[lane]) for m in masks):
                raise ops.error(warp, "disabled output lanes are not modelled")
            start = int(a(warp)[lane])
            block.tensor_queue.append(
                Mma(
                    warp=warp,
                    ins=ops.ins,
                    d=int(d(warp)[lane]) & 0xFFFF,
                    a=start & 0xFFFF if in_tensor else start,
                    a_in_tensor=in_tensor,
                    b=int(b(warp)[lane]),
                    shape=int(shape(warp)[lane]),
                    accumulate=bool(enable(warp)[lane]),
                    clock=clock,
                )
            )
        return DONE

    return run


def commit(ops: Operands) -> Effect:
    ops.allow("cta_group::1", "mbarrier::arrive::one", "shared::cluster", "b64")
    place = ops.address(0)

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        clock = None if block.races is None else block.races.issue(warp)
        at: Array = place(warp)
        for lane in lanes(mask):
            found = block.mbarrier(ops, warp, int(at[lane]))
            if block.races is not None:
                block.races.use_barrier(warp, found, ops.ins, asynchronous=True)
            block.tensor_queue.append(Commit(warp, ops.ins, int(at[lane]), clock))
        return DONE

    return run


def fence(ops: Operands) -> Effect:
    ops.allow()
    return lambda block, warp, mask: DONE


TABLE = {
    "tcgen05.alloc": allocate,
    "tcgen05.dealloc": deallocate,
    "tcgen05.relinquish_alloc_permit": relinquish,
    "tcgen05.ld": load,
    "tcgen05.st": store,
    "tcgen05.wait::ld": wait,
    "tcgen05.wait::st": wait,
    "tcgen05.mma": mma,
    "tcgen05.commit": commit,
    "tcgen05.fence::before_thread_sync": fence,
    "tcgen05.fence::after_thread_sync": fence,
}
