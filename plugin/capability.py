"""What speaks against skipping in every layer of an engine, seen from its configuration alone."""

from __future__ import annotations

import os
from typing import Any

from blasst.kernels.dispatch import AUTO, choose
from blasst.kernels.errors import BlasstError
from blasst.kernels.support import unsupported_reasons
from blasst.kernels.types import Impl, Problem

PLAIN_KV_DTYPES = ("auto", "float32", "float16", "bfloat16")


_OF_DEVICE = {"cpu": (Impl.CPU,), "cuda": (Impl.BLACKWELL, Impl.HOPPER, Impl.TRITON)}


def chosen_impl(problem: Problem, impl: str) -> tuple[Impl | None, list[str]]:
    """The implementation that runs this problem, or why none (or not the one asked for) does.

    Of an automatic choice only the reasons of the device's own implementations are told.
    """
    try:
        return choose(problem, impl).impl, []
    except BlasstError as e:
        candidates = _OF_DEVICE.get(problem.device_type, ()) if impl == AUTO else ()
        reasons = [f"{c}: {r}" for c in candidates for r in unsupported_reasons(problem, c)]
        return None, reasons or list(e.reasons)


def device() -> tuple[str, tuple[int, int] | None]:
    """Device type and compute capability, from vLLM's platform: it does not initialise CUDA."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        found = current_platform.get_device_capability()
        return "cuda", (found.major, found.minor) if found is not None else None
    return str(current_platform.device_type), None


def engine_reasons(vllm_config: Any) -> list[str]:
    """Options of the engine under which batch rows are not whole requests, keys are split, or what
    a vote depends on is not allowed to matter."""
    parallel = vllm_config.parallel_config
    reasons = []
    for option, name in (
        ("prefill_context_parallel_size", "prefill context parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
    ):
        if getattr(parallel, option, 1) > 1:
            reasons.append(f"{name} splits the keys of a request over ranks")
    if getattr(parallel, "use_ubatching", False):
        reasons.append("dual-batch overlap splits the rows of a batch")
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        reasons.append("--kv-sharing-fast-prefill drops query rows")
    if getattr(vllm_config, "speculative_config", None) is not None and device()[0] == "cuda":
        reasons.append(
            "speculative decoding: a captured graph that verifies drafts may run a short prefill"
        )
    if os.environ.get("VLLM_BATCH_INVARIANT", "").strip() not in ("", "0"):
        reasons.append(
            "VLLM_BATCH_INVARIANT: rows vote together as chunks cut them, and that depends on the "
            "batch"
        )
    model = vllm_config.model_config
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append("prefix-LM attention is not causal inside images")
    if getattr(model, "rswa_window", None) is not None:
        reasons.append("reference sliding window attention")
    return reasons


def model_reasons(vllm_config: Any, impl: str) -> list[str]:
    """Why no layer can skip; empty: some may, each is looked at once it is loaded."""
    model = vllm_config.model_config
    reasons = engine_reasons(vllm_config)
    if getattr(model, "runner_type", "generate") != "generate":
        return [*reasons, f"the model runs as {model.runner_type}, only generation is admitted"]
    if model.is_attention_free:
        return [*reasons, "the model has no attention"]
    if model.use_mla:
        return [*reasons, "multi-head latent attention (MLA)"]
    text = model.hf_text_config
    if getattr(text, "attn_logit_softcapping", None):
        reasons.append(f"logit soft cap {text.attn_logit_softcapping:g}")
    if model.get_sliding_window() and not _has_full_layers(text):
        reasons.append(f"sliding window of {model.get_sliding_window()} tokens in every layer")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in PLAIN_KV_DTYPES:
        reasons.append(f"the KV cache is quantised ({cache_dtype})")
    return reasons + chosen_impl(_problem(vllm_config), impl)[1]


def _has_full_layers(text_config: Any) -> bool:
    kinds = getattr(text_config, "layer_types", None)
    return kinds is not None and "full_attention" in kinds


def _problem(vllm_config: Any) -> Problem:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device_type, capability = device()
    return Problem(
        head_dim=model.get_head_size(),
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        dtype=str(model.dtype).removeprefix("torch."),
        device_type=device_type,
        capability=capability,
        page_size=vllm_config.cache_config.block_size,
    )
