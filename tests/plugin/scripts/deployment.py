"""Thresholds of a deployment: environment, desired-state file; and a cache too small for all."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {
    "VLLM_BLASST_MIN_CONTEXT": "64",
    "VLLM_BLASST_STATS_INTERVAL_S": "0.1",
    "VLLM_BLASST_SHARE_PREFIX_CACHE": "1",
    "VLLM_BLASST_MAG": "4500",
}

from common import drop, engine, finish, outputs, pages, params, prompts, tokens

FOLDER = Path(os.environ["VLLM_BLASST_STATE_DIR"])


def main() -> None:
    given = prompts([300] * 5, seed=7)
    stock = engine("CPU_ATTN", max_model_len=512, enable_prefix_caching=False)
    want = tokens(outputs(stock, given, params(60)))
    drop(stock)
    result: dict[str, Any] = {"stock": want, **deployment(), **preemption(given)}
    result["leftover"] = sorted(p.name for p in (FOLDER / "stats").iterdir())
    finish(result)


def deployment() -> dict[str, Any]:
    from blasst.kernels.exchange.desired import FILE_NAME, DesiredState, write_desired
    from blasst.kernels.threshold import SkipThreshold

    llm = engine()
    seen: dict[str, Any] = {}

    def ask(name: str, **extra: Any) -> None:
        (out,) = outputs(llm, prompts([400], seed=11), params(2, **extra))
        seen[name] = {"cached": out.num_cached_tokens, **front()}

    def write(generation: int, threshold: SkipThreshold | None, **more: Any) -> None:
        write_desired(FOLDER, DesiredState(generation, threshold, **more))
        time.sleep(0.5)

    ask("environment")
    ask("request", blasst_lambda=0.05)
    ask("off", blasst_scale="off")
    write(1, SkipThreshold("mag", 2500))
    seen["read"] = front()
    ask("file")
    write(2, SkipThreshold("mag", 2500), min_context=500)
    ask("short")
    write(3, None)
    ask("dense")
    write(4, SkipThreshold("scale", 40))
    ask("scale")
    (FOLDER / FILE_NAME).write_text("{")
    time.sleep(0.5)
    ask("corrupt")
    drop(llm)
    return {"seen": seen}


def front() -> dict[str, Any]:
    from blasst.kernels.exchange.layout import LAMBDA_CLASSES, LENGTH_CLASSES

    (page,) = pages("front")
    mag = page["threshold_mag"][0]
    admitted = page["requests_admitted"]
    width = len(LENGTH_CLASSES)
    by_class = {
        name: sum(admitted[i * width : (i + 1) * width]) for i, name in enumerate(LAMBDA_CLASSES)
    }
    return {
        "classes": {k: v for k, v in by_class.items() if v},
        "read": page["generation_read"][0],
        "stamped": page["generation_stamped"][0],
        "errors": page["desired_read_errors"][0],
        "mag": None if math.isnan(mag) else mag,
    }


def preemption(given: Any) -> dict[str, Any]:
    llm = engine(
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=22,
        enable_prefix_caching=False,
    )
    before = rank()
    got = tokens(outputs(llm, given, params(60, blasst_lambda=0)))
    middle = rank()
    outputs(llm, given, params(60, blasst_mag=2500))
    after = rank()
    drop(llm)
    return {"preempted": got, "counts": [before, middle, after]}


def rank() -> dict[str, Any]:
    newest = max(pages("rank"), key=lambda p: p["labels"]["pid"])
    return {k: newest[k][0] for k in ("prefill_tokens_vote", "prefill_tokens_dense")} | {
        "skipped": sum(newest["tiles"][1::2])
    }


if __name__ == "__main__":
    main()
