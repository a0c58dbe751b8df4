"""vLLM's FlashAttention under our name. No GPU kernel is in this release: all rows are stock."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend


class BlasstCUDABackend(FlashAttentionBackend):
    """Layers are judged and requests counted as on a CPU; eligibility says that none can skip."""

    @staticmethod
    def get_name() -> str:
        return "BLASST"  # must be a member of vLLM's enum: Attention looks it up there
