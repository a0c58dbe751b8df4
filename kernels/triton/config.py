"""How a tile is run on a GPU: warps, pipeline depth, what fits. Imports nothing of Triton's."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from blasst.kernels.types import Geometry

BYTES = 2  # of an element: both dtypes
MIN_SHARED_MEMORY = 101376  # bytes of a program on compute capability 8.6, 8.9 and 12.0
SHARED_MEMORY = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
SLACK = 3072  # bytes beside the tiles: reductions, page numbers
REGISTERS_OF_TWO = 128  # of a thread, that two programs of 8 warps share a multiprocessor


@dataclass(frozen=True)
class Config:
    """num_stages: of the loop over full blocks. v_ahead: values are fetched before the vote.

    max_registers: of a thread, None = the compiler's choice. demand_stages: of a second loop that
    fetches values on demand while most blocks are skipped, 0 = none; chunk: blocks between two
    looks at how many were. boxes: blocks by the copy engine where the tensors allow it; ballot: a
    vote is one barrier; both need compute capability 9.0 or 10.
    """

    num_warps: int
    num_stages: int
    v_ahead: bool
    max_registers: int | None = None
    demand_stages: int = 0
    chunk: int = 64
    boxes: bool = False
    ballot: bool = False


def buffers(num_stages: int, paged: bool) -> int:
    """Blocks of keys in shared memory. A page number that is fetched first takes every second
    stage: 3 and 4 stages hold two blocks, 5 hold three."""
    return max(1, (num_stages + 1) // 2 if paged else num_stages)


def shared_bytes(geometry: Geometry, head_dim: int, config: Config, paged: bool) -> int:
    """Shared memory of a program, an upper bound. Before Hopper, P passes through the place of the
    query rows, which are in registers by then."""
    held = buffers(config.num_stages, paged)
    blocks = 2 * held if config.v_ahead else held + 1
    if config.demand_stages:
        blocks = max(blocks, buffers(config.demand_stages, paged) + 1)
    rows = geometry.tile_m * max(head_dim, geometry.tile_n)
    return (rows + blocks * geometry.tile_n * head_dim) * BYTES + SLACK


def config_for(
    geometry: Geometry, head_dim: int, *, paged: bool, shared_memory: int, lists: bool = False
) -> Config:
    """The deepest pipeline that fits `shared_memory` bytes of a program; where two programs fit a
    multiprocessor, one that leaves them room: one's products hide the other's softmax and vote.
    lists: of blocks, which need more registers than that."""
    warps = 8 if geometry.tile_m >= 128 else 4
    large = shared_memory >= SHARED_MEMORY[9, 0]
    if large and not lists and warps == 8 and geometry.tile_n * head_dim <= 64 * 128:
        stages = 3 if paged or head_dim < 128 else 2
        demand = 0 if paged else 3
        return Config(warps, stages, True, REGISTERS_OF_TWO, demand, boxes=not paged, ballot=True)
    for stages in (5, 3) if paged else (3, 2):
        config = Config(warps, stages, True, ballot=large)
        if shared_bytes(geometry, head_dim, config, paged) <= shared_memory:
            return config
    return Config(warps, 1, False, ballot=large)


def own_geometry(
    head_dim: int, capability: tuple[int, int] | None, *, paged: bool, lists: bool = False
) -> Geometry:
    """What votes unless the caller says: 128 x 128, or 128 x 64 where two programs then share a
    multiprocessor, and where two blocks of keys and values do not fit beside the query rows, so
    that the next could not be fetched ahead."""
    wide, narrow = Geometry(128, 128), Geometry(128, 64)
    limit = SHARED_MEMORY.get(capability or (9, 0), MIN_SHARED_MEMORY)
    of_wide, of_narrow = (
        config_for(g, head_dim, paged=paged, shared_memory=limit, lists=lists)
        for g in (wide, narrow)
    )
    pairs = of_narrow.max_registers is not None and of_wide.max_registers is None
    return wide if of_wide.v_ahead and not pairs else narrow


@functools.cache
def device_shared_memory(index: int) -> int:
    """Bytes that a program of this CUDA device may have."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
