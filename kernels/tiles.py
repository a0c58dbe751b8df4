"""Which key blocks a tile of query rows visits, and what its rows see: shared by CPU and oracle."""

from __future__ import annotations

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.types import BlockMask


def blocks(tokens: int, tile: int) -> int:
    """Tiles that cover this many tokens."""
    return -(-tokens // tile)


def key_end(call: Call, request: Request, row_end: int) -> int:
    """Keys that rows [0, row_end) can reach: all without causality, else up to the last row's."""
    if not call.spec.causal:
        return request.seqlen_k
    return max(0, min(request.seqlen_k, request.context + row_end))


def visited_blocks(call: Call, request: Request) -> torch.Tensor:
    """bool [num_heads or 1, m_blocks, n_blocks]: blocks that are visited, skipped ones included.
    Without a mask all heads visit the same."""
    tile_m, tile_n = call.geometry.positions, call.geometry.tile_n
    m_blocks, n_blocks = blocks(request.seqlen_q, tile_m), blocks(request.seqlen_k, tile_n)
    ends = [
        blocks(key_end(call, request, min((m + 1) * tile_m, request.seqlen_q)), tile_n)
        for m in range(m_blocks)
    ]
    device = call.q.device
    reach = torch.arange(n_blocks, device=device) < torch.tensor(ends, device=device)[:, None]
    mask = call.spec.block_mask
    if mask is None:
        return reach[None]
    return reach & (
        _listed(mask.partial_counts, mask.partial_indices, request, reach)
        | _listed(mask.full_counts, mask.full_indices, request, reach)
    )


def partial_blocks(mask: BlockMask, request: Request, visited: torch.Tensor) -> torch.Tensor:
    """bool, like `visited`: the visited blocks to which mask_mod applies."""
    return visited & _listed(mask.partial_counts, mask.partial_indices, request, visited[0])


def mask_scores(
    call: Call, request: Request, scores: torch.Tensor, heads: range, rows: range, first_key: int
) -> torch.Tensor:
    """bool like `scores` [heads, rows, keys]: what mask_mod lets each row see. Keys beyond the end
    are as the last one."""
    assert call.spec.block_mask is not None
    device = scores.device
    head = torch.arange(heads.start, heads.stop, device=device)[:, None, None]
    query = torch.arange(rows.start, rows.stop, device=device)[:, None] + request.context
    key = torch.arange(first_key, first_key + scores.shape[-1], device=device)
    key = key.clamp(max=request.seqlen_k - 1)
    batch = torch.tensor(request.index, device=device)
    return call.spec.block_mask.mask_mod(batch, head, query, key).expand_as(scores)


def _listed(
    counts: torch.Tensor, indices: torch.Tensor, request: Request, like: torch.Tensor
) -> torch.Tensor:
    m_blocks, n_blocks = like.shape
    row = request.index if counts.shape[0] > 1 else 0
    counts, indices = counts[row, :, :m_blocks], indices[row, :, :m_blocks].long()
    valid = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
    # Entries beyond the count or the request land in one extra column that is dropped.
    column = torch.where(valid & (indices < n_blocks), indices, n_blocks)
    found = torch.zeros((*counts.shape, n_blocks + 1), dtype=torch.bool, device=counts.device)
    return found.scatter_(-1, column, True)[..., :n_blocks]
