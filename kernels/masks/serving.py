"""Our prefill kernels under a mask: inference only, dense or with a skip threshold."""

from __future__ import annotations

from itertools import accumulate

import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.inputs import Inputs, Result
from blasst.kernels.types import AttentionSpec, Geometry, RaggedKV


def spec_for(mask: AttentionMask, softmax_scale: float, geometry: Geometry) -> AttentionSpec:
    """Causality on top of the mask wherever the mask implies it: kernels then start at the diagonal
    and never look right of it."""
    return AttentionSpec(softmax_scale, mask.is_causal, mask.blasst(geometry), geometry)


def run(
    x: Inputs,
    *,
    geometry: Geometry,
    skip_lambda: float | None,
    counters: torch.Tensor | None,
) -> Result:
    """skip_lambda: None = dense; counters: as in prefill_attention."""
    batch, seqlen_q, num_heads, _ = x.q.shape
    out, lse = prefill_attention(
        x.q.detach().flatten(0, 1),
        RaggedKV(x.k.detach().flatten(0, 1), x.v.detach().flatten(0, 1), _ends(x.k)),
        _ends(x.q),
        spec=spec_for(x.mask, x.softmax_scale, geometry),
        skip_lambda=(
            None if skip_lambda is None else torch.full((batch,), skip_lambda, device=x.q.device)
        ),
        counters=counters,
    )
    return out.view(x.q.shape), lse.view(num_heads, batch, seqlen_q).transpose(0, 1)


def _ends(t: torch.Tensor) -> torch.Tensor:
    batch, seqlen = t.shape[:2]
    ends = [0, *accumulate([seqlen] * batch)]
    return torch.tensor(ends, dtype=torch.int32, device=t.device)
