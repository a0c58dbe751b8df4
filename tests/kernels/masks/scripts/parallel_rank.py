"""One rank of tests/kernels/masks/test_parallel.py: compares its shard with the whole sequence."""

import sys

import pytest
import torch
import torch.distributed as dist

from blasst.kernels.errors import InvalidInputError, UnsupportedError
from blasst.kernels.masks.bound import AttentionMask, bind
from blasst.kernels.masks.mods import (
    causal,
    document,
    padding,
    shared_prefix,
    strip_history_thinking,
)
from blasst.kernels.masks.parallel import (
    Order,
    Parallel,
    Shard,
    gathered_attention,
    ring_attention,
    shard_mask,
    ulysses_attention,
)
from blasst.kernels.masks.routes import Options, masked_attention
from blasst.kernels.masks.segments import Segments
from blasst.kernels.types import Geometry

SEQLEN = 256
VOTES = Options(skip_lambda=0.5)
WAYS = {
    ("ulysses", "contiguous"): ulysses_attention,
    ("gathered", "contiguous"): gathered_attention,
    ("gathered", "zigzag"): gathered_attention,
    ("ring", "contiguous"): ring_attention,
    ("ring", "zigzag"): ring_attention,
}


def segments(batch: int) -> Segments:
    generator = torch.Generator().manual_seed(3)

    def rising(high: int) -> torch.Tensor:
        return torch.randint(0, high, (batch, SEQLEN), generator=generator).sort(-1).values.int()

    documents = rising(3)
    documents[:, -20:] = -1
    role = (torch.arange(SEQLEN) // 23 % 3).int().expand(batch, -1).contiguous()
    return Segments(documents, rising(5), rising(6), role, rising(SEQLEN))


def check(mask: AttentionMask, way: tuple[str, str]) -> None:
    name, order = way
    shard = Parallel(order=order).shard
    generator = torch.Generator().manual_seed(5)
    whole = [
        torch.randn(mask.batch, SEQLEN, h, 8, generator=generator, dtype=torch.float64)
        for h in (8, 4, 4)
    ]
    weight = torch.randn(whole[0].shape, generator=generator, dtype=torch.float64)
    expected_in = [t.clone().requires_grad_() for t in whole]
    expected = masked_attention(*expected_in, mask)
    (expected * weight).sum().backward()

    mine = [shard.take(t).requires_grad_() for t in whole]
    out = WAYS[way](*mine, mask, Parallel(order=order))
    torch.testing.assert_close(out, shard.take(expected))
    (out * shard.take(weight)).sum().backward()
    for ours, theirs in zip(mine, expected_in, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, shard.take(theirs.grad))
    if shard.rank == 0:
        print(f"same: {name} {order}", flush=True)


def check_lists(mask: AttentionMask) -> None:
    """Contiguous shards on block borders: the shard's lists are rows of the whole's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    geometry = Geometry(SEQLEN // ranks, 16)
    part = shard_mask(mask, Shard(rank, ranks)).lists(geometry)
    whole = mask.lists(geometry)
    for ours, theirs in zip(part.by_query.listed(), whole.by_query.listed(), strict=True):
        assert torch.equal(ours, theirs[:, :, rank : rank + 1])


def check_votes() -> None:
    """With a threshold, shards that may vote skip what the whole sequence skips."""
    tokens, ranks = 1024, dist.get_world_size()
    ones = torch.zeros(1, tokens, dtype=torch.int32)
    layout = Segments((torch.arange(tokens)[None] // 700).int(), ones, ones, ones, ones)
    mask = bind(causal() & document(), layout)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, h, 64, generator=generator) for h in (8, 4, 4))
    q[..., 0] = 4.0
    level = torch.randn(1, tokens // 64, 4, generator=generator)
    k[..., 0] += 10 * level.repeat_interleave(64, 1)
    whole = torch.zeros(4, 2, dtype=torch.int64)
    expected = masked_attention(q, k, v, mask, options=Options(skip_lambda=0.5, counters=whole))
    assert 0 < whole[:, 1].sum() < whole[:, 0].sum()
    for attention, heads in ((ulysses_attention, 4 // ranks), (gathered_attention, 4)):
        mine = torch.zeros(heads, 2, dtype=torch.int64)
        parallel = Parallel(options=Options(skip_lambda=0.5, counters=mine))
        shard = parallel.shard
        out = attention(*(shard.take(t) for t in (q, k, v)), mask, parallel)
        torch.testing.assert_close(out, shard.take(expected), atol=1e-5, rtol=0)
        total = mine.sum(0)
        dist.all_reduce(total)
        assert total.tolist() == whole.sum(0).tolist()
    orders: tuple[Order, ...] = ("contiguous", "zigzag")
    for attention, order in [(ring_attention, o) for o in orders] + [
        (gathered_attention, "zigzag")
    ]:
        with pytest.raises(UnsupportedError, match="other blocks than the whole sequence"):
            attention(
                *(shard.take(t) for t in (q, k, v)), mask, Parallel(order=order, options=VOTES)
            )


def check_refusals(mask: AttentionMask) -> None:
    ranks = dist.get_world_size()
    q = torch.zeros(1, SEQLEN // ranks, 3, 8)
    for call, error in (
        (lambda: ulysses_attention(q, q, q, mask, Parallel()), UnsupportedError),
        (lambda: ring_attention(q, q, q, mask, Parallel(lane="exact")), UnsupportedError),
        (lambda: gathered_attention(q, q, q, mask, Parallel(lane="exact")), UnsupportedError),
        (lambda: Shard(0, ranks, "zigzag").places(SEQLEN + 1), InvalidInputError),
        (lambda: Shard(0, ranks, "striped").places(SEQLEN), InvalidInputError),
        (
            lambda: ulysses_attention(q, q, q, mask, Parallel(order="zigzag")),
            UnsupportedError,
        ),
    ):
        try:
            call()
        except error:
            continue
        raise AssertionError("not refused")


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    layout = segments(2)
    for mask in (
        shared_prefix() & document() & padding(),
        strip_history_thinking() & document() & padding(),
    ):
        bound = bind(mask, layout)
        for way in WAYS:
            check(bound, way)
        check_lists(bound)
    check_refusals(bind(shared_prefix(), layout))
    check_votes()
    dist.barrier()
    dist.destroy_process_group()


main()
