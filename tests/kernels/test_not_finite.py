"""NaN and infinity in the inputs show in the output, on the oracle as on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.types import AttentionSpec, Geometry, RaggedKV

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
