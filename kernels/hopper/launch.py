"""Host side of the Hopper kernel. Nothing here waits for the device, so it can be captured."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from blasst.kernels.block_lists import group_lists
from blasst.kernels.call import Call
from blasst.kernels.cute.host import Inputs, choice_reasons, geometry_reasons, problem_choices
from blasst.kernels.hopper.config import ROWS, TUNED, Config
from blasst.kernels.types import Geometry, PagedKV, Problem, RaggedKV

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128, 256)
PACKS = (1, 2, 4, 8, 16, 32, 64)  # divisors of ROWS
PAYS = 0.9  # of the tiles that there are without packing: time follows them (docs/measurements)


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
    config = config_for(**inputs.choices(), pack=inputs.pack)
    if inputs.trace is not None:
        config = replace(config, trace=True)
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
    pack: int = 1,
) -> Config:
    """The fastest of the measured configurations. page_size 0 = ragged keys.

    The lists of a block mask say what causality hides, so that one build serves both.
    """
    tuned = TUNED.get(head_dim, {})
    causal = causal and not block_mask
    return Config(
        dtype, head_dim, causal, page_size, vote, count, block_mask=block_mask, pack=pack, **tuned
    )


def config_reasons(config: Config) -> list[str]:
    """Why there is no kernel for it; empty: there is one."""
    return choice_reasons(
        dtype=(config.dtype, DTYPES),
        head_dim=(config.head_dim, HEAD_DIMS),
        page_size=(config.page_size or PAGE_SIZES[0], PAGE_SIZES),
        **{"heads together": (config.pack, PACKS)},
    )


def problem_config(problem: Problem) -> Config:
    """What is compiled for a problem whose tiles are counted whenever it votes, if its geometry
    says which heads vote together."""
    pack = 1 if problem.geometry is None else problem.geometry.heads
    return config_for(**problem_choices(problem), pack=pack)


def geometry_of(problem: Problem) -> Geometry:
    """The group that votes: one warpgroup's rows, of one head or of those that the problem's own
    geometry has together."""
    config = problem_config(problem)
    return Geometry(ROWS, config.tile_n, config.pack if config.pack in PACKS else 1)


def problem_reasons(problem: Problem) -> list[str]:
    """Why there is no kernel for a problem, whatever the GPU; empty: there is one."""
    reasons = config_reasons(problem_config(problem))
    return reasons + geometry_reasons(problem, geometry_of(problem))


def packing(call: Call) -> int:
    """Heads that share a tile: those that the caller's geometry has together, else as many as pay.

    Packing pays where query rows are so few that most of a tile is empty, and the tiles are more
    than the multiprocessors can take at once: otherwise they end together, however full they are.
    Where there is a vote it would change what is skipped, so it has to be asked for.
    """
    problem = call.problem
    if problem.geometry is not None or problem.vote or problem.block_mask:
        return call.geometry.heads
    pack = math.gcd(call.group_size, ROWS)
    rows = problem_config(problem).tile_m

    def tiles(heads: int) -> int:
        each = sum(-(-r.seqlen_q * heads // rows) for r in call.requests)
        return each * problem.num_heads // heads

    more = tiles(1) > _processors(call.q.device)
    return pack if more and tiles(pack) <= PAYS * tiles(1) else 1


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """The implementation "hopper" of prefill_attention."""
    inputs = Inputs.of(call, out, counters, packing(call))
    if call.spec.block_mask is not None:
        tiles = problem_config(call.problem).warpgroups
        inputs = replace(inputs, lists=group_lists(call, tiles, ROWS))
    return start(inputs)
