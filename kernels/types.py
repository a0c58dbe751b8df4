"""The vocabulary of a prefill attention call. torch is needed for annotations only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class Impl(StrEnum):
    """Implementations, best first; `reference` is the oracle of the tests, never chosen by auto.
    `cpu` is compiled where it runs, `cpu-torch` does without a compiler."""

    BLACKWELL = "blackwell"
    HOPPER = "hopper"
    TRITON = "triton"
    CPU = "cpu"
    CPU_TORCH = "cpu-torch"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Geometry:
    """The group that votes: `tile_m` query rows of one q head against `tile_n` keys.

    heads: q heads of a group whose rows stand in one tile, for each query position one after the
    other (packed GQA); such a tile has tile_m // heads positions and counts once. Tiles are aligned
    at key 0 and at the first query row of the request in this call. Blocks are visited from the
    last valid one to the left. A calibration holds for its geometry only.
    """

    tile_m: int = 128
    tile_n: int = 128
    heads: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} {value} must be a power of two, such as 64 or 128")
        if self.heads > self.tile_m:
            raise ValueError(f"heads {self.heads} do not fit a tile of {self.tile_m} rows")

    @property
    def positions(self) -> int:
        """Query positions of a tile."""
        return self.tile_m // self.heads

    def __str__(self) -> str:
        packed = f", {self.heads} heads together" if self.heads > 1 else ""
        return f"{self.tile_m} x {self.tile_n}{packed}"


MaskMod = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""(request, q head, query position, key position), int64 and broadcastable -> bool, True = visible.

The query position counts in keys: row i of a request is at seqlen_k - seqlen_q + i, so a mask does
not change when a prompt is computed in chunks.
"""


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which key blocks each query tile visits: FlexAttention's lists, int32. Immutable: what the
    kernels make of it is kept with the object, so use one object for all layers and calls.

    counts: [batch or 1, num_heads or 1, m_blocks]; indices: the same with n_blocks appended, in any
    order. Partial blocks apply `mask_mod`, full ones do not (a block in both lists is partial);
    blocks in neither list are not visited. mask_mod is asked for tokens of the request only.
    Causality and the sequence's end apply on top, to both.
    """

    mask_mod: MaskMod
    partial_counts: torch.Tensor
    partial_indices: torch.Tensor
    full_counts: torch.Tensor
    full_indices: torch.Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What is computed. softmax_scale None = head_dim ** -0.5. geometry None = the implementation's
    own; an implementation that cannot vote on a given one refuses. Lists of a block_mask count in
    tiles: with them None means 128 x 128 everywhere."""

    softmax_scale: float | None = None
    causal: bool = True
    block_mask: BlockMask | None = None
    geometry: Geometry | None = None


@dataclass(frozen=True)
class PagedKV:
    """k, v: [num_pages, page_size, num_kv_heads, head_dim], any strides (views of a cache).

    page_table: int32 [batch, max_pages]; seqlens_k: int32 [batch], keys of each request, those
    of this call included. Entries and page rows beyond a request's keys are never read.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seqlens_k: torch.Tensor


@dataclass(frozen=True)
class RaggedKV:
    """k, v: [total_k, num_kv_heads, head_dim], any strides; cu_seqlens_k: int32 [batch + 1]."""

    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_k: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """The part of a call that decides which implementation can run it; hashable, no tensors.

    dtype: of q, k and v, such as "bfloat16". capability: of the CUDA device, None on a CPU.
    page_size: None = contiguous ragged keys. vote: a skip_lambda is given. geometry: None = the
    implementation's own.
    """

    head_dim: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    device_type: str = "cpu"
    capability: tuple[int, int] | None = None
    page_size: int | None = None
    causal: bool = True
    block_mask: bool = False
    vote: bool = True
    geometry: Geometry | None = None
