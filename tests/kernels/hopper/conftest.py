"""Problems on the GPU for the Hopper kernel, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from blasst.kernels.cute.host import Inputs
from blasst.kernels.hopper.launch import start
from blasst.kernels.reference import reference_attention
from blasst.kernels.testing import cumulative, paged
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, RaggedKV

TIE = 2e-3  # log2 units: a vote this near to lambda may go either way in float32


@dataclass(frozen=True)
class Call:
    """One call of the kernel, inputs on the GPU. seqlens: (queries, keys) of each request."""

    q: torch.Tensor
    kv: PagedKV | RaggedKV
    seqlens: tuple[tuple[int, int], ...]
    causal: bool
    skip_lambda: torch.Tensor | None
    geometry: Geometry
    cu_seqlens_q: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        return int(self.kv.k.shape[-2])

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, lse, counters); out was NaN before."""
        out = torch.full_like(self.q, torch.nan)
        counters = torch.zeros(self.num_kv_heads, 2, dtype=torch.int64, device="cuda")
        inputs = Inputs(
            self.q,
            self.kv,
            self.cu_seqlens_q,
            out,
            max_seqlen_q=max(q for q, _ in self.seqlens),
            softmax_scale=self.q.shape[2] ** -0.5,
            causal=self.causal,
            skip_lambda=self.skip_lambda,
            counters=counters,
            pack=self.geometry.heads,
        )
        return out, start(inputs), counters

    def check(self) -> torch.Tensor:
        """Compares with the oracle; returns the counters."""
        want = reference_attention(
            self.q,
            self.kv,
            self.cu_seqlens_q,
            spec=AttentionSpec(causal=self.causal, geometry=self.geometry),
            skip_lambda=self.skip_lambda,
        )
        out, lse, counters = self.run()
        eps = torch.finfo(self.q.dtype).eps
        torch.testing.assert_close(out.double(), want.out, rtol=2 * eps, atol=2 * eps)
        torch.testing.assert_close(lse.double(), want.lse, rtol=1e-4, atol=1e-4)
        if self.skip_lambda is None:
            assert not counters.any()
            return counters
        expected = want.counts(self.num_kv_heads)
        ties = sum(int((m.abs() < TIE).sum()) for m in want.margin)
        assert torch.equal(counters[:, 0], expected[:, 0])
        assert int((counters - expected).abs().sum()) <= ties
        return counters


def make_call(
    seqlens: tuple[tuple[int, int], ...],
    *,
    page_size: int | None = None,
    causal: bool = True,
    vote: bool = True,
    seed: int = 0,
    **options: Any,
) -> Call:
    """Random inputs whose stretches of 64 keys have different levels, so that votes go both ways.

    options: head_dim 128, num_heads 8, num_kv_heads 2, dtype bfloat16, pack 1 (heads that vote
    together), poison NaN (what is in pages where no key is).
    """
    head_dim, dtype = options.get("head_dim", 128), options.get("dtype", torch.bfloat16)
    heads, kv_heads = options.get("num_heads", 8), options.get("num_kv_heads", 2)
    generator = torch.Generator().manual_seed(seed)
    total_q, total_k = (sum(lengths) for lengths in zip(*seqlens, strict=True))
    q = torch.randn(total_q, heads, head_dim, generator=generator)
    k, v = (torch.randn(total_k, kv_heads, head_dim, generator=generator) for _ in range(2))
    q[..., 0] = 4.0
    level = torch.randn(total_k // 64 + 1, kv_heads, generator=generator)
    k[..., 0] += 8.0 * level.repeat_interleave(64, 0)[:total_k]
    ragged = RaggedKV(k.to(dtype), v.to(dtype), cumulative([n for _, n in seqlens]))
    kv: PagedKV | RaggedKV = ragged
    if page_size is not None:
        kv = paged(ragged, page_size, poison=options.get("poison", torch.nan))
    lambdas = torch.tensor(([0.05, 0.3, 0.001, 0.6] * 4)[: len(seqlens)]).cuda()
    return Call(
        q.to(dtype).cuda(),
        type(kv)(*(t.cuda() for t in vars(kv).values())),
        seqlens,
        causal,
        lambdas if vote else None,
        Geometry(64, 128, options.get("pack", 1)),
        cumulative([n for n, _ in seqlens]).cuda(),
    )


@pytest.fixture
def make() -> Callable[..., Call]:
    return make_call
