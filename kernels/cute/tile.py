"""Where a tile of query rows stands in its request, and which key blocks it visits."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Tile:
    """Rows [row, row + tile_m) of a request; `rows` of them exist (<= 0: none). With packed heads
    the rows are those of all of them, position by position.

    context: keys before the request's first query position. Blocks of tile_n keys are visited from
    n_blocks - 1 down to 0; those below n_full need no mask.
    """

    q_start: Int32
    row: Int32
    rows: Int32
    key_start: Int32
    seqlen_k: Int32
    context: Int32
    n_blocks: Int32
    n_full: Int32


def position_of(row: Int32, pack: int) -> Int32:
    """The query position of a row, when each has `pack` rows, a power of two."""
    return row >> (pack.bit_length() - 1) if pack > 1 else row


def rows_of(positions: Int32, pack: int) -> Int32:
    return positions * pack if pack > 1 else positions


@cute.jit
def make_tile(
    cu_seqlens_q: cute.Tensor,
    key_lengths: cute.Tensor,
    request: Int32,
    row: Int32,
    tile_m: cutlass.Constexpr[int],
    tile_n: cutlass.Constexpr[int],
    causal: cutlass.Constexpr[bool],
    ragged_keys: cutlass.Constexpr[bool],
    pack: cutlass.Constexpr[int] = 1,
) -> Tile:
    """key_lengths: [batch], or cumulative [batch + 1] with ragged_keys. pack: rows of a position;
    row and tile_m are multiples of it."""
    q_start = cu_seqlens_q[request]
    seqlen_q = cu_seqlens_q[request + 1] - q_start
    key_start = Int32(0)
    seqlen_k = key_lengths[request]
    if cutlass.const_expr(ragged_keys):
        key_start = seqlen_k
        seqlen_k = key_lengths[request + 1] - key_start
    context = seqlen_k - seqlen_q
    rows = cutlass.min(rows_of(seqlen_q, pack) - row, tile_m)
    key_end, full_end = seqlen_k, seqlen_k
    if cutlass.const_expr(causal):
        first, count = position_of(row, pack), position_of(rows, pack)
        key_end = cutlass.max(0, cutlass.min(seqlen_k, context + first + count))
        full_end = cutlass.max(0, cutlass.min(seqlen_k, context + first + 1))
    if rows <= 0:
        key_end = Int32(0)
    n_blocks = (key_end + tile_n - 1) // tile_n
    return Tile(q_start, row, rows, key_start, seqlen_k, context, n_blocks, full_end // tile_n)
