"""Online softmax on scores relative to a base of their row, in log2 units, which seldom changes.

The four threads of a quad share a row. What a block does to its rows is decided on the bits of
floats: an integer maximum takes three operands, a float maximum two. The least unsigned bits are
those of the largest float when none is positive, and of a positive float otherwise.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from blasst.kernels.cute.fragment import ROWS_PER_THREAD, rows_view, step_of

QUAD = 4
LN_2 = math.log(2.0)
BELOW_FINITE = 0xFF800000  # of -inf: those of all other numbers are less
SLACK, SLACK_BITS = 8.0, 0x41000000
SMALLEST = 2.0**-126
LEAST, GREATEST = -0x80000000, 0x7FFFFFFF  # signed bits: any number is above, none is


@dataclass(frozen=True)
class Threshold:
    """Which blocks the rows of a thread need: a score no more than -floor below the maximum.

    lead: registers [2], how far the true maximum of a row is above its base. keep_at: registers
    [2], the row needs the block when its least unsigned bits are below. floor: log2(lambda), < 0;
    exists: [2], whether there is such a row. slack_bits: of what a maximum may lead by.
    """

    lead: cute.Tensor
    keep_at: cute.Tensor
    floor: Float32
    exists: cute.Tensor
    slack_bits: Int32

    @cute.jit
    def least_bits(self, scores: cute.Tensor) -> cute.Tensor:
        """[2], unsigned: of the thread's columns of each row."""
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
    def vetoes(self, scores: cute.Tensor) -> Boolean:
        """Whether a row of this thread needs the block; one that has seen nothing needs a key."""
        bits = self.least_bits(scores)
        return (bits[0] < self.keep_at[0]) | (bits[1] < self.keep_at[1])

    @cute.jit
    def follow(self, bits: cute.Tensor, seen: cute.Tensor) -> None:
        """The block was kept. bits: its greatest, signed; seen: Softmax.rebase_at."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top = Int32(bits[r])
            top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 2))
            top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 1))
            # Signed bits of floats are in order when one of them is not negative.
            lead = cute.recast_tensor(self.lead, Int32)
            lead[r] = cutlass.max(Int32(lead[r]), top)
            keep_at = next_bits(self.floor + self.lead[r])
            keep_at = keep_at if seen[r] != Int32(LEAST) else self.keep_at[r]
            self.keep_at[r] = keep_at if self.exists[r] != 0 else Uint32(0)


@cute.jit
def next_bits(x: Float32) -> Uint32:
    """Of negative numbers: "at least x" is "bits below these"."""
    word = cute.make_rmem_tensor(1, Float32)
    word[0] = x
    return Uint32(cute.recast_tensor(word, Uint32)[0]) + Uint32(1)


@cute.jit
def make_threshold(first_row: Int32, rows: Int32, log2_lambda: Float32) -> Threshold:
    lead = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    keep_at = cute.make_rmem_tensor(ROWS_PER_THREAD, Uint32)
    exists = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
    slack = cute.make_rmem_tensor(1, Float32)
    lead.fill(0.0)
    # Negative, also where log2 is not exact: its bits are in order only then.
    floor = -cute.arch.fmax(-log2_lambda, Float32(SMALLEST))
    # Half of it, so that the maximum stays above what a block is compared with.
    slack[0] = -cute.arch.fmax(floor * 0.5, Float32(-SLACK))
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        exists[r] = Int32(1) if first_row + 8 * r < rows else Int32(0)
        # A row that has seen nothing needs a key; lambda 0 keeps what is all -inf too.
        unseen = cutlass.max(next_bits(floor), Uint32(BELOW_FINITE))
        keep_at[r] = unseen if exists[r] != 0 else Uint32(0)
    bits = Int32(cute.recast_tensor(slack, Int32)[0])
    return Threshold(lead, keep_at, floor, exists, bits)


@dataclass(frozen=True)
class Softmax:
    """base, row_sum: registers [2]; the sum covers the thread's own columns only.

    The base of a row follows its maximum when a score is more than a slack above it: when the
    greatest signed bits of its scores are above `rebase_at`, registers [2] (`LEAST` until the row
    has seen a key, `GREATEST` for rows that do not exist).
    """

    base: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    rebase_at: cute.Tensor
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
    def outgrown(self, bits: cute.Tensor) -> Boolean:
        """Whether the base of a row of this thread must follow. bits: the greatest."""
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
    def rebase(self, scores: cute.Tensor, factors: cute.Tensor) -> None:
        """The bases become the true maxima, shifted scores follow. factors: [2], of the output."""
        largest = self.thread_max(scores)
        rows = rows_view(scores)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            top = cute.arch.warp_reduction_max(largest[r], threads_in_group=QUAD)
            step = cute.arch.fmax(top, Float32(0.0))
            if cutlass.const_expr(self.vote is not None):
                step = cute.arch.fmax(step, self.vote.lead[r])
            factor = cute.math.exp2(-step, fastmath=True)
            if self.rebase_at[r] == Int32(LEAST):
                step = Float32(0.0) if top == -Float32.inf else top
                factor = Float32(1.0)
            factors[r] = factor
            self.row_sum[r] = self.row_sum[r] * factor
            self.base[r] = self.base[r] + step
            if cutlass.const_expr(self.vote is not None):
                self.vote.lead[r] = 0.0
            if top > -Float32.inf:
                self.rebase_at[r] = cutlass.max(self.rebase_at[r], self.slack_bits())
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, c] = rows[r, c] - step

    def slack_bits(self) -> Int32:
        return Int32(SLACK_BITS) if self.vote is None else self.vote.slack_bits

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, steps: cutlass.Constexpr[int]) -> None:
        """Shifted scores become P in place; steps: of 16 keys."""
        for step in cutlass.range_constexpr(steps):
            rows = rows_view(step_of(scores, step))
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
    scale_log2: Float32, first_row: Int32, rows: Int32, log2_lambda: Float32 | None
) -> Softmax:
    """first_row: of the thread; of its two rows, 8 apart, those below `rows` exist. log2_lambda:
    None without a vote."""
    base = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
    rebase_at = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
    base.fill(0.0)
    row_sum.fill(0.0)
    vote = None
    if cutlass.const_expr(log2_lambda is not None):
        vote = make_threshold(first_row, rows, log2_lambda)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        rebase_at[r] = Int32(LEAST) if first_row + 8 * r < rows else Int32(GREATEST)
    return Softmax(base, row_sum, scale_log2, rebase_at, vote)


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    rows = rows_view(acc)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        rows[r, None].store(rows[r, None].load() * factors[r])
