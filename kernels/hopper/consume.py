"""Consumer warpgroup: 64 query rows against the key blocks, skipping those that do not matter.

The product P @ V of a block is issued one visit later, behind the next Q @ K.T.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from blasst.kernels.cute.fragment import (
    ROWS_PER_THREAD,
    column,
    first_column,
    first_row,
    rows_view,
    step_of,
)
from blasst.kernels.cute.mma import issue
from blasst.kernels.cute.ring import Ring
from blasst.kernels.cute.softmax import Softmax, rescale_rows
from blasst.kernels.cute.tile import Tile
from blasst.kernels.cute.trace import NO_TRACE, Step, Trace
from blasst.kernels.cute.vote import any_thread
from blasst.kernels.hopper.config import WARPGROUP, Config


@dataclass(frozen=True)
class Operands:
    """Fragments of one warpgroup: q, p, scores, acc; k and v with their stages."""

    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    scores: cute.Tensor
    acc: cute.Tensor


@dataclass(frozen=True)
class Consumer:
    """tile: this warpgroup's rows. visits: blocks of the whole thread block's tile, >= tile's.

    floor: [2], log2(lambda) of each row; +inf for rows that do not exist. seen: with a block mask,
    `seen.Seen`, what the rows see of each visit.
    """

    config: Config
    group: Int32
    thread: Int32
    tile: Tile
    visits: Int32
    keys: Ring
    values: Ring
    operands: Operands
    softmax: Softmax
    floor: cute.Tensor
    seen: Any = None
    trace: Trace = NO_TRACE

    @cute.jit
    def attend(self) -> Int32:
        """acc = unnormalised output of the tile; returns the number of skipped blocks."""
        lead = self.visits - self.tile.n_blocks
        if cutlass.const_expr(self.seen is not None):
            lead = self.seen.lead
        for i in cutlass.range(lead, unroll=1):
            self.pass_by(i)
        skipped = Int32(0)
        self.operands.acc.fill(0.0)
        if self.tile.n_blocks > 0:
            self.visit_first(lead)
            keep = Boolean(True)
            for i in cutlass.range(lead + 1, self.visits, unroll=1):
                keep = self.visit(i, keep)
                skipped += 1 - Int32(keep)
            if cutlass.const_expr(self.seen is not None):
                # Blocks of the others came by as if they were skipped.
                skipped -= self.visits - lead - self.tile.n_blocks
            self.values.wait(self.visits - 1)
            if keep:
                self.issue_pv(self.visits - 1)
                warpgroup.wait_group(0)
        return skipped

    @cute.jit
    def pass_by(self, i: Int32) -> None:
        """A block that only other rows of the thread block see."""
        self.keys.wait(i)
        self.keys.release(i)
        self.values.wait(i)
        self.values.release(i)

    @cute.jit
    def visit_first(self, i: Int32) -> None:
        """The first visited block: never skipped, no product to overlap with."""
        self.keys.wait(i)
        self.issue_qk(i)
        words = self.look_up(i)
        self.look_ahead(i + 1)
        warpgroup.wait_group(0)
        self.keys.release(i)
        self.mask(self.visits - 1 - i, words)
        largest = self.softmax.thread_max(self.operands.scores)
        rescale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        base = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.softmax.rebase(largest, rescale, base)
        self.softmax.exponentiate(self.operands.scores, base, 0, self.steps)
        self.convert(0, self.steps)

    @cute.jit
    def visit(self, i: Int32, keep: Boolean) -> Boolean:
        """Visit i > 0; keep: the previous block was kept. Returns whether this one is."""
        o, early = self.operands, self.config.early
        if cutlass.const_expr(not self.config.looks_ahead):
            self.keys.wait(i)
        self.trace.mark(Step.WAIT_KEYS, i)
        # S = Q @ K.T
        self.issue_qk(i)
        words = self.look_up(i)
        self.values.wait(i - 1)
        self.trace.mark(Step.WAIT_VALUES, i)
        if keep:
            # O += P @ V, of the previous block
            self.issue_pv(i - 1)
            self.look_ahead(i + 1)
            warpgroup.wait_group(1)
        else:
            self.look_ahead(i + 1)
            warpgroup.wait_group(0)
        self.trace.mark(Step.WAIT_SCORES, i)
        self.keys.release(i)
        self.mask(self.visits - 1 - i, words)
        largest = self.softmax.thread_max(o.scores)
        self.trace.mark(Step.MAX, i)
        kept = self.vote(largest, self.visits - 1 - i)
        self.trace.mark(Step.VOTE, i)
        rescale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        base = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        if kept:
            self.softmax.rebase(largest, rescale, base)
            self.softmax.exponentiate(o.scores, base, 0, early)
            self.trace.mark(Step.EXP2, i)
        # A basic block of its own keeps ptxas from moving the wait above the exponentials.
        warpgroup.wait_group(0)
        self.trace.mark(Step.WAIT_PV, i)
        self.values.release(i - 1)
        if kept:
            self.convert(0, early)
            # Conversions hide behind the exponentials that are left.
            for step in cutlass.range_constexpr(early, self.steps):
                self.softmax.exponentiate(o.scores, base, step, step + 1)
                self.convert(step, step + 1)
            rescale_rows(o.acc, rescale)
            self.trace.mark(Step.STORE_P, i)
        return kept

    @property
    def steps(self) -> int:
        """Of 16 keys in a block."""
        return self.config.tile_n // 16

    @cute.jit
    def look_up(self, i: Int32) -> Any:
        """What of `seen` hides scores of visit i, while the product that makes them runs."""
        words = None
        if cutlass.const_expr(self.seen is not None):
            self.seen.advance(i)
            words = self.seen.words()
        return words

    @cute.jit
    def look_ahead(self, i: Int32) -> None:
        if cutlass.const_expr(self.config.looks_ahead):
            self.await_keys(i)

    @cute.jit
    def await_keys(self, i: Int32) -> None:
        if i < self.visits:
            self.keys.wait(i)

    @cute.jit
    def convert(self, first: cutlass.Constexpr[int], last: cutlass.Constexpr[int]) -> None:
        """Steps [first, last) of P, to the operand of P @ V."""
        o = self.operands
        for step in cutlass.range_constexpr(first, last):
            p = step_of(o.scores, step).load().to(o.p.element_type)
            step_of(o.p, step).store(p)

    @cute.jit
    def read_queries(self, rows: cute.Tensor) -> None:
        """The warpgroup's rows from shared memory to registers."""
        o = self.operands
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), rows.element_type)
        copy = cute.make_tiled_copy_A(atom, o.mma_qk).get_slice(self.thread)
        cute.copy(atom, copy.partition_S(rows), copy.retile(o.q))
        # From here on one lane of a warp arrives at barriers for all of them.
        cute.arch.sync_warp()

    @cute.jit
    def vote(self, largest: cute.Tensor, n: Int32) -> Boolean:
        """Whether a row of the warpgroup needs block n.

        Without a vote it is a test that always holds but that no compiler can see through: with
        straight-line code ptxas moves P's registers and serialises the products.
        """
        kept = n * self.config.tile_n < self.tile.seqlen_k
        if cutlass.const_expr(self.seen is not None):
            kept = self.seen.visited()
        if cutlass.const_expr(self.config.vote):
            veto = self.softmax.vetoes(largest, self.floor)
            if cutlass.const_expr(self.seen is not None):
                # lambda 0: kept even when no row has seen anything yet.
                veto = veto | (self.floor[0] == -Float32.inf)
            barrier = self.config.group_barrier(self.group)
            veto = any_thread(veto, barrier, WARPGROUP)
            if cutlass.const_expr(self.seen is not None):
                veto = veto & kept
            # The vote of the warp tells the compiler that the branches on it are uniform.
            kept = cute.arch.vote_any_sync(veto)
        return kept

    @cute.jit
    def issue_qk(self, i: Int32) -> None:
        o = self.operands
        issue(o.mma_qk, o.scores, o.q, o.k[None, None, None, self.keys.stage(i)], False)

    @cute.jit
    def issue_pv(self, i: Int32) -> None:
        o = self.operands
        issue(o.mma_pv, o.acc, o.p, o.v[None, None, None, self.values.stage(i)], True)

    @cute.jit
    def mask(self, n: Int32, words: Any) -> None:
        """Scores of block n that a row does not see become -inf. words: what of `seen`."""
        if cutlass.const_expr(self.seen is not None):
            self.seen.hide(self.operands.scores, words)
        elif n >= self.tile.n_full:
            self.hide_beyond(n)

    @cute.jit
    def hide_beyond(self, n: Int32) -> None:
        """Right of the diagonal, and behind the last key."""
        rows = rows_view(self.operands.scores)
        first_key = n * self.config.tile_n + first_column(self.thread)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            reach = self.tile.seqlen_k - first_key
            if cutlass.const_expr(self.config.causal):
                row = self.tile.row + first_row(self.thread) + 8 * r
                reach = cutlass.min(reach, self.tile.context + row + 1 - first_key)
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] if column(c) < reach else -Float32.inf
