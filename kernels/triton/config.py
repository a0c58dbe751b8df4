"""How a tile is run on a GPU: warps, pipeline depth, what fits. Imports nothing of Triton's."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from blasst.kernels.types import Geometry

BYTES = 2  # of an element: both dtypes
MIN_SHARED_MEMORY = 101376  # bytes of a program on compute capability 8.6, 8.9 and 12.0
SHARED_MEMORY = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
SLACK = 3072  # bytes beside the tiles: reductions, page numbers


@dataclass(frozen=True)
class Config:
    """num_stages: of the loop over full blocks. v_ahead: values are fetched before the vote.

    max_registers: of a thread, None = the compiler's choice.
    """

    num_warps: int
    num_stages: int
    v_ahead: bool
    max_registers: int | None = None


def buffers(num_stages: int, paged: bool) -> int:
    """Blocks of keys in shared memory. A page number that is fetched first takes every second
    stage: 3 and 4 stages hold two blocks, 5 hold three."""
    return max(1, (num_stages + 1) // 2 if paged else num_stages)


def shared_bytes(geometry: Geometry, head_dim: int, config: Config, paged: bool) -> int:
    """Shared memory of a program, an upper bound. Before Hopper, P passes through the place of the
    query rows, which are in registers by then."""
    held = buffers(config.num_stages, paged)
    blocks = 2 * held if config.v_ahead else held + 1
    rows = geometry.tile_m * max(head_dim, geometry.tile_n)
    return (rows + blocks * geometry.tile_n * head_dim) * BYTES + SLACK


def config_for(geometry: Geometry, head_dim: int, *, paged: bool, shared_memory: int) -> Config:
    """The deepest pipeline that fits `shared_memory` bytes of a program."""
    warps = 8 if geometry.tile_m >= 128 else 4
    for stages in (5, 3) if paged else (3, 2):
        config = Config(warps, stages, True)
        if shared_bytes(geometry, head_dim, config, paged) <= shared_memory:
            return config
    return Config(warps, 1, False)


def own_geometry(head_dim: int, capability: tuple[int, int] | None, *, paged: bool) -> Geometry:
    """What votes unless the caller says: 128 x 128, or 128 x 64 where two blocks of keys and values
    do not fit beside the query rows, so that the next could not be fetched ahead."""
    wide = Geometry(128, 128)
    limit = SHARED_MEMORY.get(capability or (9, 0), MIN_SHARED_MEMORY)
    fits = config_for(wide, head_dim, paged=paged, shared_memory=limit).v_ahead
    return wide if fits else Geometry(128, 64)


@functools.cache
def device_shared_memory(index: int) -> int:
    """Bytes that a program of this CUDA device may have."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
