"""Host side of the Hopper kernel. Nothing here waits for the device, so it can be captured."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from blasst.kernels.block_lists import group_lists
from blasst.kernels.call import Call
from blasst.kernels.cute.host import Inputs, choice_reasons, geometry_reasons, problem_choices
from blasst.kernels.hopper.config import MASKED, ROWS, TUNED, Config
from blasst.kernels.types import Geometry, PagedKV, Problem, RaggedKV

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128, 256)


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
    inputs = Inputs(
        q,
        kv,
        cu_seqlens_q,
        out,
        max_seqlen_q,
        softmax_scale,
        causal,
        skip_lambda,
        counters,
        trace,
    )
    return start(inputs)


def start(inputs: Inputs) -> torch.Tensor:
    """Fills inputs.out, returns lse. The lists of a block mask are for Config.warpgroups tiles."""
    config = config_for(**inputs.choices())
    cluster = config.cluster_for(inputs.q.shape[1] // inputs.kv.k.shape[-2])
    config = replace(config, trace=inputs.trace is not None, cluster=cluster)
    return inputs.start(config_reasons(config), lambda: _compiled(config))


@functools.cache
def _compiled(config: Config) -> Any:
    from blasst.kernels.cute.cache import kept
    from blasst.kernels.hopper.compile import compile_prefill

    compiled = functools.partial(compile_prefill, config)
    # What an engine runs is kept on disk; the others' arguments are more than flat tensors.
    plain = not (config.trace or config.block_mask)
    return kept("hopper", config, compiled) if plain else compiled()


def config_for(
    dtype: str,
    head_dim: int,
    *,
    causal: bool,
    page_size: int,
    vote: bool,
    count: bool,
    block_mask: bool = False,
) -> Config:
    """The fastest of the measured configurations. page_size 0 = ragged keys.

    The number of heads decides Config.cluster, which is left at 1. The lists of a block mask say
    what causality hides, so that one build serves both.
    """
    tuned = TUNED.get((head_dim, vote), {})
    if block_mask:
        tuned = MASKED.get((head_dim, vote), tuned)
    causal = causal and not block_mask
    return Config(dtype, head_dim, causal, page_size, vote, count, block_mask=block_mask, **tuned)


def config_reasons(config: Config) -> list[str]:
    """Why there is no kernel for it; empty: there is one."""
    return choice_reasons(
        dtype=(config.dtype, DTYPES),
        head_dim=(config.head_dim, HEAD_DIMS),
        page_size=(config.page_size or PAGE_SIZES[0], PAGE_SIZES),
    )


def problem_config(problem: Problem) -> Config:
    """What is compiled for a problem whose tiles are counted whenever it votes."""
    return config_for(**problem_choices(problem))


def geometry_of(problem: Problem) -> Geometry:
    """The group that votes: one warpgroup's rows."""
    return Geometry(ROWS, problem_config(problem).tile_n)


def problem_reasons(problem: Problem) -> list[str]:
    """Why there is no kernel for a problem, whatever the GPU; empty: there is one."""
    reasons = config_reasons(problem_config(problem))
    return reasons + geometry_reasons(problem, geometry_of(problem))


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """The implementation "hopper" of prefill_attention."""
    inputs = Inputs.of(call, out, counters)
    if call.spec.block_mask is not None:
        tiles = problem_config(call.problem).warpgroups
        inputs = replace(inputs, lists=group_lists(call, tiles, ROWS))
    return start(inputs)
