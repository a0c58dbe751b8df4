"""The Triton kernel against the oracle: exact skip counts, out and lse within rounding."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from blasst.kernels.call import check_call
from blasst.kernels.reference import run_reference
from blasst.kernels.triton.config import SHARED_MEMORY, Config, config_for, own_geometry
from blasst.kernels.triton.launch import boxes_of, run
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, RaggedKV

pytest.importorskip("triton", reason="the Triton kernel needs triton")
# A row that has seen nothing subtracts -inf from -inf, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

Make = Callable[..., tuple[Any, Any]]


def check(
    inputs: Any, case: Any, kv: PagedKV | RaggedKV, causal: bool,
    skip_lambda: torch.Tensor | None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """Runs the kernel on poisoned outputs, compares with the oracle, returns the counters."""
    spec = AttentionSpec(causal=causal, geometry=case.geometry)
    call = check_call(inputs.q, kv, inputs.cu_seqlens_q, spec, skip_lambda, None, None)
    want = run_reference(call)
    assert want.smallest_margin > 1e-3, "the inputs hold a tie"
    out = torch.full_like(inputs.q, torch.nan)
    counters = torch.zeros(case.num_kv_heads, 2, dtype=torch.int64, device=inputs.q.device)
    lse = run(call, out, counters, config)
    eps = 2 * torch.finfo(inputs.q.dtype).eps
    torch.testing.assert_close(out.double(), want.out, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)
    expected = want.counts(case.num_kv_heads) if skip_lambda is not None else 0 * counters
    torch.testing.assert_close(counters, expected)
    return counters


CASES = {
    "ragged batch with context, an empty request": {
        "seqlens_q": (100, 1, 0, 130),
        "seqlens_k": (164, 70, 0, 130),
    },
    "more queries than keys": {"seqlens_q": (90, 3), "seqlens_k": (40, 0), "low": 0.0},
    "head_dim 128, one kv head": {
        "seqlens_q": (70,),
        "seqlens_k": (201,),
        "head_dim": 128,
        "num_heads": 2,
        "num_kv_heads": 1,
    },
    "bfloat16": {"seqlens_q": (200,), "seqlens_k": (500,), "dtype": torch.bfloat16},
    "tiles of 32 x 64": {
        "seqlens_q": (65,),
        "seqlens_k": (257,),
        "geometry": Geometry(32, 64),
    },
}
LAMBDAS = (0.1, 0.5, 0.02, 0.3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(
    make_case: Make, name: str, page_size: int | None, causal: bool
) -> None:
    case, inputs = make_case(**CASES[name])
    if case.dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    kv: PagedKV | RaggedKV = inputs.paged(page_size) if page_size else inputs.ragged
    skip_lambda = torch.tensor(LAMBDAS[: len(case.seqlens_q)], device=inputs.q.device)
    check(inputs, case, kv, causal, None)
    counters = check(inputs, case, kv, causal, skip_lambda)
    assert (counters[:, 1].sum() > 0) == (case.low > 0)


CONFIGS = {
    "values on demand": Config(4, 1, False),
    "values on demand after skips": Config(4, 2, True, demand_stages=2, chunk=4),
    "by the copy engine": Config(4, 2, True, demand_stages=3, chunk=8, boxes=True),
}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_gives_the_same(make_case: Make, name: str, page_size: int | None) -> None:
    """A prompt long enough for looks at the skips to change how values are fetched."""
    case, inputs = make_case(
        seqlens_q=(20, 3), seqlens_k=(700, 40), num_heads=2, num_kv_heads=1,
        geometry=Geometry(32, 32),
    )  # fmt: skip
    kv: PagedKV | RaggedKV = inputs.paged(page_size) if page_size else inputs.ragged
    skip_lambda = torch.tensor([0.05, 0.3], device=inputs.q.device)
    counters = check(inputs, case, kv, True, skip_lambda, CONFIGS[name])
    assert 0 < counters[:, 1].sum() < counters[:, 0].sum()
    check(inputs, case, kv, True, None, CONFIGS[name])


@pytest.mark.parametrize("low", [0.3, 0.9])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_ships_for_hopper(
    make_case: Make, head_dim: int, page_size: int | None, low: float
) -> None:
    """Two programs a multiprocessor, with looks often enough that values are fetched both ways;
    rows that do not exist, lambda 0 for one request. Interpreted all but the PTX of the vote."""
    paged = page_size is not None
    on_gpu = torch.cuda.is_available()
    case, inputs = make_case(
        seqlens_q=(135, 2), seqlens_k=(900, 200), head_dim=head_dim, num_heads=1, num_kv_heads=1,
        dtype=torch.bfloat16 if on_gpu else torch.float16, low=low,
        geometry=own_geometry(head_dim, (9, 0), paged=paged),
    )  # fmt: skip
    config = replace(
        config_for(case.geometry, head_dim, paged=paged, shared_memory=SHARED_MEMORY[9, 0]),
        chunk=4,
    )
    assert config.ballot
    if not on_gpu:
        config = replace(config, ballot=False)
    elif torch.cuda.get_device_capability(inputs.q.device) < (9, 0):
        pytest.skip("the copy engine and this vote need compute capability 9.0")
    kv: PagedKV | RaggedKV = inputs.paged(page_size) if page_size else inputs.ragged
    counters = check(inputs, case, kv, True, inputs.q.new_tensor([0.05, 0.0]).float(), config)
    assert 0 < counters[0, 1] < counters[0, 0]
    if on_gpu:
        check(inputs, case, kv, False, inputs.q.new_tensor([0.05, 0.3]).float(), config)
        check(inputs, case, kv, True, None, config)


def test_tensors_that_the_copy_engine_cannot_read_go_by_pointers(make_case: Make) -> None:
    case, inputs = make_case(seqlens_q=(70,), seqlens_k=(200,))
    assert None not in boxes_of(inputs.ragged, 64)
    wide = inputs.k.new_zeros(200, case.num_kv_heads, case.head_dim + 4)
    wide[..., : case.head_dim] = inputs.k
    kv = RaggedKV(wide[..., : case.head_dim], inputs.v, inputs.cu_seqlens_k)
    assert boxes_of(kv, 64) == boxes_of(inputs.paged(16), 64) == (None, None)
    skip_lambda = torch.tensor([0.3], device=inputs.q.device)
    config = CONFIGS["by the copy engine"]
    assert check(inputs, case, kv, True, skip_lambda, config)[:, 1].sum() > 0


def test_lambda_is_read_per_request_and_zero_skips_nothing(make_case: Make) -> None:
    case, inputs = make_case(seqlens_q=(64, 64), seqlens_k=(320, 320), low=0.9)
    both, first, none = (
        check(inputs, case, inputs.ragged, True, inputs.q.new_tensor(lambdas).float())
        for lambdas in ([0.5, 0.5], [0.5, 0.0], [0.0, 0.0])
    )
    assert both[:, 1].sum() > first[:, 1].sum() > none[:, 1].sum() == 0


def test_strided_inputs_and_outputs(make_case: Make) -> None:
    """vLLM hands over views: q of a fused projection, a cache with heads before rows."""
    case, inputs = make_case(seqlens_q=(70,), seqlens_k=(200,))
    paged = inputs.paged(16)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (paged.k, paged.v))
    fused = torch.cat([inputs.q, inputs.q], dim=1)[:, : case.num_heads]
    assert not k.is_contiguous()
    assert not fused.is_contiguous()
    strided = type(inputs)(fused, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    kv = PagedKV(k, v, paged.page_table, paged.seqlens_k)
    skip_lambda = torch.tensor([0.3], device=fused.device)
    assert check(strided, case, kv, True, skip_lambda)[:, 1].sum() > 0


@pytest.mark.parametrize("skip_lambda", [None, 0.0, 0.5])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k"])
def test_rows_that_see_nan_or_infinity_and_no_others_are_not_finite(
    make_case: Make, where: str, value: float, skip_lambda: float | None
) -> None:
    case, inputs = make_case(
        seqlens_q=(60,), seqlens_k=(60,), low=0.0, num_heads=1, num_kv_heads=1,
        geometry=Geometry(32, 32),
    )  # fmt: skip
    bad = 21
    {"q": inputs.q, "k": inputs.k}[where][bad, 0, 0] = value
    out = torch.zeros_like(inputs.q)
    lambdas = None if skip_lambda is None else inputs.q.new_tensor([skip_lambda]).float()
    spec = AttentionSpec(geometry=case.geometry)
    lse = run(
        check_call(inputs.q, inputs.ragged, inputs.cu_seqlens_q, spec, lambdas, None, None),
        out,
        None,
    )
    rows = torch.arange(60, device=out.device)
    seen = rows >= bad if where == "k" else rows == bad
    assert torch.equal(out.isfinite().all(-1)[:, 0], ~seen)
    assert torch.equal(lse[0].isfinite(), ~seen)


def test_heads_may_be_further_apart_than_32_bits_count(make_case: Make) -> None:
    """[heads, rows, head_dim] of a long batch: the last head begins 2 ** 31 elements on. The memory
    before it is there too, so that a wrong product reads zeros and not what is not ours."""
    case, near = make_case(seqlens_q=(4,), seqlens_k=(4,), num_heads=5, num_kv_heads=5)
    step, start = 1 << 29, 1 << 31
    elements = start + 5 * step
    if near.q.is_cuda:
        memory = torch.zeros(elements, dtype=near.q.dtype, device="cuda")
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux
        memory = torch.frombuffer(mmap.mmap(-1, 2 * elements, flags), dtype=near.q.dtype)
    far = [memory.as_strided((4, 5, 64), (64, step, 1), start + 1024 * i) for i in range(4)]
    for to, t in zip(far, (near.q, near.k, near.v), strict=False):
        to.copy_(t)
    spec, ends = AttentionSpec(geometry=case.geometry), near.cu_seqlens_q
    expected = torch.empty_like(near.q)
    run(check_call(near.q, near.ragged, ends, spec, None, None, None), expected, None)
    q, k, v, out = far
    run(check_call(q, RaggedKV(k, v, ends), ends, spec, None, None, None), out, None)
    assert torch.equal(out, expected)
