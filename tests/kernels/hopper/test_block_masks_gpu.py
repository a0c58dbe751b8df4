"""Block masks in the Hopper kernel on a Hopper GPU: the oracle, exact counts, other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from blasst.kernels.block_lists import group_lists
from blasst.kernels.call import Call, check_call
from blasst.kernels.hopper import launch
from blasst.kernels.masks import bind, masked_attention, shared_prefix
from blasst.kernels.masks.routes import Options
from blasst.kernels.reference import run_reference
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry
from blasst.kernels.verify.subjects.masks import MASKS, block_mask, segments

pytest.importorskip("cutlass", reason="the Hopper kernel needs nvidia-cutlass-dsl")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

Make = Callable[..., Any]

GEOMETRY = Geometry(64, 128)
SEQLENS = ((300, 800), (70, 70), (0, 9), (1, 1), (5, 0), (129, 300))
HEADS = {"num_heads": 4, "num_kv_heads": 2}  # the oracle is slow where each head has its mask
TIE = 2e-3  # log2 units: a vote this near to lambda may go either way in float32


def checked(problem: Any, mask: BlockMask, causal: bool) -> Call:
    """The problem's call on the CPU."""
    kv = type(problem.kv)(*(t.cpu() for t in vars(problem.kv).values()))
    lambdas = None if problem.skip_lambda is None else problem.skip_lambda.cpu()
    spec = AttentionSpec(causal=causal, block_mask=mask, geometry=GEOMETRY)
    return check_call(problem.q.cpu(), kv, problem.cu_seqlens_q.cpu(), spec, lambdas, None, None)


def inputs_on_gpu(problem: Any, call: Call) -> launch.Inputs:
    """With lists made on the CPU; `out` is NaN."""
    tiles = launch.problem_config(call.problem).warpgroups
    lists = group_lists(call, tiles)
    counters = torch.zeros(problem.num_kv_heads, 2, dtype=torch.int64, device="cuda")
    made = launch.Inputs.of(call, torch.full_like(problem.q, torch.nan), counters)
    return replace(
        made,
        q=problem.q,
        kv=problem.kv,
        cu_seqlens_q=problem.cu_seqlens_q,
        skip_lambda=problem.skip_lambda,
        lists=type(lists)(*(t.cuda() for t in lists)),
    )


def check(problem: Any, mask: str, causal: bool = False) -> torch.Tensor:
    """Compares with the oracle; returns the counters."""
    heads = problem.q.shape[1]
    call = checked(problem, block_mask(mask, problem.seqlens, heads, GEOMETRY), causal)
    want = run_reference(call)
    inputs = inputs_on_gpu(problem, call)
    lse = launch.start(inputs)
    eps = 2 * torch.finfo(problem.q.dtype).eps
    torch.testing.assert_close(inputs.out.cpu().double(), want.out, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.cpu().double(), want.lse, rtol=1e-4, atol=1e-4)
    assert inputs.counters is not None
    counters = inputs.counters.cpu()
    if problem.skip_lambda is None:
        assert not counters.any()
        return counters
    expected = want.counts(problem.num_kv_heads)
    ties = sum(int((m.abs() < TIE).sum()) for m in want.margin)
    assert torch.equal(counters[:, 0], expected[:, 0])
    assert int((counters - expected).abs().sum()) <= ties
    return counters


@pytest.mark.parametrize("mask", MASKS)
def test_matches_the_oracle(make: Make, mask: str) -> None:
    skipped = int(check(make(SEQLENS, **HEADS), mask)[:, 1].sum())
    assert skipped > 0 or mask == "random blocks"
    check(make(SEQLENS, **HEADS), mask, causal=True)
    check(make(SEQLENS, vote=False, **HEADS), mask)


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_pages(make: Make, page_size: int) -> None:
    for mask in ("strip_history_thinking", "random blocks", "blind tiles"):
        check(make(SEQLENS, page_size=page_size, **HEADS), mask)


@pytest.mark.parametrize("page_size", [None, 16])
def test_narrow_heads(make: Make, page_size: int | None) -> None:
    for mask in ("strip_history_thinking", "random blocks", "blind tiles"):
        check(make(SEQLENS, page_size=page_size, head_dim=64, **HEADS), mask)


def test_many_layouts_are_one_kernel(make: Make) -> None:
    from blasst.kernels.hopper.compile import compile_prefill

    check(make(SEQLENS, **HEADS), "document")
    compiled = compile_prefill.cache_info().misses
    for seed in range(16):
        seqlens = ((24 * seed + 3, 40 * seed + 90), (100, 333 + seed))
        check(make(seqlens, seed=seed, **HEADS), MASKS[seed % len(MASKS)])
    assert compile_prefill.cache_info().misses == compiled


def test_launches_in_a_row_equal_isolated_ones(make: Make) -> None:
    problems = [make(((500 + 64 * i, 1500),), seed=i) for i in range(4)]
    names = [MASKS[i] for i in (0, 1, 5, 7)]
    calls = [
        inputs_on_gpu(p, checked(p, block_mask(name, p.seqlens, 8, GEOMETRY), False))
        for p, name in zip(problems, names, strict=True)
    ]
    alone = []
    for call in calls:
        launch.start(call)
        torch.cuda.synchronize()
        alone.append(call.out.clone())
    outs = [replace(calls[i % 4], out=torch.empty_like(calls[i % 4].out)) for i in range(400)]
    for call in outs:
        launch.start(call)
    torch.cuda.synchronize()
    assert all(torch.equal(call.out, alone[i % 4]) for i, call in enumerate(outs))


def test_one_call_from_mask_to_output() -> None:
    """masked_attention on the route "blasst", and again under a graph: lists are there by then."""
    tokens = 1500
    mask = bind(shared_prefix(), segments([tokens]), "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, generator=generator, device="cuda").bfloat16()
        for heads in (8, 2, 2)
    )
    counters = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    ours = masked_attention(q, k, v, mask, impl="blasst")
    kept_all = masked_attention(q, k, v, mask, options=Options(skip_lambda=0.0, counters=counters))
    divided = masked_attention(
        q, k, v, mask, impl="blasst", options=Options(geometry=Geometry(128, 128))
    )
    eager = masked_attention(q.float(), k.float(), v.float(), mask, impl="eager")
    torch.testing.assert_close(ours.float(), eager, rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(kept_all.float(), eager, rtol=2e-2, atol=4e-3)
    assert torch.equal(divided, ours)
    visited = 8 * mask.lists(GEOMETRY).visited_blocks
    assert counters.sum(0).tolist() == [visited, 0]


def test_replay_in_a_graph(make: Make) -> None:
    problem = make(((500, 2000),), page_size=64)
    call = checked(problem, block_mask("document", problem.seqlens, 8, GEOMETRY), True)
    inputs = inputs_on_gpu(problem, call)
    launch.start(inputs)
    first = inputs.out.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.start(inputs)
    inputs.out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(inputs.out, first)
