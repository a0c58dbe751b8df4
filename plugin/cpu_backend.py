"""vLLM's CPU attention, except that rows with a threshold go to `prefill_attention`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from blasst.kernels.api import prefill_attention
from blasst.kernels.types import AttentionSpec, PagedKV
from blasst.plugin.metadata import Split, split
from blasst.plugin.request_tap import current_rows


class BlasstCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "BLASST"  # must be a member of vLLM's enum: Attention looks it up there

    @staticmethod
    def get_impl_cls() -> type[BlasstCPUImpl]:
        return BlasstCPUImpl

    @staticmethod
    def get_builder_cls() -> type[BlasstCPUBuilder]:
        return BlasstCPUBuilder


class BlasstCPUBuilder(CPUAttentionMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kw: Any
    ) -> Any:
        """Stock metadata of the whole batch; `.blasst`, a Split, only when a row votes."""

        def build_stock(common: Any) -> Any:
            return super(BlasstCPUBuilder, self).build(common_prefix_len, common, *args, **kw)

        metadata = build_stock(common_attn_metadata)
        rows = current_rows()
        if rows is not None:
            metadata.blasst = split(common_attn_metadata, rows, build_stock)
        return metadata


class BlasstCPUImpl(CPUAttentionBackendImpl):
    blasst: tuple[str, torch.Tensor] | None = None
    """(implementation, this layer's counters) of an eligible layer; set when the engine starts."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows: Split | None = getattr(attn_metadata, "blasst", None)
        if rows is None or self.blasst is None:
            stock: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return stock
        if rows.stock is not None:
            rest, metadata = rows.stock
            out = rest.take(output)
            # Keys and values of this step are in the cache already (do_kv_cache_update).
            super().forward(
                layer, rest.take(query), None, None, kv_cache, metadata, out, *args, **kwargs
            )
            rest.put(output, out)
        impl, counters = self.blasst
        vote = rows.vote
        out = vote.part.take(output)
        k, v = vec_cache_views(kv_cache)
        prefill_attention(
            vote.part.take(query),
            PagedKV(k, v, vote.page_table, vote.seqlens_k),
            vote.part.cu_seqlens_q,
            spec=AttentionSpec(softmax_scale=self.scale),
            skip_lambda=vote.skip_lambda,
            impl=impl,
            out=out,
            counters=counters,
        )
        vote.part.put(output, out)
        return output


def vec_cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v as [blocks, block_size, kv_heads, head_dim] views of vLLM's "vec" cache.

    A block of one head holds K transposed, [head_dim, block_size], then V, [block_size, head_dim].
    """
    blocks, heads, size, both = kv_cache.shape
    dim = both // 2
    halves = kv_cache.view(blocks, heads, 2, size * dim)
    k = halves[:, :, 0].view(blocks, heads, dim, size).permute(0, 3, 1, 2)
    v = halves[:, :, 1].view(blocks, heads, size, dim).permute(0, 2, 1, 3)
    return k, v
