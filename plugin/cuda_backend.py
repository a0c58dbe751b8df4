"""vLLM's FlashAttention, except that rows with a threshold go to our own kernel."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from blasst.plugin.metadata import narrowed
from blasst.plugin.voting import VotingBuilder, VotingImpl


class BlasstCUDABackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "BLASST"  # must be a member of vLLM's enum: Attention looks it up there

    @staticmethod
    def get_impl_cls() -> type[BlasstCUDAImpl]:
        return BlasstCUDAImpl

    @staticmethod
    def get_builder_cls() -> type[BlasstCUDABuilder]:
        return BlasstCUDABuilder


class BlasstCUDABuilder(VotingBuilder, FlashAttentionMetadataBuilder):
    # A prefill in a captured graph would stay vLLM's for ever: full graphs are for decodes alone.
    _cudagraph_support = min(
        FlashAttentionMetadataBuilder._cudagraph_support,
        AttentionCGSupport.UNIFORM_BATCH,
        key=lambda support: support.value,
    )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> Any:
        votes = self.votes_of(common_attn_metadata)
        if votes is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        # Cascades, and schedules made ahead of time, are for a batch as a whole: parts of it go
        # without, and then nothing else in vLLM's metadata depends on who belongs to the batch.
        metadata = super().build(0, common_attn_metadata, True, **kwargs)
        metadata.blasst = self.split_batch(
            common_attn_metadata,
            votes,
            lambda rest, changing: narrowed(metadata, rest.known, changing),
        )
        return metadata

    def update_block_table(
        self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        if getattr(metadata, "blasst", None) is not None:
            updated.blasst = metadata.blasst.with_block_table(blk_table, slot_mapping)
        return updated


class BlasstCUDAImpl(VotingImpl, FlashAttentionImpl):
    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of logical [blocks, kv_heads, block_size, k and v]; in memory heads or slots go first."""
        rows_first = kv_cache.transpose(1, 2)
        k, v = rows_first[..., : self.head_size], rows_first[..., self.head_size :]
        # The copy engine minds the stride even of a dimension of one kv head.
        return canonicalize_singleton_dim_strides(k), canonicalize_singleton_dim_strides(v)
