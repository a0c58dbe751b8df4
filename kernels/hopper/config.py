"""The kernel's architecture as data; every number of the device code is derived here."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP = 128
WARP = 32
ROWS = 64  # of a warpgroup's matrix product, and of its vote


@dataclass(frozen=True)
class Config:
    """What is compiled. page_size 0 = ragged keys; vote: skip blocks; count: and count them.

    warpgroups: consumers, each with ROWS query rows. trace: clocks are recorded.
    """

    dtype: str
    head_dim: int
    causal: bool
    page_size: int
    vote: bool
    count: bool
    warpgroups: int = 2
    tile_n: int = 128
    stages: int = 2
    trace: bool = False

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def producer_registers(self) -> int:
        """Reading a page table takes more than the 24 that two consumer warpgroups leave over."""
        return 40 if self.page_size else {2: 24, 3: 32}[self.warpgroups]

    @property
    def consumer_registers(self) -> int:
        return {2: 232 if self.page_size else 240, 3: 152 if self.page_size else 160}[
            self.warpgroups
        ]

    @property
    def window(self) -> int:
        """Keys that one copy brings: a whole page, or the part of it that a block needs."""
        return min(self.page_size or self.tile_n, self.tile_n)

    @property
    def windows(self) -> int:
        """Copies that bring a block."""
        return self.tile_n // self.window

    @property
    def loaders(self) -> int:
        """Warps that share the copies of a block of keys, and as many for values."""
        return min(self.windows, 2)

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
