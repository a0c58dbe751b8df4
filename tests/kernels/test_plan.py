"""An engine's calls: equal to the checked ones, and without a look at any tensor's values."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.errors import InvalidInputError
from blasst.kernels.plan import check_batch, plan
from blasst.kernels.testing import dialled_inputs, paged
from blasst.kernels.types import AttentionSpec, Geometry, Impl, PagedKV, Problem

PROBLEM = Problem(head_dim=64, num_heads=4, num_kv_heads=2, dtype="float32", page_size=16)


@pytest.mark.parametrize("vote", [True, False])
@pytest.mark.parametrize("before", [0, 5])
def test_equals_the_checked_call(host_impl: str, vote: bool, before: int) -> None:
    x = dialled_inputs(num_heads=4, num_kv_heads=2, head_dim=64, seqlen=500, skip_rate=0.5)
    kv = paged(x.kv, 16)
    skip_lambda = x.skip_lambda if vote else None
    want = torch.zeros(2, 2, dtype=torch.int64)
    out, lse = prefill_attention(
        x.q, kv, x.cu_seqlens_q, skip_lambda=skip_lambda, impl=host_impl, counters=want
    )
    # Rows of other requests stand before ours, and one behind them.
    q = torch.full((before + 501, 4, 64), torch.nan)
    q[before:-1] = x.q
    found, counters = torch.full_like(q, 7.0), torch.zeros_like(want)
    ends = [before, before + 500]
    found_lse = plan(PROBLEM, host_impl, 64**-0.5).run(
        q,
        kv,
        torch.tensor(ends, dtype=torch.int32),
        check_batch(ends, [500], x.skip_lambda.tolist() if vote else None),
        skip_lambda=skip_lambda,
        out=found,
        counters=counters,
    )
    torch.testing.assert_close(found[before:-1], out, rtol=0, atol=1e-6)
    torch.testing.assert_close(found_lse[:, before:-1], lse, rtol=0, atol=1e-5)
    assert torch.equal(counters, want)
    assert (counters[:, 1].sum() > 0) == vote
    assert (found[:before] == 7.0).all()
    assert (found[-1] == 7.0).all()


def test_no_value_of_a_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(call: Any, out: torch.Tensor, counters: None) -> torch.Tensor:
        seen.append((call.geometry, call.requests, call.log2_lambda))
        return out

    monkeypatch.setattr("blasst.kernels.plan.implementation", lambda impl: run)
    meta = torch.empty(8, 4, 64, device="meta")
    pages = torch.empty(3, 16, 2, 64, device="meta")
    ints = torch.empty(2, dtype=torch.int32, device="meta")
    p = plan(replace(PROBLEM, dtype="bfloat16"), "hopper", 0.125)
    batch = check_batch([1, 8], [40], [0.25])
    p.run(
        meta, PagedKV(pages, pages, ints[None], ints[1:]), ints, batch,
        skip_lambda=ints[:1], out=meta, counters=None,
    )  # fmt: skip
    ((geometry, (request,), log2_lambda),) = seen
    assert geometry == p.geometry == Geometry(64, 128)
    assert (request.q_start, request.seqlen_q, request.seqlen_k) == (1, 7, 40)
    assert log2_lambda == (-2.0,)


def test_a_given_geometry_stays() -> None:
    other = Geometry(32, 64)
    assert plan(replace(PROBLEM, geometry=other), "triton", 1.0).spec.geometry == other
    assert plan(PROBLEM, "triton", 1.0).impl is Impl.TRITON


@pytest.mark.parametrize(
    ("ends", "seqlens_k", "lambdas", "words"),
    [
        ([0, 5], [5, 6], None, "2 ends for 2 requests"),
        ([], [], None, "0 ends"),
        ([0, 5, 4], [5, 6], None, "request 1 has -1 query rows"),
        ([0, 5], [4], None, "request 0 has 5 query rows and 4 keys"),
        ([0, 5], [5], [0.1, 0.2], "2 lambdas for 1 requests"),
        ([0, 5], [5], [1.0], "skip_lambda[0]: lambda 1 is outside"),
        ([0, 5], [5], [math.nan], "skip_lambda[0]: lambda nan"),
    ],
)
def test_a_bad_batch_is_refused(
    ends: list[int], seqlens_k: list[int], lambdas: list[float] | None, words: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_batch(ends, seqlens_k, lambdas)
    assert words in str(caught.value)


def test_lambda_0_is_minus_infinity_and_none_is_no_vote() -> None:
    assert check_batch([0, 3, 3], [3, 0], [0.0, 0.5]).log2_lambda == (-math.inf, -1.0)
    assert check_batch([0, 3], [3], None).log2_lambda is None
    ends = [0, 3, 7]
    batch = check_batch(ends, [9, 9], None)
    assert [r.seqlen_q for r in batch.requests] == [b - a for a, b in pairwise(ends)]
    assert AttentionSpec().geometry is None
