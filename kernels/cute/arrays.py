"""Arguments of a prefill kernel on the device, and where a thread block stands in them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from blasst.kernels.cute.load import Source
from blasst.kernels.cute.smem import ATOM_ROWS
from blasst.kernels.cute.tile import Tile, make_tile, rows_of
from blasst.kernels.cute.windows import make_box_atom, make_window_atom, packed, select

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Arrays(NamedTuple):
    """Everything in global memory: q, k, v, out as row windows; the rest as they are.

    lse: [num_heads, total_q]; key_lengths: [batch], or cumulative [batch + 1] for ragged keys;
    page_table: [batch, max_pages]; skip_lambda: [batch]; counters: [num_kv_heads, 2];
    trace: as `trace.start_trace` takes it; lists: of a block mask, `visits.Lists`.
    """

    q: Source
    k: Source
    v: Source
    out: Source
    lse: cute.Tensor
    cu_seqlens_q: cute.Tensor
    key_lengths: cute.Tensor
    page_table: Any  # None, like the next four, when the Config has no use for it
    skip_lambda: Any
    counters: Any
    trace: Any
    lists: Any


class Place(NamedTuple):
    """What a thread block computes: rows from `row` on of one q head of one request, or of the q
    heads that are packed; `head` counts those bundles then."""

    head: Int32
    kv_head: Int32
    request: Int32
    row: Int32


def make_sources(
    config: Any,
    rows: int,
    tensors: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    whole_rows: bool = False,
    pack: int = 1,
) -> tuple[Source, Source, Source, Source]:
    """Windows of q, k, v and out: `rows` query rows, or config.window keys.

    whole_rows: as in tile_layout; then whole windows of a page are boxes too. pack: q heads that
    are rows of one tile.
    """
    q, k, v, out = tensors
    rows_first = (1, 3, 2, 0) if config.page_size else (0, 2, 1)
    q, out = (packed(select(t, (0, 2, 1)), pack) for t in (q, out))
    k, v = select(k, rows_first), select(v, rows_first)
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    return (
        Source(*make_window_atom(load, q, rows, rows)),
        key_source(config, load, k, whole_rows),
        key_source(config, load, v, whole_rows),
        Source(*make_window_atom(store, out, rows, rows)),
    )


def key_source(config: Any, op: Any, rows: cute.Tensor, whole_rows: bool) -> Source:
    """whole_rows: boxes for windows of valid rows, and windows of 8 rows for the others."""
    box = make_box_atom(op, rows, config.window) if whole_rows else None
    window = ATOM_ROWS if whole_rows else config.window
    atom, coordinates = make_window_atom(op, rows, window, config.tile_n, whole_rows)
    return Source(atom, coordinates, box)


def make_grid(
    config: Any,
    arrays: Arrays,
    heads: tuple[Int32, Int32],
    max_seqlen_q: Int32,
    pack: int = 1,
) -> tuple[Any, Any, Any]:
    """(heads or bundles of a group, tiles of the longest request, kv heads * requests); heads: q,
    kv; pack: heads of a bundle.

    The heads of a group run side by side: they read the same keys.
    """
    num_heads, num_kv_heads = heads
    batch = arrays.cu_seqlens_q.shape[0] - 1
    tiles = cute.ceil_div(rows_of(max_seqlen_q, pack), config.tile_m)
    in_group = num_heads // num_kv_heads
    return in_group if pack == 1 else in_group // pack, tiles, num_kv_heads * batch


@cute.jit
def make_place(config: cutlass.Constexpr[Any], num_kv_heads: Int32) -> Place:
    """Of this thread block. The longest tiles of a causal prompt start first."""
    in_group, m_reversed, slot = cute.arch.block_idx()
    group_size, m_blocks, _ = cute.arch.grid_dim()
    kv_head, request = slot % num_kv_heads, slot // num_kv_heads
    row = (m_blocks - 1 - m_reversed) * config.tile_m
    return Place(kv_head * group_size + in_group, kv_head, request, row)


@cute.jit
def tile_at(
    config: cutlass.Constexpr[Any],
    arrays: Arrays,
    request: Int32,
    row: Int32,
    tile_m: cutlass.Constexpr[int],
    pack: cutlass.Constexpr[int] = 1,
) -> Tile:
    tile: Tile = make_tile(
        arrays.cu_seqlens_q,
        arrays.key_lengths,
        request,
        row,
        tile_m,
        config.tile_n,
        config.causal,
        config.page_size == 0,
        pack,
    )
    return tile
