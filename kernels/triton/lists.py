"""Block masks as the Triton kernel reads them: visits in order, and bits of the partial blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.tiles import blocks, partial_blocks, visited_blocks

CHUNK = 1 << 22  # scores whose mask is evaluated at once
WORD = 32


class BlockLists(NamedTuple):
    """counts: [batch, num_heads, m_blocks]; blocks, tiles: the same with n_blocks appended, key
    blocks from right to left and the index of each one's bits, -1 = all visible.
    bits: [partial blocks, tile_m, tile_n / 32], bit c of word w: key 32 w + c. All int32.
    """

    counts: torch.Tensor
    blocks: torch.Tensor
    tiles: torch.Tensor
    bits: torch.Tensor
    m_blocks: int
    n_blocks: int


def block_lists(call: Call) -> BlockLists:
    """Of a call with a block mask. Evaluates mask_mod on every partial block of every head, and
    waits for the device: not for use under graph capture."""
    mask = call.spec.block_mask
    assert mask is not None
    tile_m, tile_n = call.geometry.tile_m, call.geometry.tile_n
    heads = call.problem.num_heads
    m_blocks = max((blocks(r.seqlen_q, tile_m) for r in call.requests), default=0)
    n_blocks = max([1, *(blocks(r.seqlen_k, tile_n) for r in call.requests)])
    shape = (len(call.requests), heads, m_blocks, n_blocks)
    order = torch.zeros(shape, dtype=torch.int32, device=call.q.device)
    tiles = torch.full_like(order, -1)
    counts = torch.zeros(shape[:3], dtype=torch.int32, device=call.q.device)
    bits, made = [], 0
    for request in call.requests:
        visited = visited_blocks(call, request)
        partial = partial_blocks(mask, request, visited)
        visited, partial = (t.expand(heads, -1, -1) for t in (visited, partial))
        m, n = visited.shape[1:]
        index = torch.full(visited.shape, -1, dtype=torch.int32, device=call.q.device)
        where = partial.nonzero()
        index[partial] = torch.arange(
            made, made + where.shape[0], dtype=torch.int32, device=call.q.device
        )
        made += where.shape[0]
        bits += list(_bits(call, request, where))
        # Right to left: a stable sort of the reversed row puts the visited ones first.
        chosen = visited.flip(-1).int().argsort(dim=-1, descending=True, stable=True)
        at = (n - 1 - chosen).clamp(min=0)
        order[request.index, :, :m, :n] = at.int()
        tiles[request.index, :, :m, :n] = index.gather(-1, at)
        counts[request.index, :, :m] = visited.sum(-1).int()
    packed = torch.cat(bits) if bits else order.new_zeros(1, tile_m, tile_n // WORD)
    return BlockLists(counts, order, tiles, packed, m_blocks, n_blocks)


def _bits(call: Call, request: Request, where: torch.Tensor) -> Iterator[torch.Tensor]:
    """where: int64 [partial blocks, (head, m, n)]."""
    mask = call.spec.block_mask
    assert mask is not None
    tile_m, tile_n = call.geometry.tile_m, call.geometry.tile_n
    rows = torch.arange(tile_m, device=where.device)[:, None]
    columns = torch.arange(tile_n, device=where.device)
    batch = torch.tensor(request.index, device=where.device)
    weights = torch.ones(WORD, dtype=torch.int64, device=where.device) << torch.arange(
        WORD, device=where.device
    )
    for part in torch.split(where, max(1, CHUNK // (tile_m * tile_n))):
        head, m, n = (t[:, None, None] for t in part.unbind(1))
        query = m * tile_m + rows + request.context
        seen = mask.mask_mod(batch, head, query, n * tile_n + columns)
        words = seen.expand(part.shape[0], tile_m, tile_n).reshape(
            part.shape[0], tile_m, tile_n // WORD, WORD
        )
        # int64 first: bit 31 is the sign of an int32.
        yield (words.long() * weights).sum(-1).to(torch.int32)
