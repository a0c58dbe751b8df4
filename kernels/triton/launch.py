"""Host side of the Triton kernel. Nothing here waits for the device, so it can be captured."""

from __future__ import annotations

import torch

from blasst.kernels.call import Call
from blasst.kernels.types import LOG2_E, Geometry, PagedKV, RaggedKV


def prefill(
    q: torch.Tensor,
    kv: PagedKV | RaggedKV,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    geometry: Geometry,
    skip_lambda: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """Fills `out`, returns lse. Inputs as in `prefill_attention`, unchecked.

    max_seqlen_q: query rows of the longest request or more; skip_lambda is read on the device when
    the kernel runs.
    """
    from blasst.kernels.triton.device import prefill_kernel

    num_heads, num_kv_heads = q.shape[1], kv.k.shape[-2]
    lse = torch.empty(num_heads, q.shape[0], dtype=torch.float32, device=q.device)
    batch = cu_seqlens_q.numel() - 1
    grid = (num_heads, -(-max_seqlen_q // geometry.tile_m), batch)
    if 0 in grid:
        return lse
    if isinstance(kv, PagedKV):
        lengths, table, page = kv.seqlens_k, kv.page_table, kv.k.shape[1]
        stride_k, stride_v = kv.k.stride(), kv.v.stride()
    else:
        lengths = table = kv.cu_seqlens_k
        page = 0
        stride_k, stride_v = (0, *kv.k.stride()), (0, *kv.v.stride())
    strides = (q.stride(), stride_k, stride_v, out.stride(), lse.stride(0), table.stride(0))
    prefill_kernel[grid](
        q,
        kv.k,
        kv.v,
        out,
        lse,
        cu_seqlens_q,
        lengths,
        table,
        skip_lambda,
        counters,
        softmax_scale * LOG2_E,
        strides,
        CAUSAL=causal,
        VOTE=skip_lambda is not None,
        COUNT=skip_lambda is not None and counters is not None,
        PAGE=page,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=q.shape[2],
        TILE_M=geometry.tile_m,
        TILE_N=geometry.tile_n,
        num_warps=8 if geometry.tile_m >= 128 else 4,
        num_stages=2,
    )
    return lse


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """The implementation "triton" of prefill_attention."""
    return prefill(
        call.q,
        call.kv,
        call.cu_seqlens_q,
        out,
        max_seqlen_q=max((r.seqlen_q for r in call.requests), default=0),
        softmax_scale=call.softmax_scale,
        causal=call.spec.causal,
        geometry=call.spec.geometry,
        skip_lambda=call.skip_lambda,
        counters=counters,
    )
