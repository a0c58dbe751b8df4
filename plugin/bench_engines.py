"""Engines for benchmarks: one process, stock and ours side by side, dummy weights if asked."""

from __future__ import annotations

import json
import time
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


LEAST_SHARE = 0.05
"""Of the GPU, which must be free at the start of an engine whose cache has a named size."""

LARGE = 16
"""Layers of the Llama-3.1-8B width that take a CPU minutes to make and hours to run."""


def too_large_for_cpu(layers: int) -> str | None:
    """Why a model of that width and so many layers is not for this machine; None: it is."""
    if layers < LARGE or not on_cpu():
        return None
    return (
        f"{layers} layers of the Llama-3.1-8B width need a GPU, and vLLM sees none here; "
        "give a small model, or run it where nvidia-smi lists one"
    )


def no_model_reason(folder: str | Path) -> str | None:
    """Why this is no model's folder; None: it is one."""
    if (Path(folder) / "config.json").is_file():
        return None
    return f"{folder} holds no config.json; give the folder of a Hugging Face model"


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def unusable_reason(model: str) -> str | None:
    """Why a benchmark cannot run this model, a folder or llama-8b, here; None: it can."""
    if model == "llama-8b":
        return too_large_for_cpu(LLAMA_8B["num_hidden_layers"])
    return no_model_reason(model)


WAIT_S = 300


def wait_for(path: Path | None) -> None:
    """Until this file exists, at most WAIT_S: who shares the machine has ended its work then."""
    end = time.monotonic() + WAIT_S
    while path is not None and not path.exists() and time.monotonic() < end:
        time.sleep(0.2)


def stock_backend() -> str:
    """vLLM's own backend that ours is compared with."""
    return "CPU_ATTN" if on_cpu() else "FLASH_ATTN"


def write_llama(folder: Path, dtype: str, **changes: Any) -> Path:
    """A model folder of the Llama-3.1-8B shape, with these changes and without weights."""
    folder.mkdir()
    config = {**LLAMA_8B, "torch_dtype": dtype, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LORA_RANK = 8


LORA_NOISE = 0.2


def write_lora(folder: Path, model: Path, deviation: float = LORA_NOISE) -> None:
    """A random adapter of q and v for a Llama; deviation: standard, of its entries."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    rows = {"q_proj": heads * dim, "v_proj": config["num_key_value_heads"] * dim}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in rows.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (LORA_RANK, hidden)), ("B", (out, LORA_RANK))):
                noise = torch.randn(shape, generator=generator)
                tensors[f"{at}.lora_{part}.weight"] = deviation * noise
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": LORA_RANK,
                "lora_alpha": LORA_RANK,
                "target_modules": list(rows),
                "bias": "none",
            }
        )
    )


def lora_in_order() -> None:
    """From now on engines of this process multiply with an adapter's first matrix in one part.

    vLLM's kernel adds 8 or 64 parts of each product by atomic additions, in whatever order they
    end. What VLLM_BATCH_INVARIANT=1 changes there is changed here alone: that variable would give
    the engine other matrix products and attention as well. Raises AttributeError where vLLM has no
    such switch.
    """
    from vllm.lora.ops.triton_ops import utils

    utils.is_batch_invariant  # noqa: B018  # a release without it would be timed unchanged
    utils.is_batch_invariant = True
    utils.get_lora_op_configs.cache_clear()


def make_engine(
    model: str | Path,
    backend: str,
    graphs: str,
    *,
    dummy: bool = False,
    memory_share: float = MEMORY_SHARE,
    kv_bytes: int | None = None,
    **options: Any,
) -> Any:
    """vLLM's LLM, without prefix caching unless `options` ask for it. dummy: random weights.

    memory_share: of each GPU. kv_bytes: of each rank's cache; then nothing is measured at the
    start, which processes that share a GPU would disturb.
    """
    from vllm import LLM

    given: dict[str, Any] = {**GRAPHS[graphs], "enable_prefix_caching": False, **options}
    if not on_cpu():
        given["gpu_memory_utilization"] = memory_share if kv_bytes is None else LEAST_SHARE
        given["kv_cache_memory_bytes"] = kv_bytes
    if dummy:
        given["load_format"] = "dummy"
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        attention_backend=backend,
        **given,
    )


def share_weights(engine: Any, other: Any) -> None:
    """`other`, an eager engine of this process with the same model, gives up its weights for
    those of `engine`."""
    mine: dict[str, Any] = {}
    engine.apply_model(lambda model: mine.update(model.named_parameters()))

    def take(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = mine[name].data

    other.apply_model(take)


def limit_steps(engine: Any, tokens: int) -> None:
    """Steps of an engine of this process have at most so many tokens from now on; no more than it
    was made for."""
    engine.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = tokens


def tiles(engine: Any) -> tuple[int, int]:
    """(visited, skipped) since the start of an engine of this process, from where the kernel
    counts: unlike the statistics page that is at once, and the device does not fall idle."""

    def count(model: Any) -> tuple[int, int]:
        votes = (getattr(getattr(m, "impl", None), "blasst", None) for m in model.modules())
        sums = [vote.counters.sum(0).tolist() for vote in votes if vote is not None]
        return sum(s[0] for s in sums), sum(s[1] for s in sums)

    found: tuple[int, int] = engine.apply_model(count)[0]
    return found
