"""The reference route: whole score matrices, differentiable, any device and floating dtype."""

from __future__ import annotations

import math

import torch

from blasst.kernels.masks.inputs import Inputs, Result


def run(x: Inputs) -> Result:
    """Any shapes that Inputs allows.

    Computed in float32, or float64 for float64 inputs, under autocast too. Rows that see nothing:
    out 0, lse -inf, no gradient. Memory: batch x num_heads x seqlen_q x seqlen_k scores, several
    times.
    """
    with torch.autocast(x.q.device.type, enabled=False):
        return _run(x)


def _run(x: Inputs) -> Result:
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    group = x.q.shape[2] // x.k.shape[2]
    queries = x.q.to(dtype).transpose(1, 2)
    keys, values = (t.to(dtype).transpose(1, 2).repeat_interleave(group, 1) for t in (x.k, x.v))
    scores = queries @ keys.transpose(2, 3) * x.softmax_scale
    scores = scores.masked_fill(~x.mask.dense()[:, None], -math.inf)
    # Subtracting a constant: its gradient is zero, so it takes no part in autograd.
    highest = scores.detach().amax(-1, keepdim=True)
    highest = torch.where(highest == -math.inf, 0.0, highest)
    p = torch.exp(scores - highest)
    total = p.sum(-1, keepdim=True)
    some = torch.where(total == 0, 1.0, total)
    out = (p / some) @ values
    lse = torch.where(total == 0, -math.inf, highest + some.log())
    return out.transpose(1, 2).to(x.q.dtype), lse[..., 0]
