"""The visits of a thread block under a block mask, from `block_lists.GroupLists`."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from blasst.kernels.block_lists import NONE, WORD


class Lists(NamedTuple):
    """GroupLists in global memory, with a row for each q head."""

    spans: cute.Tensor
    blocks: cute.Tensor
    codes: cute.Tensor
    bits: cute.Tensor


@dataclass(frozen=True)
class Ahead:
    """A list in registers around the present visit: nobody waits for its entries.

    entries: [visits, width] in global memory; held: [before + 1 + after, width]. Entries behind
    the last one repeat it. Call start(), and advance() after each visit but the last.
    """

    entries: cute.Tensor
    held: cute.Tensor
    before: int

    @cute.jit
    def start(self) -> None:
        slots, width = self.held.shape
        for slot in cutlass.range_constexpr(self.before, slots):
            self.read(slot, Int32(slot - self.before))
        for slot in cutlass.range_constexpr(self.before):
            for w in cutlass.range_constexpr(width):
                self.held[slot, w] = Int32(NONE)

    @cute.jit
    def advance(self, visit: Int32) -> None:
        """From `visit` to the next one."""
        slots, width = self.held.shape
        for slot in cutlass.range_constexpr(slots - 1):
            for w in cutlass.range_constexpr(width):
                self.held[slot, w] = self.held[slot + 1, w]
        self.read(slots - 1, visit + slots - self.before)

    @cute.jit
    def read(self, slot: cutlass.Constexpr[int], visit: Int32) -> None:
        for w in cutlass.range_constexpr(self.held.shape[1]):
            last = self.entries.shape[0] - 1
            self.held[slot, w] = self.entries[cutlass.min(visit, last), w]

    def entry(self, offset: int, column: int = 0) -> Int32:
        """Of the visit `offset` after (or before, if negative) the present one."""
        return self.held[self.before + offset, column]


@dataclass(frozen=True)
class Visits:
    """Of one thread block of several tiles. spans: [1 + 2 tiles]; blocks: [visits]; codes:
    [visits, tiles]; bits: [some blocks, rows of a tile, words]."""

    spans: cute.Tensor
    blocks: cute.Tensor
    codes: cute.Tensor
    bits: cute.Tensor

    def count(self) -> Int32:
        """Blocks that any tile visits."""
        return self.spans[0]

    def first(self, tile: int) -> Int32:
        """The first visit that is the tile's own; any number when it has none."""
        return self.spans[1 + 2 * tile]

    def own(self, tile: int) -> Int32:
        """Blocks that the tile visits."""
        return self.spans[2 + 2 * tile]

    def blocks_ahead(self, after: int) -> Ahead:
        column = cute.make_tensor(self.blocks.iterator, cute.make_layout((self.blocks.shape[0], 1)))
        return Ahead(column, cute.make_rmem_tensor((1 + after, 1), Int32), 0)

    def codes_ahead(self, before: int, after: int) -> Ahead:
        shape = (before + 1 + after, self.codes.shape[1])
        return Ahead(self.codes, cute.make_rmem_tensor(shape, Int32), before)

    @cute.jit
    def words(self, code: Int32, row: Int32) -> cute.Tensor:
        """What a row sees of a block with bits: bit c of word w is key 32 w + c."""
        count = cute.size(self.bits, mode=[2])
        words = cute.make_rmem_tensor(count, Int32)
        for w in cutlass.range_constexpr(count):
            words[w] = self.bits[code, row, w]
        return words


@cute.jit
def visits_at(lists: Lists, request: Int32, head: Int32, group: Int32) -> Visits:
    """group: of query rows, the thread block's number in the request."""
    spans, blocks, codes = (
        t[(request, head, group, *(None,) * (cute.rank(t) - 3))]
        for t in (lists.spans, lists.blocks, lists.codes)
    )
    return Visits(spans, blocks, codes, lists.bits)


@cute.jit
def hide(scores: cute.Tensor, words: cute.Tensor) -> None:
    """Scores that the row does not see become -inf."""
    for c in cutlass.range_constexpr(cute.size(scores)):
        seen = (words[c // WORD] >> (c % WORD)) & 1 != 0
        scores[c] = scores[c] if seen else -Float32.inf
