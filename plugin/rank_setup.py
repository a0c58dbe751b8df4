"""Run once in each worker, when its layers are known: judge them, tell them, open the page."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from blasst.kernels.exchange.layout import LAYER_REASONS
from blasst.kernels.plan import Plan, plan
from blasst.kernels.support import unsupported_reasons
from blasst.kernels.types import Impl, Problem
from blasst.plugin.eligibility import Verdict, judge_all, table
from blasst.plugin.identity import identity
from blasst.plugin.log import logger
from blasst.plugin.metadata import LayerVote
from blasst.plugin.rank import Rank, RankShape
from blasst.plugin.settings import AUTO, IMPL, STRICT, Settings


class NotEligibleError(RuntimeError):
    """A layer cannot skip, and VLLM_BLASST_STRICT=1 forbids to run it dense."""


class KernelError(RuntimeError):
    """The kernel that was chosen does not run here; the message says what to do."""


def set_up_rank(vllm_config: Any, device: Any, known: Rank | None) -> Rank:
    """The worker's Rank; every eligible layer's `impl.blasst` says where to count and on what.

    `known`: of an earlier call; vLLM sets the cache up twice when it profiles CUDA graphs.
    Raises NotEligibleError under strict.
    """
    settings = Settings.from_env()
    layers = vllm_config.compilation_config.static_forward_context
    verdicts = judge_all(layers, vllm_config, settings.impl)
    if known is None:
        _report(verdicts, vllm_config, settings)
    indices = layer_indices([v.name for v in verdicts])
    rank = known or Rank(
        _shape(verdicts, indices, vllm_config, layers),
        settings.stats_dir,
        settings.stats_interval_s,
        device,
        keeps_page=settings.state_dir is not None,
    )
    for verdict in verdicts:
        if verdict.impl is not None and verdict.problem is not None:
            at = indices[verdict.name] - rank.shape.first_layer
            layer = layers[verdict.name].impl
            how = plan(verdict.problem, verdict.impl, float(layer.scale))
            layer.blasst = LayerVote(how, rank.counters.layer(at))
            if known is None:
                _try_out(how, device)
    return rank


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Compilers write for terminals."""


@functools.cache
def _try_out(how: Plan, device: Any) -> None:
    """Compiles and runs the kernel once, so that no request has to wait for it or fails in it."""
    if torch.device(device).type == "cpu":
        return
    started = time.perf_counter()
    try:
        how.rehearse(device)
        torch.accelerator.synchronize(device)
    except Exception as e:  # the compilers' errors have no base class in common
        why = " ".join(_COLOUR.sub("", str(e)).split())[:400] or type(e).__name__
        raise KernelError(
            f"the {how.impl} kernel does not run for head_dim {how.problem.head_dim}, "
            f"{how.problem.dtype}, pages of {how.problem.page_size}: {why}; set {IMPL}=triton, or "
            "choose another --attention-backend"
        ) from e
    logger.info(
        "blasst: the %s kernel is ready after %.1f s", how.impl, time.perf_counter() - started
    )


def layer_indices(names: Sequence[str]) -> dict[str, int]:
    """Index of each layer in the whole model: the number in its name, if all differ in it."""
    numbers = {name: [int(p) for p in name.split(".") if p.isdecimal()] for name in names}
    if all(len(n) == 1 for n in numbers.values()):
        found = {name: n[0] for name, n in numbers.items()}
        if len(set(found.values())) == len(found):
            return found
    return {name: i for i, name in enumerate(names)}


def _report(verdicts: Sequence[Verdict], vllm_config: Any, settings: Settings) -> None:
    dense = [v for v in verdicts if v.impl is None]
    if settings.strict and dense:
        raise NotEligibleError(
            f"{STRICT}=1 and {len(dense)} of {len(verdicts)} layers cannot skip, such as "
            f"{dense[0].name}: {'; '.join(dense[0].reasons)}; unset it to run them dense"
        )
    if vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size == 0:
        logger.info("%s", table(verdicts))
        slow = [v.problem for v in verdicts if v.impl == Impl.CPU_TORCH and v.problem is not None]
        if slow and settings.impl == AUTO:
            logger.warning("blasst: %s", slower(slow[0]))


def slower(problem: Problem) -> str:
    """Why a CPU runs cpu-torch."""
    reasons = "; ".join(unsupported_reasons(problem, Impl.CPU))
    return f"skips on cpu-torch, which is slower than cpu: {reasons}"


def _shape(
    verdicts: Sequence[Verdict],
    indices: dict[str, int],
    vllm_config: Any,
    layers: Any,
) -> RankShape:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    able = [v for v in verdicts if v.impl is not None]
    heads = max((int(layers[v.name].impl.num_kv_heads) for v in able), default=1)
    numbers = [indices[v.name] for v in verdicts] or [0]
    tp = parallel.tensor_parallel_size
    names = model.served_model_name
    geometries = {
        plan(v.problem, v.impl, 1.0).geometry
        for v in able
        if v.problem is not None and v.impl is not None
    }
    return RankShape(
        engine=str(parallel.data_parallel_index),
        rank=str(parallel.rank),
        model_name=str(names if isinstance(names, str) else names[0]),
        num_layers=max(numbers) - min(numbers) + 1,
        num_kv_heads=heads,
        first_layer=min(numbers),
        # With fewer kv heads than ranks each head is held by several of them.
        first_kv_head=(parallel.rank % tp) * model.get_total_num_kv_heads() // tp,
        impl=able[0].impl or "" if able else "none",
        refusal="" if able else _refusal(verdicts),
        geometry=geometries.pop() if len(geometries) == 1 else None,
        layers_voting=len(able),
        layers_dense=tuple(
            sum(v.impl is None and v.kind == reason for v in verdicts) for reason in LAYER_REASONS
        ),
        served=identity(vllm_config),
    )


def _refusal(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "this worker has no attention layers"
    return "; ".join(verdicts[0].reasons)
