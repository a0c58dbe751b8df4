"""wgmma: asynchronous products of a warpgroup on Hopper. Each warp computes its own 16 rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify import numerics
from blasst.kernels.verify.groups import committing
from blasst.kernels.verify.operands import DONE, Effect, Mask, Operands, uniform
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.products import DEPTH, numbers, smem_tile
from blasst.kernels.verify.registers import Array

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

_SHAPE = re.compile(r"m64n(\d+)k16$")
ROWS = 16  # of each of the four warps


@dataclass(eq=False)
class WarpProduct:
    """One warp's part of a wgmma. d, a: rows of registers; a is a descriptor without them."""

    warp: Warp
    ins: Instruction
    n: int
    d: list[int]
    a: list[int]
    a_descriptor: int
    b_descriptor: int
    transposed: tuple[bool, bool]
    bf16: bool
    accumulate: bool
    clock: Any
    epoch: int = 0
    done: bool = False

    def run(self, block: Block) -> None:
        registers = self.warp.file.arrays[32]
        shared = block.memory.shared
        part = (ROWS * (self.warp.id % 4), ROWS)
        b_tile = smem_tile(self.b_descriptor, self.n, self.transposed[1], "wgmma")
        tiles = [b_tile]
        if self.a:
            a = self._fragment(registers)
        else:
            a_tile = smem_tile(self.a_descriptor, 64, self.transposed[0], "wgmma", part)
            a = a_tile.load(shared, self.bf16)
            # Which warp's hardware reads which rows is not specified: for races, all read all.
            tiles.append(smem_tile(self.a_descriptor, 64, self.transposed[0], "wgmma"))
        if block.races is not None:
            block.races.warp_product(self, tiles)
        # [16, n] <-> register (n / 8, row half, column of 2), lane (row, column pair)
        target = registers.view(np.float32)
        before = None
        if self.accumulate:
            split = target[self.d].reshape(self.n // 8, 2, 2, 8, 4)
            before = split.transpose(1, 3, 0, 4, 2).reshape(ROWS, self.n)
        result = numerics.product(a, b_tile.load(shared, self.bf16), before)
        split = result.reshape(2, 8, self.n // 8, 4, 2)
        target[self.d] = split.transpose(2, 0, 4, 1, 3).reshape(self.n // 2, 32)
        self.done = True
        block.products += 1

    def _fragment(self, registers: Array) -> Array:
        """float32 [16, 16] from 4 registers of 16-bit pairs: (k half, row half) slowest last."""
        halves = registers[self.a].view(np.uint16).reshape(2, 2, 8, 4, 2)
        matrix = halves.transpose(1, 2, 0, 3, 4).reshape(ROWS, DEPTH)
        return numbers(np.ascontiguousarray(matrix), self.bf16)


def mma_async(ops: Operands) -> Effect:
    """d, a, b-descriptor, accumulate, scale-a, scale-b {, transpose-a}, transpose-b."""
    shapes = [m for m in ops.modifiers if _SHAPE.match(m)]
    ops.allow("sync", "aligned", "f32", "bf16", "f16", *shapes)
    match = _SHAPE.match(shapes[0]) if shapes else None
    if match is None or not ops.ins.opcode.endswith(("f32.bf16.bf16", "f32.f16.f16")):
        raise ops.unknown("only m64nNk16 of float16 or bfloat16 with float32 results is known")
    n = int(match[1])
    in_registers = ops.ins.operands[1].startswith("{")
    d, a = ops.rows(0), ops.rows(1) if in_registers else []
    a_descriptor = None if in_registers else ops.read(1, "b64")
    b_descriptor, accumulate = ops.read(2, "b64"), ops.read(3, "pred")
    flags = [int(token) for token in ops.ins.operands[4:]]
    if flags[:2] != [1, 1] or len(d) != n // 2:
        raise ops.unknown("negated operands are not modelled, and all of d must be named")
    transposed = (False if in_registers else bool(flags[2]), bool(flags[-1]))
    touched = frozenset((*d, *a))

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        if touched & warp.dirty:
            block.find("wgmma without wgmma.fence after its registers were used", warp, ops.ins)
        job = WarpProduct(
            warp=warp,
            ins=ops.ins,
            n=n,
            d=d,
            a=a,
            a_descriptor=uniform(a_descriptor(warp), mask) if a_descriptor else 0,
            b_descriptor=uniform(b_descriptor(warp), mask),
            transposed=transposed,
            bf16=ops.ins.opcode.endswith("bf16"),
            accumulate=bool(accumulate(warp)[0]),
            clock=None if block.races is None else block.races.issue(warp),
        )
        warp.products.open.append(job)
        warp.in_flight |= touched
        return DONE

    return run


def fence(ops: Operands) -> Effect:
    """Orders register accesses before the products that follow."""
    ops.allow("sync", "aligned")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        warp.dirty.clear()
        return DONE

    return run


def wait(ops: Operands) -> Effect:
    """wait_group N: products that no one has run yet run now, the latest that they may."""
    ops.allow("sync", "aligned")
    left = int(ops.ins.operands[0])

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        finished = warp.products.but_last(left)
        warp.products.forget(left)
        for job in finished:
            if not job.done:
                job.run(block)
            if block.races is not None:
                block.races.joined_product(warp, job)
        warp.in_flight = {row for job in warp.products.jobs() for row in (*job.d, *job.a)}
        return DONE

    return run


TABLE = {
    "wgmma.mma_async": mma_async,
    "wgmma.fence": fence,
    "wgmma.commit_group": committing(lambda warp: warp.products, "sync", "aligned"),
    "wgmma.wait_group": wait,
}
