"""Masked attention over sequences that are split between processes, forward and backward.

Every rank binds the mask of the whole sequence; the shards' masks follow from its metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from blasst.kernels.errors import InvalidInputError, UnsupportedError
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.collectives import all_to_all, gather_sequence, rotate, touch
from blasst.kernels.masks.expr import INDEX
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.masks.routes import Lane, Options, attend
from blasst.kernels.types import Geometry

Order = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Parallel:
    """How a sequence is split. group: of torch.distributed, None = all ranks.

    order: which tokens a rank holds: "contiguous" = the rank-th part; "zigzag" = of 2 x ranks
    parts, one from each end, so that a causal triangle is halved evenly. lane, impl, options: as in
    masked_attention.
    """

    group: dist.ProcessGroup | None = None
    order: Order = "contiguous"
    lane: Lane = "throughput"
    impl: str = "auto"
    options: Options | None = None

    @property
    def shard(self) -> Shard:
        """The tokens of this process."""
        return Shard(dist.get_rank(self.group), self.ranks, self.order)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)


@dataclass(frozen=True)
class Shard:
    """The tokens that one rank holds."""

    rank: int
    ranks: int
    order: Order = "contiguous"

    def places(self, seqlen: int) -> torch.Tensor:
        """int64 [seqlen / ranks], on the CPU. Raises InvalidInputError."""
        parts = {"contiguous": self.ranks, "zigzag": 2 * self.ranks}.get(self.order)
        if parts is None:
            raise InvalidInputError([f'order {self.order!r} must be "contiguous" or "zigzag"'])
        if seqlen % parts:
            raise InvalidInputError(
                [
                    f"{seqlen} tokens do not split into {parts} equal parts ({self.order}, "
                    f"{self.ranks} ranks); give pack() a pad_to_multiple_of that {parts} divides"
                ]
            )
        chunks = torch.arange(seqlen).view(parts, -1)
        if self.order == "contiguous":
            return chunks[self.rank]
        return torch.cat([chunks[self.rank], chunks[parts - 1 - self.rank]])

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """This part of [batch, seqlen, ...]: input_ids, position_ids, q, ..."""
        return x.index_select(1, self.places(x.shape[1]).to(x.device))

    def others(self) -> list[Shard]:
        """All ranks' shards, in the order of ranks."""
        return [replace(self, rank=rank) for rank in range(self.ranks)]


def shard_mask(mask: AttentionMask, queries: Shard, keys: Shard | None = None) -> AttentionMask:
    """The mask between two shards; keys None = those of all ranks, joined in the order of ranks.

    Tokens keep the index that they have in the whole sequence. Kept with `mask`, like its lists.
    """
    if mask.explicit_index or mask.seqlen_q != mask.seqlen_k:
        raise InvalidInputError(["only the mask of a whole sequence can be split"])

    def make() -> AttentionMask:
        held = queries.others() if keys is None else [keys]
        places = (
            queries.places(mask.seqlen_q),
            torch.cat([shard.places(mask.seqlen_k) for shard in held]),
        )
        sides = []
        for fields, place in zip((mask.query, mask.key), places, strict=True):
            at = place.to(mask.device)
            index = at.int().expand(mask.batch, -1).contiguous()
            sides.append({**{n: t.index_select(1, at) for n, t in fields.items()}, INDEX: index})
        return AttentionMask(mask.mask, *sides)

    return mask.derived((queries, keys), make)


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, parallel: Parallel
) -> torch.Tensor:
    """Heads are split while attention runs: every rank sees the whole sequence for its heads.

    q: [batch, seqlen / ranks, num_heads, head_dim], contiguous shards; both head counts must be
    multiples of the number of ranks. Masks do not depend on heads, so `mask` is used as it is.
    """
    ranks = parallel.ranks
    reasons = [
        f"{name} {heads} is not a multiple of {ranks} ranks; use ring_attention"
        for name, heads in (("num_heads", q.shape[2]), ("num_kv_heads", k.shape[2]))
        if heads % ranks
    ]
    if parallel.order != "contiguous":
        reasons.append("ulysses_attention needs contiguous shards")
    if reasons:
        raise UnsupportedError(reasons)
    whole = [all_to_all(t, 2, 1, parallel.group) for t in (q, k, v)]
    out = _attend(whole, mask, parallel, want_lse=False)[0]
    return all_to_all(out, 1, 2, parallel.group)


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, parallel: Parallel
) -> torch.Tensor:
    """Every rank gathers all keys and values and computes its own queries.

    q, k, v: [batch, seqlen / ranks, heads, head_dim] in parallel.order. Simple, and the memory of
    one whole K and V; gradients of keys are summed over ranks.
    """
    _refuse_exact("gathered_attention", parallel)
    if parallel.order == "zigzag":
        _refuse_votes(
            "gathered_attention over zigzag shards visits keys in another order", parallel
        )
    part = shard_mask(mask, parallel.shard)
    keys, values = (gather_sequence(t, parallel.group) for t in (k, v))
    return _attend([q, keys, values], part, parallel, want_lse=False)[0]


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, parallel: Parallel
) -> torch.Tensor:
    """Keys and values travel round the ranks; partial results are merged by their lse.

    q, k, v: [batch, seqlen / ranks, heads, head_dim] in parallel.order. Steps whose blocks are all
    hidden are passed on uncomputed. For zigzag shards the metadata is permuted with the tokens.
    """
    _refuse_exact("ring_attention", parallel)
    _refuse_votes("ring_attention votes on the keys of one rank at a time", parallel)
    mine, ranks = parallel.shard, parallel.ranks
    travelling = torch.stack([k, v])
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    unseen: list[torch.Tensor] = []
    for step in range(ranks):
        part = shard_mask(mask, mine, replace(mine, rank=(mine.rank - step) % ranks))
        if part.lists(Geometry(), backward=False).visited_blocks:
            keys, values = travelling.unbind(0)
            out, lse = _attend([q, keys, values], part, parallel, want_lse=True)
            assert lse is not None
            parts.append((out, lse))
        else:
            unseen.append(travelling)
        if step < ranks - 1:
            travelling = rotate(travelling, parallel.group)
    merged = _merge(parts) if parts else torch.zeros_like(q)
    # Every rank must take part in every step of the backward ring, seen or not.
    return touch(merged, q, *unseen)


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    lse = torch.stack([lse for _, lse in parts])
    highest = lse.detach().amax(0)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(lse - highest)
    total = weights.sum(0)
    weights = weights / torch.where(total == 0, 1.0, total)
    merged = torch.zeros_like(parts[0][0], dtype=lse.dtype)
    for (out, _), weight in zip(parts, weights, strict=True):
        merged = merged + out * weight.transpose(1, 2)[..., None]
    return merged.to(parts[0][0].dtype)


def _attend(
    qkv: list[torch.Tensor], mask: AttentionMask, parallel: Parallel, *, want_lse: bool
) -> tuple[torch.Tensor, Any]:
    q, k, v = qkv
    x = Inputs(q, k, v, mask, q.shape[-1] ** -0.5, want_lse)
    return attend(x, lane=parallel.lane, impl=parallel.impl, options=parallel.options or Options())


def _refuse_votes(why: str, parallel: Parallel) -> None:
    if parallel.options is not None and parallel.options.skip_lambda is not None:
        raise UnsupportedError(
            [
                f"{why}: with a skip_lambda it would skip other blocks than the whole sequence; "
                "use ulysses_attention, or gathered_attention over contiguous shards"
            ]
        )


def _refuse_exact(name: str, parallel: Parallel) -> None:
    if parallel.lane == "exact":
        raise UnsupportedError(
            [
                f"{name} adds partial results of several ranks, and their number changes the bits; "
                'lane "exact" needs ulysses_attention or one rank'
            ]
        )
