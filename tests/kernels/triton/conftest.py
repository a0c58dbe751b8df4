"""Small problems for the Triton kernel: on a GPU, or interpreted on the CPU (float16 only)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from blasst.kernels.testing import paged
from blasst.kernels.types import Geometry, PagedKV, RaggedKV

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Read by triton.jit when the kernel's module is imported, so before any test.
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Case:
    """A ragged batch. low: share of key blocks pushed far below the running maximum."""

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    head_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float16
    low: float = 0.5
    geometry: Geometry = field(default_factory=lambda: Geometry(64, 64))


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def ragged(self) -> RaggedKV:
        return RaggedKV(self.k, self.v, self.cu_seqlens_k)

    def paged(self, page_size: int) -> PagedKV:
        """The same keys in shuffled pages of a cache whose unused rows are NaN."""
        cpu = RaggedKV(*(t.cpu() for t in vars(self.ragged).values()))
        return PagedKV(*(t.to(DEVICE) for t in vars(paged(cpu, page_size)).values()))


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Scores of the keys in low blocks lose about 12, along a direction all queries share."""
    torch.manual_seed(seed)
    cu_q, cu_k = (
        torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (case.seqlens_q, case.seqlens_k)
    )
    direction = torch.zeros(case.head_dim)
    direction[0] = case.head_dim**0.5
    q = torch.randn(int(cu_q[-1]), case.num_heads, case.head_dim) * 0.5 + direction
    k = torch.randn(int(cu_k[-1]), case.num_kv_heads, case.head_dim) * 0.5
    v = torch.randn(k.shape)
    tile_n = case.geometry.tile_n
    for start, length in zip(cu_k.tolist(), case.seqlens_k, strict=False):
        # The last block stays high: it is visited first and sets the running maximum.
        candidates = max(0, -(-length // tile_n) - 1)
        for head in range(case.num_kv_heads):
            for n in torch.randperm(candidates)[: round(case.low * candidates)].tolist():
                k[start + n * tile_n : start + (n + 1) * tile_n, head, 0] -= 12.0
    q, k, v = (t.to(DEVICE, case.dtype) for t in (q, k, v))
    return Inputs(q, k, v, cu_q.to(DEVICE), cu_k.to(DEVICE))


@pytest.fixture
def make_case() -> Callable[..., tuple[Case, Inputs]]:
    def make(**fields: Any) -> tuple[Case, Inputs]:
        case = Case(**fields)
        return case, make_inputs(case)

    return make
