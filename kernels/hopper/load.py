"""Producer: one warp brings the queries and keys, a second one the values."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from blasst.kernels.cute.ring import Ring
from blasst.kernels.cute.tile import Tile
from blasst.kernels.cute.windows import copy_window, window
from blasst.kernels.hopper.config import ROWS, Config


class Source(NamedTuple):
    """Row windows of a tensor in global memory."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


@cute.jit
def load_queries(
    config: cutlass.Constexpr[Config],
    source: Source,
    smem: cute.Tensor,
    barriers: cute.Pointer,
    tile: Tile,
    head: Int32,
) -> None:
    """Each consumer warpgroup's rows into its own stage and barrier; rows beyond the end are 0."""
    for group in cutlass.range_constexpr(config.warpgroups):
        row = tile.row + group * ROWS
        valid = cutlass.max(0, cutlass.min(tile.rows - group * ROWS, ROWS))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + group, config.query_bytes)
        copy_window(
            source.atom,
            window(source.coordinates, tile.q_start + row, valid, (head,)),
            smem[None, None, group],
            barriers + group,
        )


@cute.jit
def load_blocks(
    config: cutlass.Constexpr[Config],
    source: Source,
    smem: cute.Tensor,
    ring: Ring,
    tile: Tile,
    kv_head: Int32,
    pages: cute.Tensor | None,
) -> None:
    """All blocks of keys or values that the tile visits. pages: the request's row of the table."""
    page = Int32(0)
    if cutlass.const_expr(pages is not None):
        page = read_pages(config, pages, tile, tile.n_blocks - 1)
    for visit in cutlass.range(tile.n_blocks, unroll=1):
        n = tile.n_blocks - 1 - visit
        next_page = Int32(0)
        if cutlass.const_expr(pages is not None):
            next_page = read_pages(config, pages, tile, n - 1)
        barrier = ring.acquire(visit)
        stage = smem[None, None, ring.stage(visit)]
        for part in cutlass.range_constexpr(config.tile_n // config.window):
            key = n * config.tile_n + part * config.window
            valid = cutlass.max(0, cutlass.min(tile.seqlen_k - key, config.window))
            if cutlass.const_expr(pages is None):
                rows = window(source.coordinates, tile.key_start + key, valid, (kv_head,))
            else:
                at = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, part))
                first = key % config.page_size
                rows = window(source.coordinates, first, valid, (kv_head, at))
            target = cute.local_tile(stage, (config.window, config.head_dim), (part, 0))
            copy_window(source.atom, rows, target, barrier)
        page = next_page


@cute.jit
def read_pages(
    config: cutlass.Constexpr[Config], pages: cute.Tensor, tile: Tile, n: Int32
) -> Int32:
    """Lane i: the page of the i-th window of block n; 0 where the table is not to be read."""
    key = n * config.tile_n + cute.arch.lane_idx() * config.window
    page = Int32(0)
    if key >= 0 and key < cutlass.min(tile.seqlen_k, (n + 1) * config.tile_n):
        page = pages[key // config.page_size]
    return page
