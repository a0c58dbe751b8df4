"""MMA warp: issues every matrix product of both tiles, in the order of the schedule.

At visit i it issues S(i) = Q @ K.T and O += P(i - 1) @ V; skipped blocks lose only the latter.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05

from blasst.kernels.blackwell.config import TILES, Config
from blasst.kernels.blackwell.edges import Edges
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
    """visits: blocks that the thread block visits; leads: how many of them each tile passes by.

    kept: [tiles] in shared memory, whether the softmax warpgroup kept the block of p_full.
    """

    config: Config
    operands: Operands
    edges: Edges
    keys: Ring
    values: Ring
    visits: Int32
    leads: tuple[Int32, Int32]
    kept: cute.Tensor
    trace: Trace = NO_TRACE

    @cute.jit
    def multiply(self) -> None:
        order = self.config.plan.order
        for tile in cutlass.range_constexpr(TILES):
            self.edges.edge("q_full", tile).wait(0)
        for kind, tile in order:
            if cutlass.const_expr(kind == "qk"):
                self.issue_qk(tile, Int32(0), True)
        for i in cutlass.range(1, self.visits, unroll=1):
            for kind, tile in order:
                if cutlass.const_expr(kind == "qk"):
                    self.issue_qk(tile, i, False)
                else:
                    self.issue_pv(tile, i - 1)
            self.trace.mark(Step.ISSUE, i)
        for kind, tile in order:
            if cutlass.const_expr(kind == "pv"):
                self.issue_pv(tile, self.visits - 1)
                self.edges.edge("o_done", tile).commit(0)

    @cute.jit
    def issue_qk(self, tile: int, i: Int32, first: cutlass.Constexpr[bool]) -> None:
        """S = Q @ K.T of visit i."""
        o = self.operands
        if cutlass.const_expr(tile == 0):
            self.keys.wait(i)
        if cutlass.const_expr(self.config.cross_p and not first):
            self.edges.edge("s_free", tile).wait(i - 1)
        if i >= self.leads[tile]:
            k = o.k[None, None, None, self.keys.stage(i)]
            issue(o.mma_qk, o.scores[tile], o.q[None, None, None, tile], k, Boolean(False))
        self.edges.edge("s_full", tile).commit(i)
        if cutlass.const_expr(tile == TILES - 1):
            self.release(self.keys, i)

    @cute.jit
    def issue_pv(self, tile: int, i: Int32) -> None:
        """O += P @ V of visit i, unless it is skipped."""
        o = self.operands
        if cutlass.const_expr(tile == 0):
            self.values.wait(i)
        self.edges.edge("o_ready", tile).wait(i)
        self.edges.edge("p_full", tile).wait(i)
        keep = i >= self.leads[tile]
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
