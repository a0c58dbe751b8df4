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
from blasst.kernels.hopper.config import WARP


@dataclass(frozen=True)
class Seen:
    """codes: [visits], of the warpgroup, and bits: [some blocks, rows, words], in global memory, as
    in block_lists.GroupLists. held: registers [2], a lane's codes of the present WARP visits and of
    the next; code: [1], of the present visit. lead, last: the warpgroup's first visit, and the
    thread block's last.
    """

    codes: cute.Tensor
    bits: cute.Tensor
    held: cute.Tensor
    code: cute.Tensor
    lead: Int32
    last: Int32
    thread: Int32

    @staticmethod
    @cute.jit
    def create(visits: Visits, group: Int32, thread: Int32) -> "Seen":
        held, code = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(1, Int32)
        count = visits.count()
        lead = visits.first(group) if visits.own(group) > 0 else count
        codes = visits.codes[None, group]
        seen = Seen(codes, visits.bits, held, code, lead, count - 1, thread)
        held[1] = seen.lane_code(lead)
        code[0] = Int32(NONE)
        return seen

    @cute.jit
    def lane_code(self, i: Int32) -> Int32:
        """Of the visit that is the lane's among those from i on."""
        return self.codes[cutlass.max(0, cutlass.min(i + self.thread % WARP, self.last))]

    @cute.jit
    def advance(self, i: Int32) -> None:
        """To visit i: the warpgroup's first, or the one after the present."""
        place = (i - self.lead) % WARP
        if place == 0:
            # Nobody waits: these are needed in WARP visits.
            self.held[0] = self.held[1]
            self.held[1] = self.lane_code(i + WARP)
        code = cute.arch.shuffle_sync(self.held[0], place)
        self.code[0] = cute.arch.make_warp_uniform(code)

    def visited(self) -> Boolean:
        """Whether the block is the warpgroup's, and not only its neighbour's."""
        return self.code[0] != NONE

    @cute.jit
    def words(self) -> cute.Tensor:
        """[2, words]: bits of the thread's rows, when the block has any. Nothing is done with them
        here: that would wait for them."""
        words = cute.make_rmem_tensor((ROWS_PER_THREAD, self.bits.shape[2]), Int32)
        if self.code[0] >= 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                row = self.bits[self.code[0], first_row(self.thread) + 8 * r, None]
                for w in cutlass.range_constexpr(self.bits.shape[2]):
                    words[r, w] = row[w]
        return words

    @cute.jit
    def hide(self, scores: cute.Tensor, words: cute.Tensor) -> None:
        """Scores that a row does not see become -inf."""
        if self.code[0] >= 0:
            rows = rows_view(scores)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                own = [words[r, w] >> first_column(self.thread) for w in range(self.bits.shape[2])]
                for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                    seen = (own[column(c) // WORD] & (1 << column(c) % WORD)) != 0
                    rows[r, c] = rows[r, c] if seen else -Float32.inf
