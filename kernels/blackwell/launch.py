"""Host side of the Blackwell kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from blasst.kernels.blackwell.config import ROWS, TILES, Config
from blasst.kernels.block_lists import group_lists
from blasst.kernels.call import Call
from blasst.kernels.cute.host import Inputs, choice_reasons, geometry_reasons, problem_choices
from blasst.kernels.types import Geometry, Problem

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
PAGE_UNIT = 16  # keys: the smallest window that a copy brings


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """The implementation "blackwell" of prefill_attention."""
    lists = None if call.spec.block_mask is None else group_lists(call, TILES, ROWS)
    return prefill(replace(Inputs.of(call, out, counters), lists=lists))


def prefill(inputs: Inputs, *, cross_p: bool = True) -> torch.Tensor:
    """Fills inputs.out, returns lse. cross_p: as in Config."""
    config = config_for(**inputs.choices(), cross_p=cross_p, trace=inputs.trace is not None)
    return inputs.start(config_reasons(config), lambda: _compiled(config))


def config_for(*, causal: bool, block_mask: bool, **choices: Any) -> Config:
    """What is compiled; choices: fields of Config. The lists of a block mask say what causality
    hides, so that one build serves both."""
    return Config(causal=causal and not block_mask, block_mask=block_mask, **choices)


def _compiled(config: Config) -> Any:
    from blasst.kernels.blackwell.compile import compile_prefill

    return compile_prefill(config)


def config_reasons(config: Config) -> list[str]:
    """Why there is no kernel for it; empty: there is one."""
    reasons = choice_reasons(dtype=(config.dtype, DTYPES), head_dim=(config.head_dim, HEAD_DIMS))
    if config.page_size % PAGE_UNIT:
        reasons.append(f"page_size {config.page_size} is not a multiple of {PAGE_UNIT}")
    return reasons + order_reasons(config)


def order_reasons(config: Config) -> list[str]:
    """Why the products of a visit may not be issued in this order; empty: they may."""
    order = config.plan.order
    if sorted(order) != [("pv", 0), ("pv", 1), ("qk", 0), ("qk", 1)]:
        return [f"order {order} does not name each product of both tiles once"]
    at = {product: place for place, product in enumerate(order)}
    reasons = []
    for kind in ("qk", "pv"):
        if at[kind, 0] > at[kind, 1]:
            reasons.append(f"{kind} of tile 1 before tile 0: stages are released by tile 1")
    if config.cross_p and not at["qk", 0] < at["pv", 0] < at["qk", 1] < at["pv", 1]:
        reasons.append(f"order {order} overwrites a P in the other tile's scores before it is read")
    if not config.cross_p and any(at["pv", t] > at["qk", t] for t in (0, 1)):
        reasons.append(f"order {order} overwrites a P in its own scores before it is read")
    return reasons


def geometry_of(problem: Problem) -> Geometry:
    """The group that votes: one query tile."""
    return Geometry(ROWS, config_for(**problem_choices(problem)).tile_n)


def problem_reasons(problem: Problem) -> list[str]:
    """Why there is no kernel for a problem, whatever the GPU; empty: there is one."""
    reasons = config_reasons(config_for(**problem_choices(problem)))
    return reasons + geometry_reasons(problem, geometry_of(problem))
