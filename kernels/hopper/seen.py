"""What the rows of one warpgroup see of their thread block's visits under a block mask."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from blasst.kernels.block_lists import NONE, WORD
from blasst.kernels.cute.fragment import (
    ROWS_PER_THREAD,
    column,
    first_column,
    first_row,
    rows_view,
)
from blasst.kernels.cute.visits import Visits


@dataclass(frozen=True)
class Seen:
    """codes: [visits], of the warpgroup, and bits: [some blocks, rows, words], in global memory, as
    in block_lists.GroupLists. held: registers [2], the codes of the present visit and of the next,
    so that nobody waits for one. lead, last: the warpgroup's first visit, and the thread block's
    last.
    """

    codes: cute.Tensor
    bits: cute.Tensor
    held: cute.Tensor
    lead: Int32
    last: Int32
    thread: Int32

    @staticmethod
    @cute.jit
    def create(visits: Visits, group: Int32, thread: Int32) -> "Seen":
        held = cute.make_rmem_tensor(2, Int32)
        held.fill(NONE)
        count = visits.count()
        lead = visits.first(group) if visits.own(group) > 0 else count
        return Seen(visits.codes[None, group], visits.bits, held, lead, count - 1, thread)

    @cute.jit
    def start(self, i: Int32) -> None:
        """Before the first visit, i."""
        self.held[1] = self.codes[i]
        self.advance(i)

    @cute.jit
    def advance(self, i: Int32) -> None:
        """To visit i, the one after the present."""
        self.held[0] = cute.arch.make_warp_uniform(self.held[1])
        self.held[1] = self.codes[cutlass.min(i + 1, self.last)]

    def visited(self) -> Boolean:
        """Whether the block is the warpgroup's, and not only its neighbour's."""
        return self.held[0] != NONE

    @cute.jit
    def words(self) -> cute.Tensor:
        """[2, words]: bits of the thread's rows, its first column at bit 0. Of any block when the
        present one has none, so that the load needs no branch."""
        words = cute.make_rmem_tensor((ROWS_PER_THREAD, self.bits.shape[2]), Int32)
        block = cutlass.max(self.held[0], 0)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = self.bits[block, first_row(self.thread) + 8 * r, None]
            for w in cutlass.range_constexpr(self.bits.shape[2]):
                words[r, w] = row[w] >> first_column(self.thread)
        return words

    @cute.jit
    def hide(self, scores: cute.Tensor, words: cute.Tensor) -> None:
        """Scores that a row does not see become -inf."""
        if self.held[0] >= 0:
            rows = rows_view(scores)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                    bit = 1 << column(c) % WORD
                    seen = (words[r, column(c) // WORD] & bit) != 0
                    rows[r, c] = rows[r, c] if seen else -Float32.inf
