"""Consumer warpgroup: 64 query rows against the key blocks, skipping those that do not matter.

Nothing of a warpgroup runs ahead of its own decisions: the tensor core works for the others
meanwhile. P takes the registers of its scores, part by part, and each part is multiplied at once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

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
from blasst.kernels.cute.softmax import NOTHING, Softmax, scale_rows
from blasst.kernels.cute.tile import Tile, position_of
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

    seen: with a block mask, `seen.Seen`, what the rows see of each visit.
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
            self.keys.wait(lead)
            skipped = self.visit_all(lead)
            self.values.wait(self.visits - 1)
            if cutlass.const_expr(self.seen is not None):
                # Blocks of the others came by as if they were skipped.
                skipped -= self.visits - lead - self.tile.n_blocks
        return skipped

    @cute.jit
    def pass_by(self, i: Int32) -> None:
        """A block that only other rows of the thread block see."""
        self.keys.wait(i)
        self.keys.release(i)
        self.values.wait(i)
        self.values.release(i)

    @cute.jit
    def visit_all(self, lead: Int32) -> Int32:
        """Visits from `lead` on; returns the number of skipped blocks."""
        skipped, there = Int32(0), Boolean(True)
        settled = self.settled_from(lead)
        for i in cutlass.range(lead, settled, unroll=1):
            kept, there = self.visit(i, lead, there, False)
            skipped += 1 - Int32(kept)
        if cutlass.const_expr(self.seen is None):
            for i in cutlass.range(settled, self.visits, unroll=1):
                kept, there = self.visit(i, lead, there, True)
                skipped += 1 - Int32(kept)
        return skipped

    @cute.jit
    def settled_from(self, lead: Int32) -> Int32:
        """The first visit before which every row has seen a key, that needs no mask, and where
        only what is not negative passes the vote. Under a block mask there is none."""
        first = self.visits
        if cutlass.const_expr(self.seen is None):
            whole = self.visits - self.tile.n_full
            first = cutlass.min(cutlass.max(whole, lead) + 1, self.visits)
            if cutlass.const_expr(self.config.vote):
                deep = cute.arch.make_warp_uniform(Int32(self.softmax.vote.deep))
                first = cutlass.max(first, deep * self.visits)
        return first

    @cute.jit
    def visit(
        self, i: Int32, lead: Int32, there: Boolean, settled: cutlass.Constexpr[bool]
    ) -> tuple[Boolean, Boolean]:
        """there: its keys were seen to be; without a vote they are. Returns whether block i is
        kept, the first one is, and `there` of the next."""
        o = self.operands
        if cutlass.const_expr(self.config.vote):
            self.await_keys(i, there)
        # S = Q @ K.T
        issue(o.mma_qk, o.scores, o.q, o.k[None, None, None, self.keys.stage(i)], False)
        words = self.look_up(i)
        if i > lead:
            # Not before they are there: a stage counts the arrivals of one round at a time.
            self.values.wait(i - 1)
            self.values.release(i - 1)
        self.trace.mark(Step.WAIT_VALUES, i)
        if cutlass.const_expr(self.config.vote):
            # Only a look: this block is judged before the slowest warpgroup has left the stage that
            # the next keys come to.
            there = self.keys.arrived(i + 1)
        elif i + 1 < self.visits:
            self.keys.wait(i + 1)
        self.trace.mark(Step.WAIT_KEYS, i)
        warpgroup.wait_group(0)
        self.trace.mark(Step.WAIT_SCORES, i)
        self.keys.release(i)
        if cutlass.const_expr(not settled):
            self.mask(self.visits - 1 - i, words)
        self.softmax.shift(o.scores)
        bits = self.softmax.greatest_bits(o.scores)
        self.trace.mark(Step.MAX, i)
        kept = self.needed(bits, i == lead, settled)
        self.trace.mark(Step.VOTE, i)
        if kept:
            outgrown = self.softmax.outgrown(bits, settled)
            if cute.arch.vote_any_sync(outgrown):
                bits = self.rebase(settled)
            if cutlass.const_expr(self.config.vote):
                self.softmax.vote.follow(bits)
            # O += P @ V
            self.multiply(i)
            self.trace.mark(Step.EXP2, i)
            # In this branch: beyond it ptxas keeps P and scores apart, for which there is no room.
            warpgroup.wait_group(0)
            self.trace.mark(Step.WAIT_PV, i)
        return kept, there

    @cute.jit
    def await_keys(self, i: Int32, there: Boolean) -> None:
        if not there:
            self.keys.wait(i)

    @cute.jit
    def needed(
        self, bits: cute.Tensor, first: Boolean, settled: cutlass.Constexpr[bool]
    ) -> Boolean:
        """Whether a row of the warpgroup needs the block of these scores. bits: the greatest."""
        own = Boolean(True)
        if cutlass.const_expr(self.seen is not None):
            own = self.seen.visited()
        if cutlass.const_expr(self.config.vote):
            if cutlass.const_expr(settled):
                veto = self.softmax.vote.passes(bits)
            else:
                veto = self.softmax.vote.passes_any(bits, self.operands.scores) | first
            barrier = self.config.group_barrier(self.group)
            # The vote of the warp tells the compiler that the branches on it are uniform.
            own = cute.arch.vote_any_sync(any_thread(veto & own, barrier, WARPGROUP))
        return own

    @cute.jit
    def rebase(self, settled: cutlass.Constexpr[bool]) -> cute.Tensor:
        """All rows of the warp, with no product in flight. Returns bits that change no level."""
        factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.softmax.rebase(self.operands.scores, factors, settled)
        scale_rows(self.operands.acc, factors)
        bits = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
        bits.fill(NOTHING)
        return bits

    @cute.jit
    def multiply(self, i: Int32) -> None:
        """Scores become P; P @ V of a part runs while the exponentials of the next are taken."""
        o, parts = self.operands, self.config.parts
        steps = self.config.tile_n // 16 // parts
        for part in cutlass.range_constexpr(parts):
            for step in cutlass.range_constexpr(steps * part, steps * part + steps):
                scores = step_of(o.scores, step)
                self.softmax.exponentiate(scores)
                step_of(o.p, step).store(scores.load().to(o.p.element_type))
            if cutlass.const_expr(part == 0):
                self.values.wait(i)
            v = o.v[None, None, None, self.values.stage(i)]
            issue(o.mma_pv, o.acc, o.p, v, True, (steps * part, steps))

    @cute.jit
    def look_up(self, i: Int32) -> Any:
        """What of `seen` hides scores of visit i, while the product that makes them runs."""
        words = None
        if cutlass.const_expr(self.seen is not None):
            self.seen.advance(i)
            words = self.seen.words()
        return words

    @cute.jit
    def mask(self, n: Int32, words: Any) -> None:
        """Scores of block n that a row does not see become -inf."""
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
                position = position_of(row, self.config.pack)
                reach = cutlass.min(reach, self.tile.context + position + 1 - first_key)
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] if column(c) < reach else -Float32.inf
