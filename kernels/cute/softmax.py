"""Online softmax over the rows that a thread shares with the other three of its quad.

The maximum is the true running maximum, of unscaled scores; scale_log2 = softmax_scale * log2(e).
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from blasst.kernels.cute.fragment import ROWS_PER_THREAD, rows_view, step_of

QUAD = 4
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Softmax:
    """row_max, row_sum: registers [2]; the sum covers the thread's own columns only."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32

    @staticmethod
    def create(scale_log2: Float32) -> "Softmax":
        row_max = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        return Softmax(row_max, row_sum, scale_log2)

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
    def vetoes(self, largest: cute.Tensor, floor: cute.Tensor) -> Boolean:
        """Whether a row of this thread needs the block; NaN (it has seen nothing) does not.

        floor: [2], log2(lambda); +inf for rows that do not exist.
        """
        veto = Boolean(False)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            veto = veto | ((largest[r] - self.row_max[r]) * self.scale_log2 >= floor[r])
        return veto

    @cute.jit
    def rebase(self, largest: cute.Tensor, rescale: cute.Tensor, base: cute.Tensor) -> None:
        """Takes a block's maxima up. rescale: [2] factors of the old output; base: [2], of exp2."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            new_max = cute.arch.fmax(
                self.row_max[r],
                cute.arch.warp_reduction_max(largest[r], threads_in_group=QUAD),
            )
            # A row that has seen nothing: exp2(-inf - 0) = 0, not NaN.
            base[r] = 0.0 if new_max == -Float32.inf else new_max * self.scale_log2
            old = self.row_max[r] * self.scale_log2
            rescale[r] = cute.math.exp2(old - base[r], fastmath=True)
            self.row_sum[r] = self.row_sum[r] * rescale[r]
            self.row_max[r] = new_max

    @cute.jit
    def exponentiate(
        self,
        scores: cute.Tensor,
        base: cute.Tensor,
        first: cutlass.Constexpr[int],
        last: cutlass.Constexpr[int],
    ) -> None:
        """Steps [first, last) of 16 keys of the scores become P in place."""
        for step in cutlass.range_constexpr(first, last):
            rows = rows_view(step_of(scores, step))
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    p = cute.math.exp2(rows[r, c] * self.scale_log2 - base[r], fastmath=True)
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
            lse[r] = (
                self.row_max[r] * self.scale_log2 + cute.math.log2(total, fastmath=True)
            ) * LN_2
        return scale, lse


@cute.jit
def rescale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    """scale_rows unless every factor in the warp is 1: most blocks do not raise the maximum."""
    if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
        scale_rows(acc, factors)


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    rows = rows_view(acc)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        rows[r, None].store(rows[r, None].load() * factors[r])
