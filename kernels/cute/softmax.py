"""Online softmax on scores relative to a base of their row, in log2 units, which seldom changes.

The four threads of a quad share a row. Blocks are judged by the bits of floats: an integer maximum
takes three operands. Their order is right if the largest number is not negative. With a vote, the
base is so far below a row's maximum that it needs no block of negative scores."""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from blasst.kernels.cute.fragment import ROWS_PER_THREAD, rows_view

QUAD = 4
LN_2 = math.log(2.0)
SLACK = 8.0
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LEAST, GREATEST = -0x80000000, 0x7FFFFFFF  # signed bits: any number is above, none is
NOTHING = -0x800000  # signed bits of -inf


@dataclass(frozen=True)
class Threshold:
    """Which blocks the rows of a thread need: one with a score of at least `level`.

    level: registers [2], relative to the base. It is `margin + floor` at a base that is `margin`
    below the maximum, and rises with the maximum; -inf or the least number while the row has seen
    nothing, inf where there is no such row. floor: log2(lambda), < 0. deep: it is below -margin.
    """

    level: cute.Tensor
    floor: Float32
    deep: Boolean

    @cute.jit
    def passes(self, bits: cute.Tensor) -> Boolean:
        """Whether a row of this thread needs the block, all levels being >= 0. bits: greatest."""
        level = cute.recast_tensor(self.level, Int32)
        return (bits[0] >= level[0]) | (bits[1] >= level[1])

    @cute.jit
    def passes_any(self, bits: cute.Tensor, scores: cute.Tensor) -> Boolean:
        """The same for any levels."""
        least = least_bits(scores)
        level = cute.recast_tensor(self.level, Uint32)
        needed = Boolean(False)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            signed = as_bits(self.level[r])
            needed = needed | (bits[r] >= cutlass.max(signed, 0))
            needed = needed | ((signed < 0) & (least[r] <= Uint32(level[r])))
        return needed

    @cute.jit
    def follow(self, bits: cute.Tensor) -> None:
        """The block was kept. bits: its greatest."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top = Int32(bits[r])
            top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 2))
            top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 1))
            self.level[r] = cute.arch.fmax(self.level[r], as_float(top) + self.floor)


@cute.jit
def least_bits(scores: cute.Tensor) -> cute.Tensor:
    """[2], unsigned, of the thread's columns of each row: of the largest if none is positive."""
    rows = rows_view(cute.recast_tensor(scores, Uint32))
    bits = cute.make_rmem_tensor(ROWS_PER_THREAD, Uint32)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        chains = [Uint32(rows[r, c]) for c in range(3)]
        for c in cutlass.range_constexpr(3, cute.size(rows, mode=[1])):
            at = (c - 3) // 2 % 3
            chains[at] = cutlass.min(chains[at], Uint32(rows[r, c]))
        bits[r] = cutlass.min(cutlass.min(chains[0], chains[1]), chains[2])
    return bits


@cute.jit
def as_float(bits: Int32) -> Float32:
    word = cute.make_rmem_tensor(1, Int32)
    word[0] = bits
    return Float32(cute.recast_tensor(word, Float32)[0])


@cute.jit
def as_bits(x: Float32) -> Int32:
    word = cute.make_rmem_tensor(1, Float32)
    word[0] = x
    return Int32(cute.recast_tensor(word, Int32)[0])


@dataclass(frozen=True)
class Softmax:
    """base, row_sum: registers [2]; the sum covers the thread's own columns only.

    The base of a row is `margin` below its maximum, and follows when a score is more than a slack
    above that: when the greatest bits of its scores are above `rebase_at`, registers [2] (`LEAST`
    until the row has seen a key, `GREATEST` for rows that do not exist), `ceiling` of others.
    """

    base: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    rebase_at: cute.Tensor
    ceiling: Int32
    margin: Float32
    vote: Any = None

    @cute.jit
    def shift(self, scores: cute.Tensor) -> None:
        """Scores become relative to the base, in log2 units, in place."""
        rows = rows_view(scores)
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                rows[r, c] = rows[r, c] * self.scale_log2 - self.base[r]

    @cute.jit
    def greatest_bits(self, scores: cute.Tensor) -> cute.Tensor:
        """[2], signed: of the thread's columns of each row; of any one when none is positive."""
        rows = rows_view(cute.recast_tensor(scores, Int32))
        bits = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            # Three chains hide the latency; two steps of one are one instruction.
            chains = [Int32(rows[r, c]) for c in range(3)]
            for c in cutlass.range_constexpr(3, cute.size(rows, mode=[1])):
                at = (c - 3) // 2 % 3
                chains[at] = cutlass.max(chains[at], Int32(rows[r, c]))
            bits[r] = cutlass.max(cutlass.max(chains[0], chains[1]), chains[2])
        return bits

    @cute.jit
    def outgrown(self, bits: cute.Tensor, seen: cutlass.Constexpr[bool]) -> Boolean:
        """Whether the base of a row of this thread must follow. bits: the greatest; seen: all rows
        have seen a key."""
        if cutlass.const_expr(seen):
            return (bits[0] > self.ceiling) | (bits[1] > self.ceiling)
        return (bits[0] > self.rebase_at[0]) | (bits[1] > self.rebase_at[1])

    @cute.jit
    def thread_max(self, scores: cute.Tensor) -> cute.Tensor:
        """[2]: the largest score of each row among the thread's own columns."""
        rows = rows_view(scores)
        largest = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            # Four chains hide the latency of the maximum.
            chains = [rows[r, c] for c in range(4)]
            for c in cutlass.range_constexpr(4, cute.size(rows, mode=[1])):
                chains[c % 4] = cute.arch.fmax(chains[c % 4], rows[r, c])
            largest[r] = cute.arch.fmax(
                cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
            )
        return largest

    @cute.jit
    def rebase(
        self, scores: cute.Tensor, factors: cute.Tensor, seen: cutlass.Constexpr[bool]
    ) -> None:
        """The bases follow the true maxima, shifted scores follow. factors: [2], of the output."""
        largest = self.thread_max(scores)
        rows = rows_view(scores)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top = cute.arch.warp_reduction_max(largest[r], threads_in_group=QUAD)
            step = cute.arch.fmax(top - self.margin, Float32(0.0))
            if cutlass.const_expr(self.vote is not None):
                lead = self.vote.level[r] - self.vote.floor - self.margin
                # Not of a row that does not exist.
                step = cute.arch.fmax(step, lead if lead < LARGEST else Float32(0.0))
            factor = cute.math.exp2(-step, fastmath=True)
            if cutlass.const_expr(not seen):
                if self.rebase_at[r] == Int32(LEAST):
                    step = Float32(0.0) if top == -Float32.inf else top - self.margin
                    factor = Float32(1.0)
                if top > -Float32.inf:
                    self.rebase_at[r] = cutlass.max(self.rebase_at[r], self.ceiling)
            factors[r] = factor
            self.row_sum[r] = self.row_sum[r] * factor
            self.base[r] = self.base[r] + step
            if cutlass.const_expr(self.vote is not None):
                level = self.margin + self.vote.floor
                if cutlass.const_expr(not seen):
                    level = level if top > -Float32.inf else self.vote.level[r]
                self.vote.level[r] = level if self.vote.level[r] < Float32.inf else Float32.inf
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] - step

    @cute.jit
    def exponentiate(self, scores: cute.Tensor) -> None:
        """Shifted scores, any of the thread's, become P in place."""
        rows = rows_view(scores)
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                p = cute.math.exp2(rows[r, c], fastmath=True)
                self.row_sum[r] = self.row_sum[r] + p
                rows[r, c] = p

    @cute.jit
    def finish(self) -> tuple[cute.Tensor, cute.Tensor]:
        """([2] factors that normalise the output, [2] natural log-sum-exp)."""
        scale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        lse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=QUAD)
            scale[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
            lse[r] = (self.base[r] + cute.math.log2(total, fastmath=True)) * LN_2
        return scale, lse


@cute.jit
def make_softmax(
    scale_log2: Float32,
    first_row: Int32,
    rows: Int32,
    log2_lambda: Float32 | None,
    highest: cutlass.Constexpr[float],
) -> Softmax:
    """first_row: of the thread; of its two rows, 8 apart, those below `rows` exist. log2_lambda:
    None without a vote. highest: of P, in log2 units."""
    base = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    rebase_at = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
    base.fill(0.0)
    row_sum.fill(0.0)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        rebase_at[r] = Int32(LEAST) if first_row + 8 * r < rows else Int32(GREATEST)
    vote, margin, slack = None, Float32(0.0), Float32(SLACK)
    if cutlass.const_expr(log2_lambda is not None):
        # Negative, also where log2 is not exact.
        floor = cute.arch.fmin(log2_lambda, Float32(-SMALLEST))
        margin = cute.arch.fmin(-floor, Float32(0.75 * highest))
        # Half of it, so that the maximum stays above what a block is compared with.
        slack = cute.arch.fmin(-0.5 * floor, Float32(min(SLACK, 0.25 * highest)))
        vote = make_threshold(first_row, rows, floor, margin)
    return Softmax(base, row_sum, scale_log2, rebase_at, as_bits(margin + slack), margin, vote)


@cute.jit
def make_threshold(first_row: Int32, rows: Int32, floor: Float32, margin: Float32) -> Threshold:
    """Of rows that have seen nothing: they need a key; lambda 0 keeps what is all -inf too."""
    level = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        unseen = -Float32.inf if floor < -LARGEST else Float32(-LARGEST)
        level[r] = unseen if first_row + 8 * r < rows else Float32.inf
    return Threshold(level, floor, margin + floor < 0.0)


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    rows = rows_view(acc)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        rows[r, None].store(rows[r, None].load() * factors[r])
