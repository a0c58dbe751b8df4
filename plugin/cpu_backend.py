"""vLLM's CPU attention, except that rows with a threshold go to our own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from blasst.plugin.metadata import Rest, sub_batch
from blasst.plugin.voting import VotingBuilder, VotingImpl


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


class BlasstCPUBuilder(VotingBuilder, CPUAttentionMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kw: Any
    ) -> Any:
        def build_stock(common: Any) -> Any:
            return super(BlasstCPUBuilder, self).build(common_prefix_len, common, *args, **kw)

        def narrow(rest: Rest, changing: dict[str, Any]) -> Any:
            # vLLM's schedule of a batch is no sum of schedules of its parts.
            return build_stock(sub_batch(common_attn_metadata, rest, changing))

        metadata = build_stock(common_attn_metadata)
        votes = self.votes_of(common_attn_metadata)
        if votes is not None:
            metadata.blasst = self.split_batch(common_attn_metadata, votes, narrow)
        return metadata


class BlasstCPUImpl(VotingImpl, CPUAttentionBackendImpl):
    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vec_cache_views(kv_cache)


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
