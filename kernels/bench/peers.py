"""Attention of others to compare with. Each is loaded only when it is asked for by name."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from blasst.kernels.bench.problems import Inputs, Run
from blasst.kernels.errors import UnsupportedError

_PAGE_SIZE = 128


def peer(name: str, x: Inputs) -> Run:
    """The dense attention of a peer on these inputs, its caches filled beforehand.

    Raises UnsupportedError with the reason when it cannot be loaded here.
    """
    try:
        return _PEERS[name](x)
    except Exception as e:  # the code of others: whatever it raises is told
        reason = e.reasons[0] if isinstance(e, UnsupportedError) else f"{type(e).__name__}: {e}"
        raise UnsupportedError([f"peer {name}: {reason}"]) from e


def _vllm_cpu(x: Inputs) -> Run:
    """vLLM's stock CPU prefill (ISA "vec") on its own cache: k is [head_dim, page] in a page."""
    ops = importlib.import_module("vllm._custom_ops")
    if x.shape.batch != 1 or not x.shape.causal or x.q.is_cuda:
        raise UnsupportedError(["it runs one causal request on a CPU"])
    tokens, heads, dim = x.ragged.k.shape
    pages = -(-tokens // _PAGE_SIZE)
    cache = torch.zeros(pages, heads, 2 * _PAGE_SIZE, dim, dtype=x.q.dtype)
    k, v = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(x.ragged.k, x.ragged.v, k, v, torch.arange(tokens), "vec")
    seq_lens = torch.tensor([tokens], dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=x.q.shape[1],
        num_kv_heads=heads,
        head_dim=dim,
        seq_lens=seq_lens,
        dtype=x.q.dtype,
        query_start_loc=x.cu_seqlens_q,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )
    out = torch.empty_like(x.q)
    table = torch.arange(pages, dtype=torch.int32)[None]

    def run() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            query=x.q,
            key_cache=k,
            value_cache=v,
            output=out,
            query_start_loc=x.cu_seqlens_q,
            seq_lens=seq_lens,
            scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return out

    return run


def _torch_sdpa(x: Inputs) -> Run:
    """PyTorch's own choice among its kernels."""
    group = x.q.shape[1] // x.ragged.k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in x.batched())
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, k, v, is_causal=x.shape.causal)


def _cudnn(x: Inputs) -> Run:
    """cuDNN through PyTorch."""
    attention: Any = importlib.import_module("torch.nn.attention")
    q, k, v = (t.transpose(1, 2) for t in x.batched())

    def run() -> torch.Tensor:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=x.shape.causal, enable_gqa=True
            )

    run()
    return run


def _fa4(x: Inputs) -> Run:
    """FlashAttention-4 (CuTe DSL), contiguous keys."""
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    q, k, v = x.batched()
    out = torch.empty_like(q)

    def run() -> Any:
        return forward(q, k, v, causal=x.shape.causal, out=out)

    run()
    return run


def _flex(x: Inputs) -> Run:
    """FlexAttention compiled to Triton, for these sizes alone: its fastest."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = (t.transpose(1, 2) for t in x.batched())
    tokens = q.shape[2]
    mask = None
    if x.shape.causal:
        mask = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=str(q.device)
        )
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)

    def run() -> Any:
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    run()
    return run


def _vllm_fa3(x: Inputs) -> Run:
    """The FlashAttention-3 inside vLLM, on pages where the problem has them."""
    forward = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    tokens = x.shape.tokens
    out = torch.empty_like(x.q)
    options: dict[str, Any] = {"cu_seqlens_k": x.ragged.cu_seqlens_k}
    k, v = x.kv.k, x.kv.v
    if x.shape.page_size is not None:
        options = {
            "block_table": x.kv.page_table,  # type: ignore[union-attr]
            "seqused_k": x.kv.seqlens_k,  # type: ignore[union-attr]
        }

    def run() -> Any:
        return forward(
            x.q, k, v, max_seqlen_q=tokens, cu_seqlens_q=x.cu_seqlens_q, max_seqlen_k=tokens,
            causal=x.shape.causal, out=out, fa_version=3, **options,
        )  # fmt: skip

    run()
    return run


_PEERS = {
    "fa4": _fa4,
    "cudnn": _cudnn,
    "flex": _flex,
    "vllm-fa3": _vllm_fa3,
    "torch-sdpa": _torch_sdpa,
    "vllm-cpu": _vllm_cpu,
}
PEERS = tuple(_PEERS)
