"""The CPU implementation against the oracle: out, lse, exact skip counts, and work left undone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.api import prefill_attention
from blasst.kernels.reference import ReferenceResult, reference_attention
from blasst.kernels.testing import (
    block_mask_from,
    cumulative,
    dialled_inputs,
    error_budget,
    paged,
)
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, RaggedKV

RAGGED = [(300, 300), (1, 513), (0, 40), (257, 1300), (50, 0), (40, 20)]
LAMBDAS = torch.tensor([0.05, 0.3, 0.5, 0.2, 0.9, 0.7], dtype=torch.float64)


Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_last: dict[bytes, ReferenceResult] = {}


def _oracle(
    q: torch.Tensor,
    kv: RaggedKV,
    cu: torch.Tensor,
    *,
    spec: AttentionSpec | None = None,
    skip_lambda: torch.Tensor | None = None,
) -> ReferenceResult:
    """The oracle is slow: what one implementation was compared with is kept for the next."""
    spec = spec or AttentionSpec()
    mask = spec.block_mask
    lists = (mask.partial_indices, mask.full_indices) if mask is not None else ()
    key = hashlib.sha256(repr((spec.causal, spec.geometry)).encode())
    for t in (q, kv.k, kv.v, kv.cu_seqlens_k, cu, skip_lambda, *lists):
        key.update(b"" if t is None else t.contiguous().view(torch.uint8).numpy().tobytes())
    if key.digest() not in _last:
        while len(_last) > 1:
            _last.pop(next(iter(_last)))
        _last[key.digest()] = reference_attention(q, kv, cu, spec=spec, skip_lambda=skip_lambda)
    return _last[key.digest()]


def _ragged(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, RaggedKV, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (sum(pair[i] for pair in RAGGED) for i in (0, 1))
    q = 5 * torch.randn(queries, heads[0], head_dim, generator=generator)
    k = torch.randn(keys, heads[1], head_dim, generator=generator)
    v = torch.randn(keys, heads[1], head_dim, generator=generator)
    kv = RaggedKV(k.to(dtype), v.to(dtype), cumulative([pair[1] for pair in RAGGED]))
    return q.to(dtype), kv, cumulative([pair[0] for pair in RAGGED])


def _agrees(
    result: tuple[torch.Tensor, torch.Tensor], expected: ReferenceResult, budget: float
) -> None:
    out, lse = result
    assert float((out.double() - expected.out).abs().max()) <= budget
    visible = expected.lse > -math.inf
    assert torch.equal(lse > -math.inf, visible)
    torch.testing.assert_close(lse[visible].double(), expected.lse[visible], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((2, 2), 128), ((4, 1), 64)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("vote", [True, False])
def test_ragged_batches(
    attend: Attend,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    causal: bool,
    vote: bool,
) -> None:
    q, kv, cu = _ragged(heads, head_dim, dtype)
    spec = AttentionSpec(causal=causal)
    skip_lambda = LAMBDAS if vote else None
    counters = torch.zeros(heads[1], 2, dtype=torch.int64)
    expected = _oracle(q, kv, cu, spec=spec, skip_lambda=skip_lambda)
    result = attend(q, kv, cu, spec=spec, skip_lambda=skip_lambda, counters=counters)
    _agrees(result, expected, error_budget(q, kv, cu, causal=causal))
    if vote:
        assert expected.smallest_margin > 1e-4
        assert torch.equal(counters, expected.counts(heads[1]))
        assert counters[:, 1].sum() > 0
    else:
        assert counters.sum() == 0


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("transposed_keys", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_pages_give_the_bits_of_contiguous_keys(
    attend: Attend, page_size: int, transposed_keys: bool, poison: float
) -> None:
    q, kv, cu = _ragged((4, 2), 64)
    pages = paged(kv, page_size, transposed_keys=transposed_keys, poison=poison)
    assert not pages.k.isfinite().all()
    out, lse = attend(q, kv, cu, skip_lambda=LAMBDAS)
    paged_out, paged_lse = attend(q, pages, cu, skip_lambda=LAMBDAS)
    assert torch.equal(out, paged_out)
    assert torch.equal(lse, paged_lse)


@pytest.mark.parametrize("skip_rate", [0.0, 0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("context", [0, 700])
@pytest.mark.parametrize("causal", [True, False])
def test_dialled_rates_are_counted_exactly(
    attend: Attend, skip_rate: float, context: int, causal: bool
) -> None:
    d = dialled_inputs(
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        seqlen=1500,
        context=context,
        causal=causal,
        skip_rate=skip_rate,
    )
    counters = torch.full((2, 2), 7, dtype=torch.int64)
    spec = AttentionSpec(causal=causal)
    result = attend(
        d.q, d.kv, d.cu_seqlens_q, spec=spec, skip_lambda=d.skip_lambda, counters=counters
    )
    assert torch.equal(counters - 7, d.counts(3))
    assert (d.counts(3)[:, 1].sum() > 0) == (skip_rate > 0)
    expected = _oracle(d.q, d.kv, d.cu_seqlens_q, spec=spec, skip_lambda=d.skip_lambda)
    # The levels reach hundreds in log2 units, where float32 scores are good to about 1e-4.
    _agrees(result, expected, 5e-4)


def test_the_skip_map_tile_by_tile(attend: Attend) -> None:
    """One call a tile of query rows and kv head: counts become a map, compared with the oracle."""
    q, kv, cu = _ragged((2, 2), 64, seed=1)
    expected = _oracle(q, kv, cu, skip_lambda=LAMBDAS)
    start, (queries, keys) = sum(pair[0] for pair in RAGGED[:3]), RAGGED[3]
    k_start = sum(pair[1] for pair in RAGGED[:3])
    assert expected.skipped[3].sum() > 0
    for m in range(-(-queries // 128)):
        stop = min((m + 1) * 128, queries)
        reach = keys - queries + stop
        span = slice(k_start, k_start + reach)
        counters = torch.zeros(2, 2, dtype=torch.int64)
        attend(
            q[start + m * 128 : start + stop],
            RaggedKV(kv.k[span], kv.v[span], cumulative([reach])),
            cumulative([stop - m * 128]),
            skip_lambda=LAMBDAS[3:4],
            counters=counters,
        )
        assert torch.equal(counters[:, 1], expected.skipped[3][:, m].sum(-1))
        assert torch.equal(counters[:, 0], expected.visited[3][:, m].sum(-1))


@pytest.mark.parametrize("vote", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1000.0])
def test_scores_of_any_size_are_exact_and_counted_once(
    attend: Attend, size: float, vote: bool
) -> None:
    # Above a size, exp2 of a score without its maximum would overflow or vanish.
    torch.manual_seed(5)
    q, kv, cu = _ragged((6, 2), 64)
    q *= size
    if size == 1000.0:
        q[:, 0] = -q[:, 0].abs()
        kv.k[..., 0, :] = kv.k[..., 0, :].abs()  # every score of head 0 is far below 0
    lam = torch.full((6,), 0.4) if vote else None
    counters = torch.zeros(2, 2, dtype=torch.int64)
    out, lse = attend(q, kv, cu, skip_lambda=lam, counters=counters)
    expected = _oracle(q, kv, cu, skip_lambda=lam)
    seen = expected.lse.isfinite()
    assert out.isfinite().all()
    assert torch.equal(lse.isfinite(), seen)
    assert float((out - expected.out).abs().max()) <= 1e-3 * float(kv.v.abs().max())
    # float32 dot products of this size are off by this much.
    atol = 1e-5 * max(1.0, size)
    torch.testing.assert_close(lse[seen], expected.lse[seen].float(), rtol=2e-6, atol=atol)
    if vote:
        assert torch.equal(counters, expected.counts(2))
        assert counters[:, 1].min() > 0 or size < 1.0


def test_lambda_zero_is_dense_bit_for_bit(attend: Attend) -> None:
    q, kv, cu = _ragged((6, 2), 64)
    counters = torch.zeros(2, 2, dtype=torch.int64)
    out, lse = attend(q, kv, cu, skip_lambda=torch.zeros(6), counters=counters)
    dense, dense_lse = attend(q, kv, cu)
    assert torch.equal(out, dense)
    assert torch.equal(lse, dense_lse)
    assert torch.equal(counters, _oracle(q, kv, cu).counts(2))


def test_a_vote_that_never_succeeds_is_within_rounding_of_dense(attend: Attend) -> None:
    q, kv, cu = _ragged((6, 2), 64)
    out, _ = attend(q, kv, cu, skip_lambda=torch.full((6,), 2.0**-126))
    dense, _ = attend(q, kv, cu)
    assert float((out - dense).abs().max()) <= error_budget(q, kv, cu, causal=True)


def test_requests_do_not_see_each_others_lambda(attend: Attend) -> None:
    q, kv, cu = _ragged((4, 2), 64)
    mixed = torch.tensor([0.0, 0.3, 0.5, 0.9, 0.0, 0.0])
    together, _ = attend(q, kv, cu, skip_lambda=mixed)
    ends, k_ends = cu.tolist(), kv.cu_seqlens_k.tolist()
    for i, (queries, keys) in enumerate(RAGGED):
        rows, span = slice(ends[i], ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        alone, _ = attend(
            q[rows],
            RaggedKV(kv.k[span], kv.v[span], cumulative([keys])),
            cumulative([queries]),
            skip_lambda=mixed[i : i + 1],
        )
        assert torch.equal(together[rows], alone)
    dense, _ = attend(q, kv, cu)
    assert torch.equal(together[:300], dense[:300])
    assert not torch.equal(together, dense)


def _documents(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q // 300 == k // 300) & (k <= q)


def _shared_prefix(
    b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return ((k < 200) | ((q // 256 == k // 256) & (h != 1))) & (k <= q)


@pytest.mark.parametrize("mod", [_documents, _shared_prefix])
@pytest.mark.parametrize("vote", [True, False])
def test_block_masks(attend: Attend, mod: Callable[..., torch.Tensor], vote: bool) -> None:
    seqlens = [(900, 900), (200, 700)]
    generator = torch.Generator().manual_seed(4)
    q = 5 * torch.randn(1100, 4, 64, generator=generator)
    k, v = (torch.randn(1600, 2, 64, generator=generator) for _ in range(2))
    kv, cu = RaggedKV(k, v, cumulative([900, 700])), cumulative([900, 200])
    spec = AttentionSpec(block_mask=block_mask_from(mod, seqlens=seqlens, num_heads=4))
    skip_lambda = torch.tensor([0.6, 0.5]) if vote else None
    counters = torch.zeros(2, 2, dtype=torch.int64)
    expected = _oracle(q, kv, cu, spec=spec, skip_lambda=skip_lambda)
    result = attend(q, kv, cu, spec=spec, skip_lambda=skip_lambda, counters=counters)
    _agrees(result, expected, error_budget(q, kv, cu, causal=True))
    if vote:
        assert torch.equal(counters, expected.counts(2))
        assert counters[:, 1].sum() > 0
        assert counters[:, 0].sum() < _oracle(q, kv, cu).counts(2)[:, 0].sum()


@pytest.mark.parametrize("tile", [(64, 128), (128, 64), (8, 4), (256, 256)])
def test_other_geometries(attend: Attend, tile: tuple[int, int]) -> None:
    q, kv, cu = _ragged((4, 2), 64)
    spec = AttentionSpec(geometry=Geometry(*tile))
    counters = torch.zeros(2, 2, dtype=torch.int64)
    expected = _oracle(q, kv, cu, spec=spec, skip_lambda=LAMBDAS)
    result = attend(q, kv, cu, spec=spec, skip_lambda=LAMBDAS, counters=counters)
    _agrees(result, expected, error_budget(q, kv, cu, causal=True))
    assert torch.equal(counters, expected.counts(2))
    assert counters[:, 1].sum() > 0


def test_out_is_filled_in_place_and_any_strides_are_read(attend: Attend) -> None:
    q, kv, cu = _ragged((4, 2), 64)
    expected, _ = attend(q, kv, cu, skip_lambda=LAMBDAS)
    wide_q = torch.zeros(q.shape[0], 4, 128)[..., ::2]
    wide_q.copy_(q)
    k = kv.k.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    out = torch.full((4, q.shape[0], 64), math.nan).transpose(0, 1)
    returned, _ = attend(
        wide_q, RaggedKV(k, kv.v, kv.cu_seqlens_k), cu, skip_lambda=LAMBDAS, out=out
    )
    assert returned is out
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_counts_give_the_same_bits(attend: Attend, threads: int) -> None:
    q, kv, cu = _ragged((4, 2), 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, _ = attend(q, kv, cu, skip_lambda=LAMBDAS)
        torch.set_num_threads(threads)
        out, _ = attend(q, kv, cu, skip_lambda=LAMBDAS)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inside_inference_mode(attend: Attend, mode: Callable[[], torch.no_grad]) -> None:
    with mode():
        q, kv, cu = _ragged((4, 2), 64)
        out = torch.empty_like(q)
        counters = torch.zeros(2, 2, dtype=torch.int64)
        attend(q, kv, cu, skip_lambda=LAMBDAS, out=out, counters=counters)
    assert out.isfinite().all()
    assert counters.sum() > 0


def test_an_empty_batch(attend: Attend) -> None:
    q, kv = torch.zeros(0, 4, 64), RaggedKV(*(torch.zeros(0, 2, 64),) * 2, cumulative([]))
    out, lse = attend(q, kv, cumulative([]), skip_lambda=torch.zeros(0))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)
    pages = PagedKV(
        torch.zeros(0, 16, 2, 64),
        torch.zeros(0, 16, 2, 64),
        torch.zeros(0, 4).int(),
        torch.zeros(0).int(),
    )
    assert attend(q, pages, cumulative([]))[0].shape == (0, 4, 64)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), max_size=4),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.tuples(st.sampled_from([4, 16, 32]), st.sampled_from([4, 8, 32])),
    st.booleans(),
    st.sampled_from([None, 3, 16]),
    st.integers(0, 1000),
)
def test_small_random_batches(
    cpu_impls: list[str],
    seqlens: list[tuple[int, int]],
    heads: tuple[int, int],
    tile: tuple[int, int],
    causal: bool,
    page_size: int | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (sum(pair[i] for pair in seqlens) for i in (0, 1))
    q = 4 * torch.randn(queries, heads[0], 64, generator=generator)
    k, v = (torch.randn(keys, heads[1], 64, generator=generator) for _ in range(2))
    kv = RaggedKV(k, v, cumulative([pair[1] for pair in seqlens]))
    cu = cumulative([pair[0] for pair in seqlens])
    spec = AttentionSpec(causal=causal, geometry=Geometry(*tile))
    skip_lambda = torch.rand(len(seqlens), generator=generator)
    expected = _oracle(q, kv, cu, spec=spec, skip_lambda=skip_lambda)
    if expected.smallest_margin < 1e-4:
        return
    read = kv if page_size is None else paged(kv, page_size)
    for impl in cpu_impls:
        counters = torch.zeros(heads[1], 2, dtype=torch.int64)
        result = prefill_attention(
            q, read, cu, spec=spec, skip_lambda=skip_lambda, counters=counters, impl=impl
        )
        assert torch.equal(counters, expected.counts(heads[1]))
        if queries:
            _agrees(result, expected, error_budget(q, kv, cu, causal=causal) + _rounding(q, kv))


def _rounding(q: torch.Tensor, kv: RaggedKV) -> float:
    """So few values that plain softmax may be exact by luck, and then its error is no budget.

    A float32 score s, in log2 units, is off by eps * |s| / 2 or more, its weight by ln 2 of that,
    and an output by twice as much of the largest value.
    """
    if not kv.v.numel():
        return 0.0
    group = q.shape[1] // kv.k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, kv.k.repeat_interleave(group, 1))
    largest = float(scores.abs().max()) * q.shape[2] ** -0.5  # ln 2 of it in log2 units
    return torch.finfo(torch.float32).eps * largest * float(kv.v.abs().max())
