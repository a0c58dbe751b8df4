"""Block lists of a mask in both orientations, full and partial, exact, by vectorised code.

Intervals of the fields decide most blocks at once; only blocks that they leave open are looked at
token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from blasst.kernels.errors import UnsupportedError
from blasst.kernels.masks.expr import (
    INDEX,
    And,
    Compare,
    Constant,
    Difference,
    Field,
    Mask,
    Op,
    Or,
    Parameter,
    Side,
    Term,
    reads_index,
)
from blasst.kernels.masks.program import Inputs, Program
from blasst.kernels.types import Geometry

TILE_ELEMENTS = 1 << 24
"""Elements looked at in one go: 16 MiB of booleans, and a few int32 of each."""


@dataclass(frozen=True)
class Orientation:
    """int32: counts [batch, 1, rows], indices [batch, 1, rows, columns]: ascending up to the count,
    then the other columns. A block is full when all its tokens exist and are visible, partial when
    some pair is visible, else in no list."""

    partial_counts: torch.Tensor
    partial_indices: torch.Tensor
    full_counts: torch.Tensor
    full_indices: torch.Tensor

    def listed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [batch, 1, rows, columns]: partial, full."""
        return (
            listed(self.partial_counts, self.partial_indices),
            listed(self.full_counts, self.full_indices),
        )


@dataclass(frozen=True)
class BlockLists:
    """by_query: rows are query tiles, columns key blocks. by_key, the backward's: the other way."""

    geometry: Geometry
    by_query: Orientation
    by_key: Orientation | None

    @property
    def backward(self) -> Orientation:
        """by_key. Raises UnsupportedError where it was not built: kernels would visit every block,
        with the right gradients and no sign but the time."""
        if self.by_key is None:
            raise UnsupportedError(
                [
                    "these block lists have no key-major orientation, and a backward without it is "
                    "silently dense; build them with backward=True"
                ]
            )
        return self.by_key

    @cached_property
    def write_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dq_write_order as FA4 chooses it for causal masks, and torch for all: spt=True."""
        return dq_write_order(self, spt=True)

    @cached_property
    def visited_blocks(self) -> int:
        """Blocks in either list, all requests. Waits for the device once."""
        return int(self.by_query.partial_counts.sum() + self.by_query.full_counts.sum())

    @property
    def sparsity(self) -> float:
        """Share of blocks in no list."""
        batch, _, rows, columns = self.by_query.partial_indices.shape
        return 1.0 - self.visited_blocks / max(1, batch * rows * columns)


@dataclass(frozen=True)
class Tokens:
    """What a program reads: int32 [batch, seqlen] tensors in the order of `names`, parameters last.

    With explicit indices, the index of both sides is among the tensors.
    """

    names: Inputs
    tensors: tuple[torch.Tensor, ...]
    batch: int
    seqlen_q: int
    seqlen_k: int

    @property
    def device(self) -> torch.device:
        return self.tensors[-1].device


@torch.no_grad()
def build_lists(
    mask: Mask, program: Program, tokens: Tokens, geometry: Geometry, *, backward: bool = True
) -> BlockLists:
    """The lists of one layout for one geometry. backward=False saves inference the second half."""
    some, every = classify_blocks(mask, program, tokens, geometry)
    partial = some & ~every
    return BlockLists(
        geometry,
        Orientation(*_ordered(partial), *_ordered(every)),
        Orientation(*_ordered(partial.mT), *_ordered(every.mT)) if backward else None,
    )


def classify_blocks(
    mask: Mask, program: Program, tokens: Tokens, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [batch, m_blocks, n_blocks]: some token pair is visible; all exist and are visible."""
    bounds = _Bounds(tokens, geometry)
    may, may_not = _decide(mask, bounds)
    m_blocks, n_blocks = bounds.blocks["query"], bounds.blocks["key"]
    shape = tokens.batch, m_blocks, n_blocks
    some, every = may.expand(shape).clone(), (~may_not).expand(shape).clone()
    unknown = (may & may_not).expand(shape)
    by_order = unknown & _index_open(mask, bounds)
    query = torch.arange(m_blocks * geometry.tile_m, device=tokens.device)
    key = torch.arange(n_blocks * geometry.tile_n, device=tokens.device)
    all_tokens = query.view(1, m_blocks, -1), key.view(1, n_blocks, -1)
    runs = _run_starts(tokens, "query", geometry.tile_m), _run_starts(
        tokens, "key", geometry.tile_n
    )  # fmt: skip
    for which, places in ((by_order, all_tokens), (unknown & ~by_order, runs)):
        tiles = which.nonzero()
        step = max(1, TILE_ELEMENTS // (places[0].shape[-1] * places[1].shape[-1]))
        for part in torch.split(tiles, step):
            b, m, n = part.unbind(1)
            visible, exists = _look(program, tokens, places, part)
            some[b, m, n] = (visible & exists).flatten(1).any(1)
            every[b, m, n] = (visible & exists).flatten(1).all(1)
    if tokens.seqlen_q % geometry.tile_m:
        every[:, -1:] = False
    if tokens.seqlen_k % geometry.tile_n:
        every[..., -1:] = False
    return some, every


def dq_write_order(lists: BlockLists, *, spt: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The turn in which each key block adds to a query tile's dQ: int32, for the partial and the
    full key-major lists, parallel to their indices.

    The turn is the rank of the key block among all that the query tile visits, ascending, or
    descending if spt (the order in which the kernel then starts key blocks). Entries beyond a count
    are 0. It is what FA4's deterministic SM100 backward waits for.
    """
    partial, full = lists.by_query.listed()
    visited = partial | full
    order = visited.flip(-1) if spt else visited
    rank = order.int().cumsum(-1) - 1
    rank = (rank.flip(-1) if spt else rank).mT
    backward = lists.backward
    orders = []
    for counts, indices in (
        (backward.partial_counts, backward.partial_indices),
        (backward.full_counts, backward.full_indices),
    ):
        valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        turns = rank.gather(-1, indices.long())
        orders.append(torch.where(valid, turns, 0).int())
    return orders[0], orders[1]


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """bool, like indices (which name every column once): what a pair of lists names."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(valid).scatter_(-1, indices.long(), valid)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of bool [batch, rows, columns], with a heads dimension of 1."""
    blocks = blocks[:, None]
    indices = torch.argsort(blocks.byte(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.int().contiguous()


def _blocks(tokens: int, tile: int) -> int:
    return -(-tokens // tile)


def _run_starts(tokens: Tokens, side: Side, tile: int) -> torch.Tensor:
    """int64 [batch, blocks, runs]: one token of each run of equal fields in a block.

    Where the order of tokens is decided for a whole block, the pairs of these say all. The rows of
    blocks with fewer runs repeat their first token.
    """
    length = tokens.seqlen_q if side == "query" else tokens.seqlen_k
    starts = torch.zeros(tokens.batch, length, dtype=torch.bool, device=tokens.device)
    for (at, name), values in zip(tokens.names, tokens.tensors, strict=False):
        if at == side and name != INDEX:
            starts[:, 1:] |= values[:, 1:] != values[:, :-1]
    starts[:, ::tile] = True
    missing = _blocks(length, tile) * tile - length
    starts = torch.nn.functional.pad(starts, (0, missing)).view(tokens.batch, -1, tile)
    counts = starts.sum(-1, keepdim=True)
    most = int(counts.max())
    order = torch.argsort(starts.byte(), dim=-1, descending=True, stable=True)[..., :most]
    order = torch.where(torch.arange(most, device=order.device) < counts, order, 0)
    first = torch.arange(0, starts.shape[1] * tile, tile, device=order.device)
    return order + first[:, None]


def _look(
    program: Program,
    tokens: Tokens,
    places: tuple[torch.Tensor, torch.Tensor],
    tiles: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [tiles, queries, keys] of tiles (request, m_block, n_block): visible; both exist.

    places: the tokens to look at, [batch or 1, blocks, tokens of a block], by side.
    """
    b, m, n = tiles.unbind(1)
    query, key = (
        side[b if side.shape[0] > 1 else torch.zeros_like(b), block]
        for side, block in zip(places, (m, n), strict=True)
    )
    query, key = query[:, :, None], key[:, None]
    exists = (query < tokens.seqlen_q) & (key < tokens.seqlen_k)
    query = query.clamp(max=tokens.seqlen_q - 1)
    key = key.clamp(max=tokens.seqlen_k - 1)
    return program(b[:, None, None], query, key, tokens.tensors), exists


Interval = tuple[torch.Tensor, torch.Tensor]


class _Bounds:
    """Smallest and largest value of each term in each block, [batch or 1, m or 1, n or 1]."""

    def __init__(self, tokens: Tokens, geometry: Geometry) -> None:
        self.tokens = tokens
        self.places = {name: i for i, name in enumerate(tokens.names)}
        self.tiles = {"query": geometry.tile_m, "key": geometry.tile_n}
        self.lengths = {"query": tokens.seqlen_q, "key": tokens.seqlen_k}
        self.blocks = {side: _blocks(n, self.tiles[side]) for side, n in self.lengths.items()}

    def of(self, term: Term) -> Interval:
        if isinstance(term, Constant | Parameter):
            return self._single(term.value)
        if isinstance(term, Difference):
            (low, high), (other_low, other_high) = self.of(term.left), self.of(term.right)
            return low - other_high, high - other_low
        if isinstance(term, Field):
            low, high = self._field(term)
            at = (slice(None), slice(None), None) if term.side == "query" else (slice(None), None)
            return low[at], high[at]
        raise TypeError(f"{type(term).__name__} is no term")

    def _single(self, value: int) -> Interval:
        bound = torch.tensor([[[value]]], device=self.tokens.device)
        return bound, bound

    def _field(self, term: Field) -> Interval:
        """[batch or 1, blocks]."""
        tile, length = self.tiles[term.side], self.lengths[term.side]
        place = self.places.get((term.side, term.name))
        if place is None:
            assert term.name == INDEX
            first = torch.arange(0, length, tile, device=self.tokens.device)[None]
            return first, (first + tile).clamp(max=length) - 1
        values = self.tokens.tensors[place]
        missing = self.blocks[term.side] * tile - length
        if missing:
            values = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
        blocked = values.view(values.shape[0], -1, tile)
        return blocked.amin(-1).long(), blocked.amax(-1).long()


def _decide(mask: Mask, bounds: _Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a block may hold a visible pair, and a hidden one; never wrongly no."""
    if isinstance(mask, Compare):
        return _compare(mask.op, bounds.of(mask.left), bounds.of(mask.right))
    if isinstance(mask, And | Or):
        (may, may_not), (other, other_not) = (
            _decide(side, bounds) for side in (mask.left, mask.right)
        )
        if isinstance(mask, And):
            return may & other, may_not | other_not
        return may | other, may_not & other_not
    raise TypeError(f"{type(mask).__name__} is no mask")


def _compare(op: Op, left: Interval, right: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    (low, high), (other_low, other_high) = left, right
    if op in (Op.EQ, Op.NE):
        equal = (low <= other_high) & (other_low <= high)
        unequal = ~((low == high) & (other_low == other_high) & (low == other_low))
        return (equal, unequal) if op is Op.EQ else (unequal, equal)
    if op in (Op.GT, Op.LE):
        greater, not_greater = high > other_low, low <= other_high
        return (greater, not_greater) if op is Op.GT else (not_greater, greater)
    less, not_less = low < other_high, high >= other_low
    return (less, not_less) if op is Op.LT else (not_less, less)


def _index_open(mask: Mask, bounds: _Bounds) -> torch.Tensor:
    """Blocks where a comparison of indices is true for some pairs and false for others."""
    if isinstance(mask, And | Or):
        return _index_open(mask.left, bounds) | _index_open(mask.right, bounds)
    may, may_not = _decide(mask, bounds)
    return may & may_not if reads_index(mask) else torch.zeros_like(may)
