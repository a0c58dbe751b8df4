"""MMA warp: issues every matrix product of both tiles, in the order of the schedule.

At visit i it issues S(i) = Q @ K.T and O += P(i - 1) @ V; skipped blocks lose only the latter.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05

from blasst.kernels.blackwell.config import TILES, Config
from blasst.kernels.blackwell.edges import Edges
from blasst.kernels.block_lists import NONE
from blasst.kernels.cute.ring import Ring
from blasst.kernels.cute.trace import NO_TRACE, Trace
from blasst.kernels.instruments.steps import Step


@dataclass(frozen=True)
class Operands:
    """Fragments: q (.., tile), k and v (.., stage) in shared memory; lists of a tile's p, s, o in
    tensor memory."""

    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: tuple[cute.Tensor, cute.Tensor]
    scores: tuple[cute.Tensor, cute.Tensor]
    out: tuple[cute.Tensor, cute.Tensor]


@dataclass(frozen=True)
class Multiplier:
    """visits: blocks that the thread block visits; leads: how many of them each tile passes by
    first.

    kept: [tiles] in shared memory, whether the softmax warpgroup kept the block of p_full. codes:
    with a block mask, `visits.Ahead` over what the tiles see, one visit kept and one ahead.
    """

    config: Config
    operands: Operands
    edges: Edges
    keys: Ring
    values: Ring
    visits: Int32
    leads: tuple[Int32, Int32]
    kept: cute.Tensor
    codes: Any = None
    trace: Trace = NO_TRACE

    @cute.jit
    def multiply(self) -> None:
        order = self.config.plan.order
        if cutlass.const_expr(self.config.block_mask):
            self.codes.start()
        for tile in cutlass.range_constexpr(TILES):
            self.edges.edge("q_full", tile).wait(0)
        for kind, tile in order:
            if cutlass.const_expr(kind == "qk"):
                self.issue_qk(tile, Int32(0), True)
        for i in cutlass.range(1, self.visits, unroll=1):
            if cutlass.const_expr(self.config.block_mask):
                self.codes.advance(i - 1)
            for kind, tile in order:
                if cutlass.const_expr(kind == "qk"):
                    self.issue_qk(tile, i, False)
                else:
                    self.issue_pv(tile, i - 1, -1)
            self.trace.mark(Step.ISSUE, i)
        for kind, tile in order:
            if cutlass.const_expr(kind == "pv"):
                self.issue_pv(tile, self.visits - 1, 0)
                self.edges.edge("o_done", tile).commit(0)

    @cute.jit
    def multiply_or_pass_by(self) -> None:
        """In a thread block that stays; an item without visits has its arrivals."""
        if self.visits > 0:
            self.multiply()
        else:
            self.pass_by()

    @cute.jit
    def pass_by(self) -> None:
        for tile in cutlass.range_constexpr(TILES):
            self.edges.edge("q_full", tile).wait(0)
            self.edges.edge("o_done", tile).commit(0)

    @cute.jit
    def issue_qk(self, tile: int, i: Int32, first: cutlass.Constexpr[bool]) -> None:
        """S = Q @ K.T of visit i."""
        o = self.operands
        if cutlass.const_expr(tile == 0):
            self.keys.wait(i)
        if cutlass.const_expr(self.config.cross_p and not first):
            self.edges.edge("s_free", tile).wait(i - 1)
        if self.visited(tile, i, 0):
            k = o.k[None, None, None, self.keys.stage(i)]
            issue(o.mma_qk, o.scores[tile], o.q[None, None, None, tile], k, Boolean(False))
        self.edges.edge("s_full", tile).commit(i)
        if cutlass.const_expr(tile == TILES - 1):
            self.release(self.keys, i)

    def visited(self, tile: int, i: Int32, offset: int) -> Boolean:
        """Whether the tile visits the block of visit i. offset: of i to the list's visit."""
        if self.config.block_mask:
            return self.codes.entry(offset, tile) != NONE
        return i >= self.leads[tile]

    @cute.jit
    def issue_pv(self, tile: int, i: Int32, offset: cutlass.Constexpr[int]) -> None:
        """O += P @ V of visit i, unless it is skipped."""
        o = self.operands
        if cutlass.const_expr(tile == 0):
            self.values.wait(i)
        self.edges.edge("o_ready", tile).wait(i)
        self.edges.edge("p_full", tile).wait(i)
        keep = self.visited(tile, i, offset)
        if cutlass.const_expr(self.config.vote):
            keep = keep & (self.kept[tile] != 0)
        if keep:
            v = o.v[None, None, None, self.values.stage(i)]
            issue(o.mma_pv, o.out[tile], o.p[tile], v, i > self.leads[tile])
        self.edges.edge("o_full", tile).commit(i)
        if cutlass.const_expr(tile == TILES - 1):
            self.release(self.values, i)

    @cute.jit
    def release(self, ring: Ring, i: Int32) -> None:
        """The stage is free when the products issued so far are complete."""
        with cute.arch.elect_one():
            tcgen05.commit(ring.empty(i))


@cute.jit
def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean,
) -> None:
    """acc (+)= a @ b.T over all k steps; the products of a warp complete in the order of issue."""
    # A new atom: its accumulate field changes below.
    atom = cute.make_mma_atom(mma.op)
    atom.set(tcgen05.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(tcgen05.Field.ACCUMULATE, True)
