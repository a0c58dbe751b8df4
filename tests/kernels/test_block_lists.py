"""Block masks as the GPU kernels read them, against the masks themselves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from blasst.kernels import block_lists as module
from blasst.kernels import call as call_module
from blasst.kernels.api import prefill_attention
from blasst.kernels.block_lists import ALL, NONE, block_lists, group_lists
from blasst.kernels.call import Call, check_call
from blasst.kernels.native import build
from blasst.kernels.testing import block_mask_from, cumulative
from blasst.kernels.tiles import visited_blocks
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry, MaskMod, RaggedKV

GEOMETRY = Geometry(16, 32)
SEQLENS = ((70, 150), (0, 0), (40, 33))
HEADS = 2


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 50 == k // 50) | (k < 20)


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q + k + h) % 3 != 0) & (k // 32 != h % 3)


def make_call(
    mask: BlockMask, *, causal: bool, seqlens: tuple[tuple[int, int], ...] = SEQLENS
) -> Call:
    total_q, total_k = (sum(n) for n in zip(*seqlens, strict=True))
    kv = torch.zeros(total_k, 1, 64)
    return check_call(
        torch.zeros(total_q, HEADS, 64),
        RaggedKV(kv, kv, cumulative([k for _, k in seqlens])),
        cumulative([q for q, _ in seqlens]),
        AttentionSpec(causal=causal, block_mask=mask, geometry=GEOMETRY),
        None,
        None,
        None,
    )


def mask_of(mask_mod: MaskMod) -> BlockMask:
    return block_mask_from(mask_mod, seqlens=SEQLENS, num_heads=HEADS, geometry=GEOMETRY)


def shared(mask: BlockMask) -> BlockMask:
    """The lists of head 0 for all heads."""
    lists = {k: v[:, :1] for k, v in vars(mask).items() if k != "mask_mod"}
    return BlockMask(mask.mask_mod, **lists)


def seen_by(bits: torch.Tensor, code: int) -> torch.Tensor:
    """bool [tile_m, tile_n]."""
    if code == ALL:
        return torch.ones(GEOMETRY.tile_m, GEOMETRY.tile_n, dtype=torch.bool)
    words = bits[code, :, :, None] >> torch.arange(32)
    return (words & 1).bool().flatten(1)


def expected(call: Call, request: Any, head: int) -> torch.Tensor:
    """bool [seqlen_q, seqlen_k], of visited blocks."""
    query = torch.arange(request.seqlen_q)[:, None] + request.context
    key = torch.arange(request.seqlen_k)
    mask = call.spec.block_mask
    assert mask is not None
    seen = mask.mask_mod(torch.tensor(request.index), torch.tensor(head), query, key)
    return seen & (key <= query) if call.spec.causal else seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("mask_mod", "heads"), [(documents, 1), (by_head, HEADS)])
def test_lists_say_what_the_mask_says(mask_mod: MaskMod, heads: int, causal: bool) -> None:
    mask = mask_of(mask_mod)
    call = make_call(shared(mask) if heads == 1 else mask, causal=causal)
    lists, grouped = block_lists(call), group_lists(call, 2)
    assert lists.counts.shape[1] == lists.heads == heads
    for request in call.requests:
        visited = visited_blocks(call, request).expand(HEADS, -1, -1)
        for head in range(HEADS):
            got = torch.zeros(80, 160, dtype=torch.bool)
            for m in range(visited.shape[1]):
                at = request.index, head % heads, m
                count = int(lists.counts[at])
                order = lists.blocks[at][:count].tolist()
                assert order == visited[head, m].nonzero()[:, 0].flip(0).tolist()
                for n, code in zip(order, lists.tiles[at].tolist(), strict=False):
                    seen = seen_by(lists.bits, code)
                    got[m * 16 :, n * 32 :][:16, :32] = seen
                check_group(grouped, lists, at)
            want = expected(call, request, head)
            assert torch.equal(got[: want.shape[0], : want.shape[1]], want)
            assert not got[: want.shape[0], want.shape[1] :].any()


def check_group(grouped: Any, lists: Any, at: tuple[int, int, int]) -> None:
    """The tile's visits in its thread block's are its own, in the same order with the same bits."""
    request, head, m = at
    row, tile = request, m % 2
    span = grouped.spans[row, head, m // 2]
    visits, first, own = int(span[0]), int(span[1 + 2 * tile]), int(span[2 + 2 * tile])
    codes = grouped.codes[row, head, m // 2, :visits, tile]
    mine = (codes != NONE).nonzero()[:, 0]
    count = int(lists.counts[at])
    assert own == mine.numel() == count
    assert not count or first == int(mine[0])
    assert torch.equal(codes[mine], lists.tiles[at][:count])
    blocks = grouped.blocks[row, head, m // 2]
    assert torch.equal(blocks[:visits][mine], lists.blocks[at][:count])
    assert (blocks[:visits].diff() < 0).all()


def test_there_is_always_a_block_of_bits() -> None:
    """Kernels read the first one's where they need none, without a branch."""
    seqlens = ((32, 64),)
    everything = block_mask_from(
        lambda b, h, q, k: (q >= 0) & (k >= 0), seqlens=seqlens, num_heads=1, geometry=GEOMETRY
    )
    call = make_call(everything, causal=False, seqlens=seqlens)
    for bits in (block_lists(call).bits, group_lists(call, 2, rows=8).bits):
        assert bits.shape[0] >= 1
        assert bits.data_ptr() != 0


@pytest.mark.parametrize("mask_mod", [documents, by_head])
def test_lists_of_larger_tiles_are_divided(mask_mod: MaskMod) -> None:
    """The same bits, and every visit of a tile for each of its parts."""
    call = make_call(mask_of(mask_mod), causal=True)
    whole, parts = group_lists(call, 1), group_lists(call, 2, rows=GEOMETRY.tile_m // 2)
    assert torch.equal(parts.spans[..., 0], whole.spans[..., 0])
    for at in (whole.codes[..., 0] != NONE).nonzero().tolist():
        code, halves = int(whole.codes[(*at, 0)]), parts.codes[tuple(at)].tolist()
        assert parts.blocks[tuple(at)] == whole.blocks[tuple(at)]
        if code == ALL:
            assert halves == [ALL, ALL]
        else:
            assert torch.equal(torch.cat([parts.bits[h] for h in halves]), whole.bits[code])


def test_one_list_for_all_heads_with_a_mask_of_each() -> None:
    every = torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5).contiguous()
    counts = torch.full((1, 1, 5), 5, dtype=torch.int32)
    none = torch.zeros_like(counts)
    mask = BlockMask(by_head, counts, every, none, every)
    assert block_lists(make_call(mask, causal=True)).heads == HEADS
    mask = BlockMask(documents, counts, every, none, every)
    assert block_lists(make_call(mask, causal=True)).heads == 1


def test_lists_are_made_once_for_a_mask_and_its_lengths() -> None:
    asked = 0

    def counting(b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal asked
        asked += 1
        return documents(b, h, q, k)

    mask = BlockMask(counting, *list(vars(mask_of(documents)).values())[1:])
    first = block_lists(make_call(mask, causal=True))
    made = asked
    assert block_lists(make_call(mask, causal=True)).bits is first.bits
    group_lists(make_call(mask, causal=True), 2)
    assert asked == made
    block_lists(make_call(mask, causal=False))
    assert asked > made
    made = asked
    block_lists(make_call(mask, causal=True, seqlens=((70, 150), (0, 0), (39, 33))))
    assert asked > made


def test_the_numbers_in_the_lists_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[BlockMask] = []
    monkeypatch.setattr(call_module, "_list_value_reasons", lambda mask: read.append(mask) or ())
    mask = mask_of(documents)
    for _ in range(3):
        make_call(mask, causal=True)
    assert read == [mask]


def test_lists_go_with_their_mask_and_are_bounded() -> None:
    mask = mask_of(documents)
    for rows in range(1, 30):
        block_lists(make_call(mask, causal=True, seqlens=((rows, 150), (0, 0), (1, 33))))
    assert len(module._HELD[mask]) == module.KEPT
    gone = weakref.ref(mask)
    held = len(module._HELD)
    del mask
    gc.collect()
    assert gone() is None
    assert len(module._HELD) < held


DOCUMENTS = torch.arange(150) // 50


def reads(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask that reads a tensor of the request's own tokens: it has nothing beyond them."""
    return DOCUMENTS[q] == DOCUMENTS[k]


def test_a_mask_is_not_asked_beyond_the_ends() -> None:
    seqlens = ((70, 150),)
    mask = block_mask_from(reads, seqlens=seqlens, num_heads=HEADS, geometry=GEOMETRY)
    lists = block_lists(make_call(mask, causal=False, seqlens=seqlens))
    assert int(lists.counts.sum()) > 0


@pytest.mark.parametrize("impl", ["reference", "cpu", "cpu-torch"])
def test_no_implementation_asks_a_mask_beyond_the_ends(impl: str) -> None:
    if impl == "cpu" and (reasons := build.reasons()):
        pytest.skip("; ".join(reasons))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(150, n, 64, generator=generator) for n in (2, 1, 1))
    ends = cumulative([150])
    seqlens = ((150, 150),)
    mask = block_mask_from(reads, seqlens=seqlens, num_heads=1, geometry=GEOMETRY)
    spec = AttentionSpec(causal=False, block_mask=mask, geometry=GEOMETRY)
    out, _ = prefill_attention(q, RaggedKV(k, v, ends), ends, spec=spec, impl=impl)
    last = prefill_attention(
        q[100:],
        RaggedKV(k[100:], v[100:], cumulative([50])),
        cumulative([50]),
        spec=AttentionSpec(causal=False),
        impl="reference",
    )[0]
    torch.testing.assert_close(out[100:], last, rtol=0, atol=1e-5)
