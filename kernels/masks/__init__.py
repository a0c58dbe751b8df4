"""Block masks for training and serving: composable mask mods, layouts, block lists and routes."""

from blasst.kernels.masks.bound import MASKS, AttentionMask, MaskCache, bind
from blasst.kernels.masks.chat import conversation, shared_prefix_sample
from blasst.kernels.masks.mods import (
    causal,
    document,
    padding,
    shared_prefix,
    sliding_window,
    strip_history_thinking,
)
from blasst.kernels.masks.routes import Options, masked_attention
from blasst.kernels.masks.segments import PackedBatch, Sample, Segments, pack

__all__ = [
    "MASKS",
    "AttentionMask",
    "MaskCache",
    "Options",
    "PackedBatch",
    "Sample",
    "Segments",
    "bind",
    "causal",
    "conversation",
    "document",
    "masked_attention",
    "pack",
    "padding",
    "shared_prefix",
    "shared_prefix_sample",
    "sliding_window",
    "strip_history_thinking",
]
