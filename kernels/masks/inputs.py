"""One checked call of masked attention, as every route takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blasst.kernels.masks.bound import AttentionMask


@dataclass(frozen=True)
class Inputs:
    """q: [batch, seqlen_q, num_heads, head_dim]; k, v: [batch, seqlen_k, num_kv_heads, head_dim].

    want_lse: whether the caller needs the lse; a route may return it unasked.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: AttentionMask
    softmax_scale: float
    want_lse: bool = False

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))


Result = tuple[torch.Tensor, torch.Tensor | None]
"""out, like q; lse [batch, num_heads, seqlen_q], natural log, float32 or wider, where wanted."""
