"""Rows that see NaN, infinity or nothing at all, on the oracle as on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry, RaggedKV

TOKENS, BAD = 60, 21


@pytest.mark.parametrize("skip_lambda", [None, 0.0, 0.5])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k"])
def test_rows_that_see_it_and_no_others_are_not_finite(
    host_impl: str, where: str, value: float, skip_lambda: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(TOKENS, 1, 64, generator=generator) for _ in range(3))
    q[:, 0, 0] = k[:, 0, 0] = 1.0  # an infinity gives scores of +inf
    {"q": q, "k": k}[where][BAD, 0, 0] = value
    cu = torch.tensor([0, TOKENS], dtype=torch.int32)
    out, _ = prefill_attention(
        q,
        RaggedKV(k, v, cu),
        cu,
        spec=AttentionSpec(geometry=Geometry(16, 16)),
        skip_lambda=None if skip_lambda is None else torch.tensor([skip_lambda]),
        impl=host_impl,
    )
    finite = out.isfinite().all(-1)[:, 0]
    seen = torch.arange(TOKENS) >= BAD if where == "k" else torch.arange(TOKENS) == BAD
    assert torch.equal(finite, ~seen)


def _left_block(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k < 16) & (q >= 0)


def test_the_first_visited_block_is_kept_although_its_mask_hides_every_key(host_impl: str) -> None:
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(32, 1, 64, generator=generator) for _ in range(3))
    cu = torch.tensor([0, 32], dtype=torch.int32)
    both = torch.tensor([[[2, 2]]], dtype=torch.int32)
    lists = both, torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask(_left_block, *lists, torch.zeros_like(both), torch.zeros_like(lists[1]))
    counters = torch.zeros(1, 2, dtype=torch.int64)
    out, _ = prefill_attention(
        q,
        RaggedKV(k, v, cu),
        cu,
        spec=AttentionSpec(causal=False, block_mask=mask, geometry=Geometry(16, 16)),
        skip_lambda=torch.tensor([0.9]),
        impl=host_impl,
        counters=counters,
    )
    assert counters.tolist() == [[4, 0]]
    weights = (q[:, 0] @ k[:16, 0].t() / 8).softmax(-1)
    torch.testing.assert_close(out[:, 0], weights @ v[:16, 0], rtol=1e-4, atol=1e-5)
