"""The kernel's architecture as data; every number of the device code is derived here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARPGROUP = 128
WARP = 32
ROWS = 64  # of a warpgroup's matrix product, and of its vote
SMALL_PAGES = (16, 32)
HIGHEST = {"float16": 15.0, "bfloat16": 80.0}  # of P, in log2 units: float16 ends at 16

# The fastest measured, by head_dim (docs/measurements).
TUNED: dict[int, dict[str, Any]] = {64: {"key_stages": 5, "value_stages": 4}}


@dataclass(frozen=True)
class Config:
    """What is compiled. page_size 0 = ragged keys; vote: skip blocks; count: and count them.

    warpgroups: consumers, each with ROWS query rows. trace: clocks are recorded. block_mask: the
    blocks to visit come in lists. pack: q heads of a group that are rows of one tile, a power of
    two; without a block mask.
    """

    dtype: str
    head_dim: int
    causal: bool
    page_size: int
    vote: bool
    count: bool
    warpgroups: int = 3
    tile_n: int = 128
    key_stages: int = 3
    value_stages: int = 2
    trace: bool = False
    block_mask: bool = False
    pack: int = 1

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def producer_registers(self) -> int:
        """Reading a page table takes more than 24."""
        return 32

    @property
    def consumer_registers(self) -> int:
        """What a multiprocessor has for each of three warpgroups beside the producer's."""
        return 160

    @property
    def window(self) -> int:
        """Keys that one copy brings: a whole page, or the part of it that a block needs."""
        return min(self.page_size or self.tile_n, self.tile_n)

    @property
    def windows(self) -> int:
        """Copies that bring a block."""
        return self.tile_n // self.window

    @property
    def whole_rows(self) -> bool:
        """Small pages come in one copy each, which needs all columns of 8 rows together."""
        return self.page_size in SMALL_PAGES

    @property
    def stops_at_bad_pages(self) -> bool:
        """A page number that the cache does not have ends the kernel with an error."""
        return self.page_size > 0

    @property
    def loaders(self) -> int:
        """Warps that share the copies of a block of keys, and as many for values."""
        return min(self.windows, 2)

    @property
    def barriers(self) -> int:
        """mbarriers: for the queries of each warpgroup, and two for each stage."""
        return self.warpgroups + 2 * (self.key_stages + self.value_stages)

    @property
    def parts(self) -> int:
        """Of P @ V. The bits of a mask leave no registers for more than two."""
        return 2 if self.block_mask and self.head_dim == 128 else 4

    @property
    def highest(self) -> float:
        """Of P, in log2 units."""
        return HIGHEST[self.dtype]

    @property
    def bytes_per_stage(self) -> int:
        return self.tile_n * self.head_dim * 2

    @property
    def query_bytes(self) -> int:
        """Of one warpgroup."""
        return ROWS * self.head_dim * 2

    def group_barrier(self, group: int) -> int:
        """Named barrier of one consumer warpgroup; 0 is the whole block's."""
        return 1 + group
