"""The Hopper kernel on a Hopper GPU: the oracle, exact counts, order of launches, graphs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.hopper.launch import prefill
from blasst.kernels.testing import DialOptions, dialled_inputs
from blasst.kernels.types import Geometry, RaggedKV

pytest.importorskip("cutlass", reason="the Hopper kernel needs nvidia-cutlass-dsl")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

Make = Callable[..., Any]

SEQLENS = {
    "ragged, context, an empty request": ((100, 164), (1, 70), (0, 0), (130, 130)),
    "more queries than keys": ((90, 40), (3, 0), (5, 5)),
    "one row": ((1, 1),),
    "context": ((129, 1000), (64, 2000)),
    "whole tiles": ((1024, 8064),),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [None, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", SEQLENS)
def test_matches_the_oracle(make: Make, name: str, page_size: int | None, causal: bool) -> None:
    make(SEQLENS[name], page_size=page_size, causal=causal, vote=False).check()
    counters = make(SEQLENS[name], page_size=page_size, causal=causal).check()
    if name in ("context", "whole tiles"):
        assert counters[:, 1].sum() > 0


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("name", SEQLENS)
def test_narrow_heads_match_the_oracle(make: Make, name: str, page_size: int | None) -> None:
    make(SEQLENS[name], page_size=page_size, head_dim=64, vote=False).check()
    make(SEQLENS[name], page_size=page_size, head_dim=64).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (8, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shapes(
    make: Make, head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "dtype": dtype}
    call = make(((300, 3000), (77, 77)), head_dim=head_dim, page_size=16, **options)
    assert call.check()[:, 1].sum() > 0


PACKED = {
    "a group": {"num_heads": 8, "num_kv_heads": 2, "pack": 4},
    "half a group": {"num_heads": 8, "num_kv_heads": 2, "pack": 2},
    "one kv head": {"num_heads": 16, "num_kv_heads": 1, "pack": 16},
    "a position a tile": {"num_heads": 64, "num_kv_heads": 1, "pack": 64},
}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", PACKED)
def test_heads_of_a_group_as_rows_of_one_tile(make: Make, name: str, page_size: int | None) -> None:
    seqlens = ((40, 2000), (16, 3000), (0, 5), (1, 1), (130, 130), (9, 4))
    counters = make(seqlens, page_size=page_size, **PACKED[name]).check()
    assert counters[:, 1].sum() > 0
    make(seqlens, page_size=page_size, vote=False, **PACKED[name]).check()


@pytest.mark.parametrize("causal", [True, False])
def test_packed_heads_narrow_and_full(make: Make, causal: bool) -> None:
    seqlens = ((40, 2000), (200, 700), (3, 3))
    for page_size in (None, 32):
        make(seqlens, page_size=page_size, causal=causal, head_dim=64, pack=4).check()
        make(seqlens, page_size=page_size, causal=causal, pack=4).check()


def test_short_rows_are_packed_without_being_asked(make: Make) -> None:
    """Through the public call: the same outputs as of the oracle, bit for bit as when packed."""
    call = make(((16, 900),) * 64, vote=False)
    out, _ = prefill_attention(call.q, call.kv, call.cu_seqlens_q, impl="hopper")
    packed = dataclasses.replace(call, geometry=Geometry(64, 128, 4)).run()[0]
    assert torch.equal(out, packed)
    assert not torch.equal(out, call.run()[0])
    call.check()


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf])
@pytest.mark.parametrize("page_size", [16, 256])
def test_what_no_key_owns_is_never_used(make: Make, page_size: int, poison: float) -> None:
    """NaN is in the unused parts of all other tests."""
    for head_dim in (64, 128):
        make(SEQLENS["context"], page_size=page_size, poison=poison, head_dim=head_dim).check()


@pytest.mark.parametrize("n_blocks", [1, 2, 5, 8, 63, 127])
@pytest.mark.parametrize("skip_rate", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("missing", [0, 45])
def test_dialled_counts_are_exact(n_blocks: int, skip_rate: float, missing: int) -> None:
    """missing: rows and keys of the last block."""
    options = DialOptions(dtype=torch.bfloat16, geometry=Geometry(64, 128), seed=n_blocks)
    x = dialled_inputs(
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        seqlen=128 * n_blocks - missing,
        skip_rate=skip_rate,
        options=options,
    )
    q, out = x.q.cuda(), torch.empty_like(x.q, device="cuda")
    counters = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    prefill(
        q,
        RaggedKV(*(t.cuda() for t in vars(x.kv).values())),
        x.cu_seqlens_q.cuda(),
        out,
        max_seqlen_q=q.shape[0],
        softmax_scale=128**-0.5,
        causal=True,
        skip_lambda=x.skip_lambda.cuda(),
        counters=counters,
    )
    assert torch.equal(counters.cpu(), x.counts(2))
    assert (counters[:, 1].sum() > 0) == (skip_rate > 0 and n_blocks > 1)


def test_a_thousand_launches_equal_isolated_ones(make: Make) -> None:
    calls = [make(((200 + 8 * i, 700),), page_size=16, seed=i) for i in range(8)]
    alone = []
    for call in calls:
        alone.append(call.run()[0])
        torch.cuda.synchronize()
    together = [calls[i % 8].run()[0] for i in range(1000)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone[i % 8]) for i, out in enumerate(together))


def test_two_streams(make: Make) -> None:
    calls = [make(((1000, 3000),), seed=i) for i in range(2)]
    alone = [call.run()[0] for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(calls[i].run()[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone[i]) for i in range(2) for out in outs[i])


def test_graph_replays_with_lambda_changed_in_place(make: Make) -> None:
    call = make(((500, 2000),), page_size=64)
    call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, counters = call.run()
    skips = []
    for value in (0.0, 0.3, 0.9):
        call.skip_lambda.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        now = dataclasses.replace(call, skip_lambda=torch.tensor([value], device="cuda"))
        assert torch.equal(out, now.run()[0])
        skips.append(int(counters[:, 1].sum()))
    assert 0 == skips[0] < skips[1] < skips[2]


BAD_PAGE = """
import sys, torch
from blasst.kernels.hopper.launch import prefill
from blasst.kernels.types import PagedKV
page_size, number = int(sys.argv[1]), int(sys.argv[2])
def zeros(*shape, **given):
    return torch.zeros(*shape, **{"dtype": torch.bfloat16, "device": "cuda", **given})
cache, q = zeros(4, page_size, 1, 128), zeros(8, 2, 128)
table = torch.tensor([[1, number]], dtype=torch.int32, device="cuda")
keys = torch.tensor([page_size + 8], dtype=torch.int32, device="cuda")
ends = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
prefill(
    q, PagedKV(cache, cache, table, keys), ends, torch.empty_like(q), max_seqlen_q=8,
    softmax_scale=0.1, causal=True, skip_lambda=zeros(1, dtype=torch.float32), counters=None,
)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("number", [3, 4, 1 << 28, -1])
def test_a_page_that_the_cache_does_not_have_is_an_error(page_size: int, number: int) -> None:
    """TMA alone would bring zeros. In a process of its own: its device context is lost."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", BAD_PAGE, str(page_size), str(number)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == (["done"] if number == 3 else []), done.stderr[-2000:]
    assert ("illegal memory access" in done.stderr) == (number != 3)
