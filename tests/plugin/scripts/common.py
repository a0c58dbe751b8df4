"""What the engine scripts share: in-process engines, tokens and statistics pages as data."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="INFO",
)

MODEL = os.environ.get("TINY_MODEL", "")


def engine(backend: str = "blasst", **options: Any) -> Any:
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": MODEL,
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 384,
        "enforce_eager": True,
        "attention_backend": backend,
        "seed": 0,
    }
    return LLM(**(settings | options))


def prompts(lengths: Sequence[int], seed: int = 1) -> list[dict[str, list[int]]]:
    """Token-id prompts of these lengths, all different."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(3, 250, (n,), generator=generator).tolist()}
        for n in lengths
    ]


def params(max_tokens: int = 12, **extra: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None
    )


def outputs(llm: Any, given: Any, wanted: Any) -> list[Any]:
    return llm.generate(given, wanted, use_tqdm=False)


def tokens(results: Sequence[Any]) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in results]


def pages(kind: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """This process's pages of a kind (or all of a folder), after the writers had time to write."""
    from blasst.kernels.exchange.stats import iter_stats
    from blasst.plugin.settings import Settings

    time.sleep(0.3)
    where = folder or Settings.from_env().stats_dir
    assert where is not None
    return [
        {"name": p.name, "labels": dict(p.labels), "alive": p.alive, **dict(p.arrays.items())}
        for p in iter_stats(where, kind)
    ]


def drop(llm: Any) -> None:
    del llm
    gc.collect()


def finish(result: dict[str, Any]) -> NoReturn:
    """Ends the process as Python would, but for native threads that torch has left running: now and
    then one of them aborts it (`terminate called without an active exception`)."""
    print("RESULT " + json.dumps(result), flush=True)
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)
