"""The kernel's architecture as data; every number of the device code is derived here."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARP = 32
WARPGROUP = 128
WARPS = WARPGROUP // WARP
TILES = 2  # of query rows, one softmax warpgroup each
ROWS = 128  # of a tile: one a thread of its warpgroup, one a lane of tensor memory
SHARED_MEMORY = 227 * 1024
STAGES = {64: (6, 4), 128: (3, 2)}  # of keys and of values, by head_dim: what shared memory holds
ALIGNMENT = 1024  # bytes: the 128-byte swizzle repeats after 8 rows


@dataclass(frozen=True)
class Roles:
    """First warps; the softmax warpgroup of tile t starts at warp 4 * t."""

    correction: int = 8
    mma: int = 12
    keys: int = 13
    values: int = 14
    warps: int = 16

    @property
    def threads(self) -> int:
        return self.warps * WARP


@dataclass(frozen=True)
class Registers:
    """Of a thread; the four warpgroups share 64 Ki."""

    softmax: int = 192
    correction: int = 80
    other: int = 48


@dataclass(frozen=True)
class TmemMap:
    """First columns, one of each tile. The 16-bit P takes half of the columns of a score tile."""

    scores: tuple[int, int] = (0, 128)
    out: tuple[int, int] = (256, 384)
    own_p: tuple[int, int] = (0, 128)
    cross_p: tuple[int, int] = (128, 0)


@dataclass(frozen=True)
class Schedule:
    """order: what the MMA warp issues at visit i: "qk" of i and "pv" of i - 1, of a tile.

    buffered: of each tile, the quarters of P that wait in registers for the window in which P is
    stored. read_columns: scores in one tensor memory load. emulated: pairs of exponentials, of the
    16 in a quarter, that the multiply-add units compute, without a mask; not in the first quarters,
    `special` of each tile: wherever P lies, its bits are the same. Nor in buffered ones.
    """

    order: tuple[tuple[str, int], ...]
    buffered: tuple[int, int]
    read_columns: int = 32
    quarters: int = 4
    emulated: int = 4
    special: tuple[int, int] = (1, 0)

    def emulates(self, tile: int, quarter: int) -> int:
        """Pairs of a quarter, without a mask, that the multiply-add units compute.

        Before the window none: the assembler would put half of the others behind the wait.
        """
        first = max(self.buffered[tile], self.special[tile])
        return self.emulated if quarter >= first else 0


# Q @ K.T of a tile is issued before P @ V of the visit before: its scores are free by then.
CROSS = Schedule((("qk", 0), ("pv", 0), ("qk", 1), ("pv", 1)), (1, 0))
# P @ V reads what the next Q @ K.T of the tile overwrites, so it goes first.
OWN = Schedule((("pv", 0), ("qk", 0), ("pv", 1), ("qk", 1)), (0, 0))


@dataclass(frozen=True)
class Config:
    """What is compiled. page_size 0 = ragged keys; vote: skip blocks; count: and count them.

    cross_p: P of a tile is stored where the scores of the other one were. schedule, stages (of
    keys and of values): None = what is best. lazy_log2: how far, in
    log2 units, a running maximum may rise before the output is rescaled. block_mask: the blocks
    to visit come in lists. grid: thread blocks that stay and go through all work, longest first; 0:
    one for each 256 query rows of a head.
    """

    dtype: str
    head_dim: int
    causal: bool
    page_size: int
    vote: bool
    count: bool
    cross_p: bool = True
    schedule: Schedule | None = None
    roles: Roles = Roles()
    registers: Registers = Registers()
    tmem: TmemMap = TmemMap()
    tile_n: int = 128
    stages: tuple[int, int] | None = None
    lazy_log2: float = 8.0
    trace: bool = False
    block_mask: bool = False
    grid: int = 0

    @property
    def plan(self) -> Schedule:
        return self.schedule or (CROSS if self.cross_p else OWN)

    @property
    def key_stages(self) -> int:
        return (self.stages or STAGES[self.head_dim])[0]

    @property
    def value_stages(self) -> int:
        return (self.stages or STAGES[self.head_dim])[1]

    @property
    def tile_m(self) -> int:
        return TILES * ROWS

    @property
    def p_columns(self) -> tuple[int, int]:
        return self.tmem.cross_p if self.cross_p else self.tmem.own_p

    @property
    def window(self) -> int:
        """Keys that one copy brings: the largest part that pages and blocks share."""
        return math.gcd(self.page_size or self.tile_n, self.tile_n)

    @property
    def windows(self) -> int:
        """Copies that bring a block."""
        return self.tile_n // self.window

    @property
    def stops_at_bad_pages(self) -> bool:
        """A page number that the cache does not have is read as zeros: the proof is of this."""
        return False

    @property
    def loaders(self) -> int:
        """Warps that share the copies of a block of keys, and as many for values."""
        return 1

    @property
    def bytes_per_stage(self) -> int:
        return self.tile_n * self.head_dim * 2

    @property
    def query_bytes(self) -> int:
        """Of one tile."""
        return ROWS * self.head_dim * 2

    @property
    def vote_barriers(self) -> tuple[int, int]:
        """Named barriers of the softmax warpgroups; 0 is the whole block's."""
        return (1, 2)

    @property
    def correction_barrier(self) -> int:
        return 3

    @property
    def teardown_barrier(self) -> int:
        """Where the correction warps tell the MMA warp that tensor memory is no longer read."""
        return 4
