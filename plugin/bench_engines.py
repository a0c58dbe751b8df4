"""Engines for benchmarks: one process, stock and ours side by side, dummy weights if asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATS_INTERVAL_S = 0.05
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no transport between the clock and the engine
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_BLASST_MIN_CONTEXT": "1",
    "VLLM_BLASST_STATS_INTERVAL_S": str(STATS_INTERVAL_S),
}
LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""The shape of Llama-3.1-8B; its rope scaling, which costs no time, is left out."""

GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "decode": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}
"""How much of a step is captured: nothing, decodes, or what vLLM captures unasked."""

MEMORY_SHARE = 0.42
"""Of the GPU, for each of two engines with large models."""


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def stock_backend() -> str:
    """vLLM's own backend that ours is compared with."""
    return "CPU_ATTN" if on_cpu() else "FLASH_ATTN"


def write_llama(folder: Path, dtype: str, **changes: Any) -> Path:
    """A model folder of the Llama-3.1-8B shape, with these changes and without weights."""
    folder.mkdir()
    config = {**LLAMA_8B, "torch_dtype": dtype, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_engine(
    model: str | Path,
    backend: str,
    graphs: str,
    *,
    dummy: bool = False,
    memory_share: float = MEMORY_SHARE,
    **options: Any,
) -> Any:
    """vLLM's LLM without prefix caching. dummy: random weights; memory_share: of each GPU."""
    from vllm import LLM

    given: dict[str, Any] = {**GRAPHS[graphs], **options}
    if not on_cpu():
        given["gpu_memory_utilization"] = memory_share
    if dummy:
        given["load_format"] = "dummy"
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        attention_backend=backend,
        **given,
    )
