"""Host side of the Triton kernel. Nothing here waits for the device, so it can be captured."""

from __future__ import annotations

from typing import Any

import torch

from blasst.kernels.block_lists import WORD, block_lists
from blasst.kernels.call import Call
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.support import grid_reasons
from blasst.kernels.triton.config import (
    MIN_SHARED_MEMORY,
    Config,
    config_for,
    device_shared_memory,
    own_geometry,
)
from blasst.kernels.types import LOG2_E, Geometry, PagedKV, Problem, RaggedKV

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
TILES = (16, 32, 64, 128)  # tl.dot takes no less than 16 rows; 256 do not fit


def run(
    call: Call, out: torch.Tensor, counters: torch.Tensor | None, config: Config | None = None
) -> torch.Tensor:
    """The implementation "triton" of prefill_attention: fills `out`, returns lse.

    skip_lambda is read on the device when the kernel runs. config: None = what suits the device.
    """
    from blasst.kernels.triton.device import prefill_kernel

    q, kv, geometry, skip_lambda = call.q, call.kv, call.geometry, call.skip_lambda
    num_heads, num_kv_heads = q.shape[1], kv.k.shape[-2]
    lse = torch.empty(num_heads, q.shape[0], dtype=torch.float32, device=q.device)
    m_blocks = max((-(-r.seqlen_q // geometry.tile_m) for r in call.requests), default=0)
    grid = (num_heads // num_kv_heads, m_blocks, num_kv_heads * len(call.requests))
    if 0 in grid:
        return lse
    if reasons := grid_reasons(*grid[1:]):
        raise UnsupportedError(reasons)
    lists = None if call.spec.block_mask is None else tuple(block_lists(call))
    page, lengths, table, stride_k, stride_v = _key_layout(kv)
    config = config or config_of(q, geometry, paged=page > 0, lists=lists is not None)
    k_boxes, v_boxes = boxes_of(kv, geometry.tile_n) if config.boxes else (None, None)
    prefill_kernel[grid](
        q,
        kv.k,
        kv.v,
        out,
        lse,
        call.cu_seqlens_q,
        lengths,
        table,
        skip_lambda,
        counters,
        lists,
        k_boxes,
        v_boxes,
        call.softmax_scale * LOG2_E,
        num_kv_heads,
        (q.stride(), stride_k, stride_v, out.stride(), lse.stride(0), table.stride(0)),
        CAUSAL=call.spec.causal,
        VOTE=skip_lambda is not None,
        COUNT=skip_lambda is not None and counters is not None,
        PAGE=page,
        LISTS=lists is not None,
        HEAD_DIM=q.shape[2],
        TILE_M=geometry.tile_m,
        TILE_N=geometry.tile_n,
        **_constants(config),
    )
    return lse


def _constants(config: Config) -> dict[str, Any]:
    """What the kernel is compiled with, of a configuration."""
    return {
        "V_AHEAD": config.v_ahead,
        "STAGES": config.num_stages,
        "DEMAND_STAGES": config.demand_stages,
        "CHUNK": config.chunk,
        "BALLOT": config.ballot,
        "WAIT": config.max_registers is not None,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.max_registers,
    }


def _key_layout(
    kv: PagedKV | RaggedKV,
) -> tuple[int, torch.Tensor, torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """(page size or 0, key lengths, page table or any tensor, strides of k, and of v)."""
    if isinstance(kv, PagedKV):
        return kv.k.shape[1], kv.seqlens_k, kv.page_table, kv.k.stride(), kv.v.stride()
    ends = kv.cu_seqlens_k
    return 0, ends, ends, (0, *kv.k.stride()), (0, *kv.v.stride())


def boxes_of(kv: PagedKV | RaggedKV, tile_n: int) -> tuple[Any, Any]:
    """Tensor maps of k and v, for the copy engine of compute capability 9.0 and later; (None, None)
    where it cannot read them: pages, and rows or a start that 16 bytes do not divide."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(kv, PagedKV) or not all(_in_boxes(t) for t in (kv.k, kv.v)):
        return None, None
    rows, heads, head_dim = kv.k.shape
    k, v = (
        TensorDescriptor(
            t, [heads, rows, head_dim], [t.stride(1), t.stride(0), 1], [1, tile_n, head_dim]
        )
        for t in (kv.k, kv.v)
    )
    return k, v


def _in_boxes(t: torch.Tensor) -> bool:
    """Whether the copy engine can read t [rows, heads, head_dim]."""
    steps = (t.data_ptr(), *(s * t.element_size() for s in t.stride()[:2]))
    return t.numel() > 0 and t.stride(2) == 1 and all(step > 0 and step % 16 == 0 for step in steps)


def config_of(q: torch.Tensor, geometry: Geometry, *, paged: bool, lists: bool) -> Config:
    """The configuration for q's device; on a CPU (Triton's interpreter) any one will do."""
    index = q.device.index
    shared_memory = device_shared_memory(index or 0) if q.is_cuda else MIN_SHARED_MEMORY
    return config_for(geometry, q.shape[2], paged=paged, shared_memory=shared_memory, lists=lists)


def geometry_of(problem: Problem) -> Geometry:
    """What votes unless the caller says."""
    return own_geometry(
        problem.head_dim,
        problem.capability,
        paged=problem.page_size is not None,
        lists=problem.block_mask,
    )


def problem_reasons(problem: Problem) -> list[str]:
    """Why there is no kernel for a problem, whatever the GPU; empty: there is one."""
    geometry = problem.geometry or geometry_of(problem)
    reasons = [
        f"{name} {value} is not one of {', '.join(map(str, choices))}"
        for name, value, choices in (
            ("dtype", problem.dtype, DTYPES),
            ("head_dim", problem.head_dim, HEAD_DIMS),
            ("tile_m", geometry.tile_m, TILES),
            ("tile_n", geometry.tile_n, TILES),
        )
        if value not in choices
    ]
    if problem.block_mask and geometry.tile_n < WORD:
        reasons.append(f"tile_n {geometry.tile_n} with a block mask must be at least {WORD}")
    return reasons
