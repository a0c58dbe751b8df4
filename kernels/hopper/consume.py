"""Consumer warpgroup: 64 query rows against the key blocks, skipping those that do not matter.

The product P @ V of a block is issued one visit later, behind the next Q @ K.T. Visits after a kept
block and after a skipped one are loops of their own, each without what it does not need.
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
from blasst.kernels.cute.softmax import LEAST, Softmax, scale_rows
from blasst.kernels.cute.tile import Tile, position_of
from blasst.kernels.cute.trace import NO_TRACE, Step, Trace
from blasst.kernels.hopper.config import Config

# When the values of the block before the last are released.
NOTHING, AFTER_PRODUCT, AT_ONCE = 0, 1, 2


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

    ballot: `ballot.Ballot`, None without a vote. seen: with a block mask, `seen.Seen`, what the
    rows see of each visit.
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
    ballot: Any
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
            whole = lead + 1
            if cutlass.const_expr(self.seen is None):
                whole = cutlass.max(self.visits - self.tile.n_full, whole)
            self.look_ahead(lead)
            keep = Boolean(False)
            for i in cutlass.range(lead, whole, unroll=1):
                keep = self.visit_alone(i, keep, lead)
                skipped += 1 - Int32(keep)
            if cutlass.const_expr(self.chooses):
                skipped += self.choose_from(whole, keep)
            else:
                for i in cutlass.range(whole, self.visits, unroll=1):
                    self.visit_after_kept(i, i)
                self.values.wait(self.visits - 1)
                self.issue_pv(self.visits - 1)
            warpgroup.wait_group(0)
            if cutlass.const_expr(self.seen is not None):
                # Blocks of the others came by as if they were skipped.
                skipped -= self.visits - lead - self.tile.n_blocks
        return skipped

    @property
    def chooses(self) -> bool:
        """Whether a block may be left out."""
        return self.config.vote or self.seen is not None

    @cute.jit
    def choose_from(self, first: Int32, keep: Boolean) -> Int32:
        """Visits from `first` on, and the last product. keep: the block before was kept. Returns
        the number of skipped blocks."""
        i, skipped, votes, owed = first, Int32(0), Int32(0), Int32(NOTHING)
        while i < self.visits:
            while keep & (i < self.visits):
                keep = self.visit_after_kept(i, votes)
                skipped += 1 - Int32(keep)
                owed = Int32(AFTER_PRODUCT)
                votes += 1
                i += 1
            while (i < self.visits) & (not keep):
                keep = self.visit_after_skipped(i, owed)
                skipped += 1 - Int32(keep)
                owed = Int32(AT_ONCE)
                i += 1
        self.values.wait(self.visits - 1)
        if keep:
            self.issue_pv(self.visits - 1)
        elif self.visits > 1:
            self.values.wait(self.visits - 2)
        return skipped

    @cute.jit
    def pass_by(self, i: Int32) -> None:
        """A block that only other rows of the thread block see."""
        self.keys.wait(i)
        self.keys.release(i)
        self.values.wait(i)
        self.values.release(i)

    @cute.jit
    def visit_alone(self, i: Int32, keep: Boolean, lead: Int32) -> Boolean:
        """The first block, which is kept, and blocks across the diagonal; nothing overlaps."""
        o = self.operands
        if cutlass.const_expr(not self.config.looks_ahead):
            self.keys.wait(i)
        self.issue_qk(i)
        words = self.look_up(i)
        if keep:
            self.values.wait(i - 1)
            self.issue_pv(i - 1)
        self.look_ahead(i + 1)
        warpgroup.wait_group(0)
        self.keys.release(i)
        if i > lead:
            self.values.wait(i - 1)
            self.values.release(i - 1)
        self.mask(self.visits - 1 - i, words)
        self.softmax.shift(o.scores)
        kept = Boolean(True)
        if cutlass.const_expr(self.config.vote):
            veto = self.softmax.vote.vetoes(o.scores)
            kept = self.ballot.together(veto | (i == lead))
        if kept:
            self.exponentiate(self.rebase())
            self.convert()
        return kept

    @cute.jit
    def visit_after_kept(self, i: Int32, votes: Int32) -> Boolean:
        """Returns whether block i is kept. votes: how many there were in such visits."""
        o = self.operands
        if cutlass.const_expr(not self.config.looks_ahead):
            self.keys.wait(i)
        self.trace.mark(Step.WAIT_KEYS, i)
        # S = Q @ K.T
        self.issue_qk(i)
        words = self.look_up(i)
        self.values.wait(i - 1)
        # O += P @ V, of the previous block
        self.issue_pv(i - 1)
        self.trace.mark(Step.WAIT_VALUES, i)
        self.look_ahead(i + 1)
        warpgroup.wait_group(1)
        self.trace.mark(Step.WAIT_SCORES, i)
        self.keys.release(i)
        self.hide(words)
        self.softmax.shift(o.scores)
        bits = self.softmax.greatest_bits(o.scores)
        outgrown = cute.arch.vote_any_sync(self.softmax.outgrown(bits))
        self.trace.mark(Step.MAX, i)
        kept = Boolean(True)
        if cutlass.const_expr(self.seen is not None):
            kept = self.seen.visited()
        if cutlass.const_expr(self.config.vote):
            kept = self.ballot.eager(self.needs(bits, kept), votes)
        self.trace.mark(Step.VOTE, i)
        if kept:
            # All warps of the group alike: whose bases follow, they decide for themselves.
            warpgroup.wait_group(0)
            self.trace.mark(Step.WAIT_PV, i)
            self.values.release(i - 1)
            self.exponentiate(self.follow(bits, outgrown))
            self.trace.mark(Step.EXP2, i)
            self.convert()
            self.trace.mark(Step.STORE_P, i)
        return kept

    @cute.jit
    def visit_after_skipped(self, i: Int32, owed: Int32) -> Boolean:
        """Returns whether block i is kept. owed: when the values of block i - 2 are released."""
        o = self.operands
        if cutlass.const_expr(not self.config.looks_ahead):
            self.keys.wait(i)
        self.trace.mark(Step.WAIT_KEYS, i)
        self.issue_qk(i)
        words = self.look_up(i)
        if owed == AT_ONCE:
            self.values.wait(i - 2)
            self.values.release(i - 2)
        self.trace.mark(Step.WAIT_VALUES, i)
        self.look_ahead(i + 1)
        warpgroup.wait_group(0)
        self.trace.mark(Step.WAIT_SCORES, i)
        self.hide(words)
        self.softmax.shift(o.scores)
        kept = Boolean(True)
        if cutlass.const_expr(self.seen is not None):
            kept = self.seen.visited()
        veto = kept
        if cutlass.const_expr(self.config.vote):
            veto = self.softmax.vote.vetoes(o.scores) & kept
        self.keys.release(i)
        if owed == AFTER_PRODUCT:
            self.values.release(i - 2)
        self.trace.mark(Step.MAX, i)
        if cutlass.const_expr(self.config.vote):
            kept = self.ballot.together(veto)
        self.trace.mark(Step.VOTE, i)
        if kept:
            self.values.wait(i - 1)
            self.values.release(i - 1)
            bits = self.softmax.greatest_bits(o.scores)
            outgrown = cute.arch.vote_any_sync(self.softmax.outgrown(bits))
            self.exponentiate(self.follow(bits, outgrown))
            self.convert()
            self.trace.mark(Step.STORE_P, i)
        return kept

    @cute.jit
    def needs(self, bits: cute.Tensor, own: Boolean) -> Boolean:
        """Whether a row of this warp needs the block. bits: the greatest; own: it is visited."""
        # Nothing above a base is ever skipped, and after a kept block that mostly settles it.
        needed = cute.arch.vote_any_sync(((bits[0] > 0) | (bits[1] > 0)) & own)
        if not needed:
            needed = cute.arch.vote_any_sync(self.softmax.vote.vetoes(self.operands.scores) & own)
        return needed

    @cute.jit
    def follow(self, bits: cute.Tensor, outgrown: Boolean) -> cute.Tensor:
        """Bases follow the block's scores if any of the warp has to. bits: the greatest; returns
        those of what the scores have become."""
        if outgrown:
            bits = self.rebase()
        return bits

    @cute.jit
    def rebase(self) -> cute.Tensor:
        """All rows of the warp, with no product in flight. Returns bits, none positive."""
        factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.softmax.rebase(self.operands.scores, factors)
        scale_rows(self.operands.acc, factors)
        bits = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
        bits.fill(LEAST)
        return bits

    @cute.jit
    def exponentiate(self, bits: cute.Tensor) -> None:
        """Scores become P. bits: their greatest."""
        if cutlass.const_expr(self.config.vote):
            self.softmax.vote.follow(bits, self.softmax.rebase_at)
        self.softmax.exponentiate(self.operands.scores, self.steps)

    @property
    def steps(self) -> int:
        """Of 16 keys in a block."""
        return self.config.tile_n // 16

    @cute.jit
    def look_ahead(self, i: Int32) -> None:
        if cutlass.const_expr(self.config.looks_ahead):
            self.await_keys(i)

    @cute.jit
    def await_keys(self, i: Int32) -> None:
        if i < self.visits:
            self.keys.wait(i)

    @cute.jit
    def convert(self) -> None:
        """P to the operand of P @ V."""
        o = self.operands
        for step in cutlass.range_constexpr(self.steps):
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
    def issue_qk(self, i: Int32) -> None:
        o = self.operands
        issue(o.mma_qk, o.scores, o.q, o.k[None, None, None, self.keys.stage(i)], False)

    @cute.jit
    def issue_pv(self, i: Int32) -> None:
        o = self.operands
        issue(o.mma_pv, o.acc, o.p, o.v[None, None, None, self.values.stage(i)], True)

    @cute.jit
    def look_up(self, i: Int32) -> Any:
        """What of `seen` hides scores of visit i, while the product that makes them runs."""
        words = None
        if cutlass.const_expr(self.seen is not None):
            self.seen.advance(i)
            words = self.seen.words()
        return words

    @cute.jit
    def hide(self, words: Any) -> None:
        """What the block mask hides becomes -inf."""
        if cutlass.const_expr(self.seen is not None):
            self.seen.hide(self.operands.scores, words)

    @cute.jit
    def mask(self, n: Int32, words: Any) -> None:
        """Scores of block n that a row does not see become -inf."""
        if cutlass.const_expr(self.seen is not None):
            self.hide(words)
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
