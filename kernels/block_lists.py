"""Block masks as GPU kernels read them: visits in order, and bits of the blocks not wholly visible.

Made once for a mask and the lengths of a batch, and kept as long as the mask is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.tiles import blocks, partial_blocks, visited_blocks
from blasst.kernels.types import BlockMask

CHUNK = 1 << 22  # scores whose mask is evaluated at once
WORD = 32
ALL = -1  # code of a block whose keys are all visible
NONE = -2  # code of a block that is not visited
KEPT = 16  # lists of a mask: chunks of a prompt and batches differ in lengths

T = TypeVar("T")


class BlockLists(NamedTuple):
    """counts: [batch, heads, m_blocks]; blocks, tiles: the same with n_blocks appended, key
    blocks from right to left and the index of each one's bits, or ALL. heads: 1 when all see the
    same. bits: [some blocks, tile_m, tile_n / 32], bit c of word w: key 32 w + c is visible,
    causality and the end of the keys included. All int32.
    """

    counts: torch.Tensor
    blocks: torch.Tensor
    tiles: torch.Tensor
    bits: torch.Tensor
    heads: int
    m_blocks: int
    n_blocks: int


class GroupLists(NamedTuple):
    """For thread blocks of `groups` query tiles that vote by themselves, all int32.

    spans: [batch, heads, rows, 1 + 2 groups], visits of the thread block (its tiles' together),
    and for each tile the first visit that is its own and how many are. blocks: [batch, heads, rows,
    n_blocks], key blocks from right to left; codes: the same with groups appended, what a tile sees
    of a visit: index of its bits, ALL, or NONE. heads and bits: as in BlockLists.
    """

    spans: torch.Tensor
    blocks: torch.Tensor
    codes: torch.Tensor
    bits: torch.Tensor


class _Map(NamedTuple):
    """codes: int32 [batch, heads, m_blocks, n_blocks]; bits as in BlockLists."""

    codes: torch.Tensor
    bits: torch.Tensor


def block_lists(call: Call) -> BlockLists:
    """Of a call with a block mask. The first call for these lengths evaluates mask_mod and waits
    for the device; later ones do neither, so that they may be captured in a graph."""
    return _kept(call, "lists", lambda: _block_lists(_map(call)))


def group_lists(call: Call, groups: int, rows: int | None = None) -> GroupLists:
    """As block_lists, for thread blocks of `groups` tiles of the call's geometry; rows: of tiles
    that its tiles are divided into."""
    parts = 1 if rows is None else call.geometry.tile_m // rows
    return _kept(call, (groups, parts), lambda: _group_lists(_divided(_map(call), parts), groups))


_HELD: WeakKeyDictionary[BlockMask, OrderedDict[Any, Any]] = WeakKeyDictionary()
_LOCK = threading.RLock()


def _kept(call: Call, kind: object, make: Callable[[], T]) -> T:
    mask = call.spec.block_mask
    assert mask is not None
    lengths = tuple((r.seqlen_q, r.seqlen_k) for r in call.requests)
    key = kind, call.geometry, call.spec.causal, call.problem.num_heads, lengths
    with _LOCK:
        held = _HELD.setdefault(mask, OrderedDict())
        if key not in held:
            held[key] = make()
            while len(held) > KEPT:
                held.popitem(last=False)
        held.move_to_end(key)
        found: T = held[key]
        return found


def _map(call: Call) -> _Map:
    return _kept(call, "map", lambda: _make_map(call))


@torch.no_grad()
def _make_map(call: Call) -> _Map:
    tile_m, tile_n = call.geometry.tile_m, call.geometry.tile_n
    m_blocks = max((blocks(r.seqlen_q, tile_m) for r in call.requests), default=0)
    n_blocks = max([1, *(blocks(r.seqlen_k, tile_n) for r in call.requests)])
    heads = call.problem.num_heads if _looks_at_head(call) else 1
    shape = (len(call.requests), heads, m_blocks, n_blocks)
    codes = torch.full(shape, NONE, dtype=torch.int32, device=call.q.device)
    bits, made = [], 0
    for request in call.requests:
        visited = visited_blocks(call, request)
        code = codes[request.index, :, : visited.shape[1], : visited.shape[2]]
        code.masked_fill_(visited, ALL)
        where = (visited & _not_whole(call, request, visited)).expand_as(code).nonzero()
        index = torch.arange(made, made + where.shape[0], dtype=torch.int32, device=code.device)
        code[tuple(where.unbind(1))] = index
        made += where.shape[0]
        bits += list(_bits(call, request, where))
    # Never empty: a kernel may read the first block's where it needs none.
    packed = torch.cat(bits) if made else codes.new_zeros(1, tile_m, tile_n // WORD)
    return _Map(codes, packed)


def _looks_at_head(call: Call) -> bool:
    """Whether lists or mask_mod tell heads apart: a result without a dimension of heads cannot."""
    mask, heads = call.spec.block_mask, call.problem.num_heads
    assert mask is not None
    some = next((r.index for r in call.requests if r.seqlen_k), None)
    if heads == 1 or some is None:
        return False
    if max(mask.partial_counts.shape[1], mask.full_counts.shape[1]) > 1:
        return True
    batch = torch.tensor(some, device=call.q.device)
    first = torch.zeros(1, dtype=torch.int64, device=call.q.device)
    head = torch.arange(heads, device=call.q.device)[:, None, None]
    seen = mask.mask_mod(batch, head, first[:, None], first)
    return seen.dim() > 2 and seen.shape[0] > 1


def _not_whole(call: Call, request: Request, visited: torch.Tensor) -> torch.Tensor:
    """bool like `visited`: blocks with a mask, beyond the last key, or right of the diagonal."""
    mask, tile_m, tile_n = call.spec.block_mask, call.geometry.tile_m, call.geometry.tile_n
    assert mask is not None
    ends = tile_n * torch.arange(1, visited.shape[2] + 1, device=visited.device)
    reach = torch.tensor(request.seqlen_k, device=visited.device)
    if call.spec.causal:
        first_row = tile_m * torch.arange(visited.shape[1], device=visited.device)[:, None]
        reach = (request.context + first_row + 1).clamp(max=request.seqlen_k)
    return partial_blocks(mask, request, visited) | (ends > reach)


def _bits(call: Call, request: Request, where: torch.Tensor) -> Iterator[torch.Tensor]:
    """where: int64 [blocks, (head, m, n)]."""
    mask, tile_m, tile_n = call.spec.block_mask, call.geometry.tile_m, call.geometry.tile_n
    assert mask is not None
    rows = torch.arange(tile_m, device=where.device)[:, None]
    columns = torch.arange(tile_n, device=where.device)
    batch = torch.tensor(request.index, device=where.device)
    masked = partial_blocks(mask, request, visited_blocks(call, request))
    masked = masked.expand(call.problem.num_heads, -1, -1)
    weights = torch.ones(WORD, dtype=torch.int64, device=where.device) << torch.arange(
        WORD, device=where.device
    )
    last = request.seqlen_k - 1
    for part in torch.split(where, max(1, CHUNK // (tile_m * tile_n))):
        head, m, n = (t[:, None, None] for t in part.unbind(1))
        query, key = m * tile_m + rows + request.context, n * tile_n + columns
        # A mask knows nothing beyond the ends: the last token is asked for again.
        seen = mask.mask_mod(batch, head, query.clamp(max=last), key.clamp(max=last))
        seen = (seen | ~masked[head, m, n]) & (key <= last)
        if call.spec.causal:
            seen = seen & (key <= query)
        words = seen.expand(part.shape[0], tile_m, tile_n).reshape(
            part.shape[0], tile_m, tile_n // WORD, WORD
        )
        # int64 first: bit 31 is the sign of an int32.
        yield (words.long() * weights).sum(-1).to(torch.int32)


def _in_order(visited: torch.Tensor) -> torch.Tensor:
    """int64 like `visited`: the visited blocks of each row from right to left, then others."""
    chosen = visited.flip(-1).int().argsort(dim=-1, descending=True, stable=True)
    return visited.shape[-1] - 1 - chosen


def _divided(held: _Map, parts: int) -> _Map:
    """The same visits for `parts` tiles of fewer rows instead of each."""
    codes = held.codes.repeat_interleave(parts, 2)
    part = torch.arange(codes.shape[2], dtype=torch.int32, device=codes.device)[:, None] % parts
    codes = torch.where(codes >= 0, codes * parts + part, codes)
    return _Map(codes, held.bits.reshape(-1, held.bits.shape[1] // parts, held.bits.shape[2]))


def _block_lists(held: _Map) -> BlockLists:
    visited = held.codes != NONE
    at = _in_order(visited)
    counts = visited.sum(-1, dtype=torch.int32)
    tiles = held.codes.gather(-1, at)
    return BlockLists(counts, at.int(), tiles, held.bits, *held.codes.shape[1:])


def _group_lists(held: _Map, groups: int) -> GroupLists:
    batch, heads, m_blocks, n_blocks = held.codes.shape
    missing = -m_blocks % groups
    codes = torch.nn.functional.pad(held.codes, (0, 0, 0, missing), value=NONE)
    codes = codes.view(batch, heads, -1, groups, n_blocks).transpose(-1, -2)
    visited = (codes != NONE).any(-1)
    at = _in_order(visited)
    codes = codes.gather(-2, at[..., None].expand_as(codes)).contiguous()
    own = codes != NONE
    pairs = torch.stack([own.int().argmax(-2), own.sum(-2)], -1).flatten(-2)
    spans = torch.cat([visited.sum(-1, keepdim=True), pairs], -1).int()
    return GroupLists(spans, at.int(), codes, held.bits)
