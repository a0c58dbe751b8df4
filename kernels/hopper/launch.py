"""Host side of the Hopper kernel. Nothing here waits for the device, so it can be captured."""

from __future__ import annotations

from dataclasses import replace

import torch

from blasst.kernels.call import Call
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.hopper.config import ROWS, Config
from blasst.kernels.types import LOG2_E, Geometry, PagedKV, Problem, RaggedKV

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128, 256)
COPY_BYTES = 16  # the copy engine's unit: addresses and strides are multiples of it


def prefill(
    q: torch.Tensor,
    kv: PagedKV | RaggedKV,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    skip_lambda: torch.Tensor | None,
    counters: torch.Tensor | None,
    trace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fills `out`, returns lse. Inputs as in `prefill_attention`, values unchecked.

    max_seqlen_q: query rows of the longest request or more; skip_lambda is read on the device when
    the kernel runs. trace: as `cute.trace.start_trace` takes it.
    """
    config = config_for(
        str(q.dtype).removeprefix("torch."),
        q.shape[2],
        causal=causal,
        page_size=kv.k.shape[1] if isinstance(kv, PagedKV) else 0,
        vote=skip_lambda is not None,
        count=skip_lambda is not None and counters is not None,
    )
    reasons = [
        *config_reasons(config),
        *layout_reasons({"q": q, "k": kv.k, "v": kv.v, "out": out}),
    ]
    if reasons:
        raise UnsupportedError(reasons)
    from blasst.kernels.hopper.compile import compile_prefill

    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    if max_seqlen_q == 0 or q.shape[0] == 0:
        return lse
    run_prefill = compile_prefill(replace(config, trace=trace is not None))
    run_prefill(
        q,
        kv.k,
        kv.v,
        out,
        lse,
        cu_seqlens_q,
        kv.seqlens_k if isinstance(kv, PagedKV) else kv.cu_seqlens_k,
        kv.page_table if isinstance(kv, PagedKV) else None,
        None if skip_lambda is None else skip_lambda.float(),
        None if skip_lambda is None else counters,
        trace,
        softmax_scale * LOG2_E,
        max_seqlen_q,
    )
    return lse


def config_for(
    dtype: str, head_dim: int, *, causal: bool, page_size: int, vote: bool, count: bool
) -> Config:
    """The fastest of the measured configurations. page_size 0 = ragged keys."""
    return Config(dtype, head_dim, causal, page_size, vote, count)


def config_reasons(config: Config) -> list[str]:
    """Why there is no kernel for it; empty: there is one."""
    reasons = []
    for name, value, choices in (
        ("dtype", config.dtype, DTYPES),
        ("head_dim", config.head_dim, HEAD_DIMS),
        ("page_size", config.page_size or PAGE_SIZES[0], PAGE_SIZES),
    ):
        if value not in choices:
            reasons.append(f"{name} {value} is not one of {', '.join(map(str, choices))}")
    return reasons


def problem_config(problem: Problem) -> Config:
    """What is compiled for a problem whose tiles are counted whenever it votes."""
    return config_for(
        problem.dtype,
        problem.head_dim,
        causal=problem.causal,
        page_size=problem.page_size or 0,
        vote=problem.vote,
        count=problem.vote,
    )


def geometry_of(problem: Problem) -> Geometry:
    """The group that votes: one warpgroup's rows."""
    return Geometry(ROWS, problem_config(problem).tile_n)


def problem_reasons(problem: Problem) -> list[str]:
    """Why there is no kernel for a problem, whatever the GPU; empty: there is one."""
    reasons = config_reasons(problem_config(problem))
    if problem.block_mask:
        reasons.append("block masks are not in this kernel")
    own = geometry_of(problem)
    if problem.geometry not in (None, own):
        reasons.append(f"it votes on {own}, not on {problem.geometry}")
    return reasons


def layout_reasons(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Why the copy engine cannot reach a tensor; empty: it can."""
    reasons = []
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            reasons.append(f"{name} has stride {t.stride(-1)} along head_dim, it must be 1")
            continue
        units = COPY_BYTES // t.element_size()
        if t.data_ptr() % COPY_BYTES or any(s % units for s in t.stride()[:-1]):
            reasons.append(
                f"{name} has strides {t.stride()} at address {t.data_ptr():#x}; the copy engine "
                f"needs multiples of {COPY_BYTES} bytes"
            )
    return reasons


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """The implementation "hopper" of prefill_attention."""
    return prefill(
        call.q,
        call.kv,
        call.cu_seqlens_q,
        out,
        max_seqlen_q=max((r.seqlen_q for r in call.requests), default=0),
        softmax_scale=call.softmax_scale,
        causal=call.spec.causal,
        skip_lambda=call.skip_lambda,
        counters=counters,
    )
