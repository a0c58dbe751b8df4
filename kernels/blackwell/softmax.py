"""Softmax warpgroup: one tile, one row a thread. Scores to registers, vote, exp2, P to its window.

The scores' columns are released as soon as they are read: before the vote and before exp2.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from blasst.kernels.blackwell.config import WARPGROUP, Config
from blasst.kernels.blackwell.edges import Edges
from blasst.kernels.block_lists import ALL, NONE
from blasst.kernels.cute import tmem
from blasst.kernels.cute.exponential import exp2_pair
from blasst.kernels.cute.tile import Tile
from blasst.kernels.cute.trace import NO_TRACE, Trace
from blasst.kernels.cute.visits import hide
from blasst.kernels.cute.vote import any_thread
from blasst.kernels.instruments.steps import Step

LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Softmax:
    """index, tile: of this warpgroup; visits and lead as in Multiplier; row: of this thread.

    scores, p: this warp's lanes. scale: [2 slots, rows] in shared memory: factors of the old
    output, and after the last visit the normaliser. kept: [tiles]. floor: log2(lambda), +inf for a
    row that does not exist. listed: with a block mask, `visits.Visits`. state: registers [3], the
    row's true running maximum, the maximum that its exponentials refer to, and their sum.
    """

    config: Config
    index: int
    tile: Tile
    visits: Int32
    lead: Int32
    row: Int32
    edges: Edges
    scores: Int32
    p: Int32
    scale: cute.Tensor
    kept: cute.Tensor
    scale_log2: Float32
    floor: Float32
    state: cute.Tensor
    element_type: Any
    listed: Any = None
    trace: Trace = NO_TRACE

    @cute.jit
    def attend(self) -> Int32:
        """All visits of the tile; returns the number of skipped blocks."""
        self.state[0], self.state[1], self.state[2] = -Float32.inf, -Float32.inf, Float32(0.0)
        if cutlass.const_expr(self.config.cross_p and self.index == 1):
            self.fall_behind()
        skipped = Int32(0)
        if cutlass.const_expr(self.config.block_mask):
            skipped = self.visit_listed()
        else:
            skipped = self.visit_all()
        if self.visits > 1:
            # The slot was read: nothing else says so after the last scores.
            self.edges.edge("o_ready", self.index).wait(self.visits - 2)
        if cutlass.const_expr(self.config.grid > 0):
            self.await_epilogue()
        self.send_scale(self.normaliser(), self.visits)
        return skipped

    @cute.jit
    def visit_all(self) -> Int32:
        """Every block up to the last one that a row sees; returns the number of skipped ones."""
        for i in cutlass.range(self.lead, unroll=1):
            self.pass_by(i)
        skipped = Int32(0)
        first_full = cutlass.max(self.lead, self.visits - self.tile.n_full)
        for i in cutlass.range(self.lead, first_full, unroll=1):
            skipped += 1 - Int32(self.visit(i, True))
        for i in cutlass.range(first_full, self.visits, unroll=1):
            skipped += 1 - Int32(self.visit(i, False))
        return skipped

    @cute.jit
    def visit_listed(self) -> Int32:
        """The blocks of the list, those of the other tile included; as visit_all."""
        skipped = Int32(0)
        codes = self.listed.codes_ahead(0, 1)
        codes.start()
        for i in cutlass.range(self.visits, unroll=1):
            code = codes.entry(0, self.index)
            if code == NONE:
                self.pass_by(i)
            elif code == ALL:
                skipped += 1 - Int32(self.visit(i, False))
            else:
                words = self.listed.words(code, self.row)
                skipped += 1 - Int32(self.visit(i, True, words))
            codes.advance(i)
        return skipped

    @cute.jit
    def fall_behind(self) -> None:
        """P of tile 1 stays one visit behind: its window follows the next scores of tile 0."""
        if self.visits > 0:
            self.edges.edge("s_free", 0).wait(0)

    @cute.jit
    def pass_by(self, i: Int32) -> None:
        """A block that no row of this tile sees: every arrival, nothing else."""
        self.edges.edge("s_full", self.index).wait(i)
        self.release_scores(i)
        self.send_scale(Float32(1.0), i)
        self.wait_window(i, Float32(0.0))
        self.edges.edge("p_full", self.index).arrive(i)

    @cute.jit
    def visit(self, i: Int32, masked: cutlass.Constexpr[bool], words: Any = None) -> Boolean:
        """Returns whether the block was kept. words: with a block mask, what the row sees."""
        self.edges.edge("s_full", self.index).wait(i)
        self.trace.mark(Step.WAIT_SCORES, i)
        scores, largest = self.read_scores(i, masked, words)
        self.trace.mark(Step.MAX, i)
        kept = self.vote(largest, i)
        self.trace.mark(Step.VOTE, i)
        if kept:
            self.send_scale(self.raise_maximum(largest), i)
            self.exponentiate(scores, i, masked)
            self.trace.mark(Step.EXP2, i)
        else:
            self.send_scale(Float32(1.0), i)
            self.wait_window(i, Float32(0.0))
        if cutlass.const_expr(self.config.vote):
            self.send_vote(kept)
        self.edges.edge("p_full", self.index).arrive(i)
        return kept

    @cute.jit
    def read_scores(
        self, i: Int32, masked: cutlass.Constexpr[bool], words: Any
    ) -> tuple[cute.Tensor, Float32]:
        """Masked scores and the largest of them; their columns are free at once."""
        width, tile_n = self.config.plan.read_columns, self.config.tile_n
        scores = cute.make_rmem_tensor(tile_n, Float32)
        parts = cute.flat_divide(scores, (width,))
        for part in cutlass.range_constexpr(tile_n // width):
            tmem.load(parts[None, part], self.scores + part * width)
        tmem.wait_loads()
        self.release_scores(i)
        if cutlass.const_expr(masked and self.config.block_mask):
            hide(scores, words)
        elif cutlass.const_expr(masked):
            self.mask(scores, (self.visits - 1 - i) * tile_n)
        return scores, row_max(scores)

    @cute.jit
    def mask(self, scores: cute.Tensor, first_key: Int32) -> None:
        """Scores that the row does not see become -inf."""
        reach = self.tile.seqlen_k - first_key
        if cutlass.const_expr(self.config.causal):
            row = self.tile.context + self.tile.row + self.row
            reach = cutlass.min(reach, row + 1 - first_key)
        for c in cutlass.range_constexpr(cute.size(scores)):
            scores[c] = scores[c] if c < reach else -Float32.inf

    @cute.jit
    def release_scores(self, i: Int32) -> None:
        """Frees the columns for the next scores, and for the other tile's P."""
        if cutlass.const_expr(self.config.cross_p):
            self.edges.edge("s_free", self.index).arrive(i)

    @cute.jit
    def wait_window(self, i: Int32, base: Float32) -> Float32:
        """Until the columns that take this visit's P hold nothing that is still to be read.

        Returns `base`: what needs it is not computed earlier, whatever the compiler prefers.
        """
        if cutlass.const_expr(self.config.cross_p and self.index == 0):
            base = self.edges.edge("s_free", 1).wait_with(i, base)
        if cutlass.const_expr(self.config.cross_p and self.index == 1):
            # No later scores of tile 0 say that the P of the visit before was read.
            if i + 1 < self.visits:
                base = self.edges.edge("s_free", 0).wait_with(i + 1, base)
            elif i > 0:
                base = self.edges.edge("o_full", 1).wait_with(i - 1, base)
        return base

    @cute.jit
    def send_scale(self, scale: Float32, i: Int32) -> None:
        """To the correction warpgroup."""
        edge = self.edges.edge("scale", self.index)
        self.scale[edge.slot(i), self.row] = scale
        edge.arrive(i)

    @cute.jit
    def await_epilogue(self) -> None:
        """Of the last item: the slot of a normaliser is free. Scores say so, but here are none."""
        if self.visits == 0:
            self.edges.edge("q_free", self.index).wait(-1)

    @cute.jit
    def send_vote(self, kept: Boolean) -> None:
        """To the MMA warp, before p_full."""
        flags = self.kept
        if self.row == 0:
            flags[self.index] = Int32(kept)

    @cute.jit
    def vote(self, largest: Float32, i: Int32) -> Boolean:
        """Whether a row of the warpgroup needs the block; NaN (it has seen nothing) does not."""
        kept = Boolean(True)
        if cutlass.const_expr(self.config.vote):
            veto = (largest - self.state[0]) * self.scale_log2 >= self.floor
            if cutlass.const_expr(self.config.block_mask):
                # Lambda 0 keeps even what nobody sees, where a row that has seen nothing has NaN.
                veto = veto | (self.floor == -Float32.inf)
            barrier = self.config.vote_barriers[self.index]
            kept = any_thread(veto | (i == self.lead), barrier, WARPGROUP)
            # The vote of the warp tells the compiler that the branches on it are uniform.
            kept = cute.arch.vote_any_sync(kept)
        return kept

    @cute.jit
    def raise_maximum(self, largest: Float32) -> Float32:
        """The factor that the old output is scaled by; 1 while the maximum rises little."""
        state = self.state
        state[0] = cute.arch.fmax(state[0], largest)
        scale = Float32(1.0)
        rise = (state[0] - state[1]) * self.scale_log2
        if rise > self.config.lazy_log2:
            # A row that had seen nothing has nothing to scale: 1, not exp2(-inf).
            scale = cute.math.exp2(-rise, fastmath=True) if rise < Float32.inf else Float32(1.0)
            state[1] = state[0]
        state[2] *= scale
        return scale

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, i: Int32, masked: cutlass.Constexpr[bool]) -> None:
        """P to its window, a quarter at a time; the row's sum."""
        plan = self.config.plan
        reference = self.state[1]
        # A row that has seen nothing: exp2(-inf - 0) = 0, not NaN.
        base = 0.0 if reference == -Float32.inf else -reference * self.scale_log2
        quarter = self.config.tile_n // plan.quarters
        rows = cute.flat_divide(scores, (quarter,))
        p = cute.make_rmem_tensor((quarter, plan.quarters), self.element_type)
        sums = (self.state[2], Float32(0.0))
        waiting = plan.buffered[self.index]
        for q in cutlass.range_constexpr(plan.quarters + 1):
            if cutlass.const_expr(q == waiting):
                base = self.wait_window(i, base)
                for early in cutlass.range_constexpr(waiting):
                    tmem.store(self.p + early * quarter // 2, p[None, early])
            if cutlass.const_expr(q < plan.quarters):
                emulated = 0 if masked else plan.emulates(self.index, q)
                sums = exp2_row(rows[None, q], (self.scale_log2, base), sums, emulated)
                p[None, q].store(rows[None, q].load().to(self.element_type))
                if cutlass.const_expr(q >= waiting):
                    tmem.store(self.p + q * quarter // 2, p[None, q])
        self.state[2] = sums[0] + sums[1]
        tmem.wait_stores()

    @cute.jit
    def normaliser(self) -> Float32:
        """1 / sum; 0 for a row that has seen nothing."""
        total = self.state[2]
        return 0.0 if total == 0.0 else cute.arch.rcp_approx(total)

    @cute.jit
    def lse(self) -> Float32:
        """Natural log of the sum of all exponentials; -inf for a row that has seen nothing."""
        log2_sum = cute.math.log2(self.state[2], fastmath=True)
        return (self.state[1] * self.scale_log2 + log2_sum) * LN_2


@cute.jit
def row_max(values: cute.Tensor) -> Float32:
    """The largest, in two chains of three-input maxima."""
    first, second = -Float32.inf, -Float32.inf
    for c in cutlass.range_constexpr(0, cute.size(values), 4):
        first = tmem.max3(first, values[c], values[c + 1])
        second = tmem.max3(second, values[c + 2], values[c + 3])
    return cute.arch.fmax(first, second)


@cute.jit
def exp2_row(
    row: cute.Tensor,
    affine: tuple[Float32, Float32],
    sums: tuple[Float32, Float32],
    emulated: cutlass.Constexpr[int],
) -> tuple[Float32, Float32]:
    """row = exp2(row * scale + base) in place, `affine` being both; sums: two, both grow.

    emulated: pairs, evenly spread, that the multiply-add units compute.
    """
    scale, base = affine
    pairs = cute.size(row) // 2
    for c in cutlass.range_constexpr(pairs):
        pair = cute.arch.fma_packed_f32x2(
            (row[2 * c], row[2 * c + 1]), (scale, scale), (base, base)
        )
        if cutlass.const_expr((c + 1) * emulated // pairs > c * emulated // pairs):
            pair = exp2_pair(pair)
        else:
            pair = tuple(cute.math.exp2(x, fastmath=True) for x in pair)
        row[2 * c], row[2 * c + 1] = pair
        sums = cute.arch.add_packed_f32x2(sums, pair)
    return sums
