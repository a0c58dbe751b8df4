"""Our prefill kernels under a mask: inference only, dense or with a skip threshold."""

from __future__ import annotations

import torch

from blasst.kernels.call import counter_reasons
from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.inputs import Inputs, Result
from blasst.kernels.plan import Plan, check_batch
from blasst.kernels.types import AttentionSpec, Geometry, RaggedKV


def spec_for(mask: AttentionMask, softmax_scale: float, geometry: Geometry) -> AttentionSpec:
    """Causality on top of the mask wherever the mask implies it: kernels then start at the diagonal
    and never look right of it."""
    return AttentionSpec(softmax_scale, mask.is_causal, mask.blasst(geometry), geometry)


def run(
    x: Inputs,
    *,
    plan: Plan,
    skip_lambda: float | None,
    counters: torch.Tensor | None,
) -> Result:
    """plan: of x.mask, its spec included; skip_lambda: None = dense; counters: as in
    prefill_attention. Nothing here waits for the device once the lists of the mask are made."""
    mask, device = x.mask, x.q.device
    reasons = list(counter_reasons(counters, x.k.shape[2], device))
    if reasons:
        raise InvalidInputError(reasons)
    lambdas = given = None
    if skip_lambda is not None:
        lambdas = [skip_lambda] * mask.batch
        given = torch.full((mask.batch,), skip_lambda, dtype=torch.float32, device=device)
    ends = [i * mask.seqlen_q for i in range(mask.batch + 1)]
    batch = check_batch(ends, [mask.seqlen_k] * mask.batch, lambdas)
    cu_seqlens_q, cu_seqlens_k = mask.cu_seqlens
    q, k, v = (t.detach().flatten(0, 1) for t in (x.q, x.k, x.v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    with torch.no_grad():
        lse = plan.run(
            q,
            RaggedKV(k, v, cu_seqlens_k),
            cu_seqlens_q,
            batch,
            skip_lambda=given,
            out=out,
            counters=counters,
        )
    return out.view(x.q.shape), lse.view(-1, mask.batch, mask.seqlen_q).transpose(0, 1)
