"""Two engines of ours and a stock one alive in one process; statistics removed while serving."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"VLLM_BLASST_MIN_CONTEXT": "64", "VLLM_BLASST_STATS_INTERVAL_S": "0.05"}

from common import engine, finish, outputs, pages, params, prompts


def main() -> None:
    first = engine(served_model_name="first")
    second = engine(served_model_name="second")
    stock = engine("CPU_ATTN")
    given = prompts([100])
    for llm, extra in ((first, {"blasst_mag": 2500}), (second, {}), (first, {}), (stock, {})):
        outputs(llm, given, params(2, **extra))
    result = {"before": totals()}
    shutil.rmtree(Path(os.environ["VLLM_BLASST_STATE_DIR"]) / "stats")
    outputs(second, given, params(2))
    finish(result | {"after": totals()})


def totals() -> dict[str, Any]:
    """Per model: prompt tokens with the vote and dense, requests admitted and timed."""
    found: dict[str, Any] = {}
    for page in pages("rank"):
        name = page["labels"]["model_name"]
        found[name] = [page["prefill_tokens_vote"][0], page["prefill_tokens_dense"][0]]
    for page in pages("front"):
        name = page["labels"]["model_name"]
        found[name] += [sum(page["requests_admitted"]), sum(page["ttft_count"])]
    return found


if __name__ == "__main__":
    main()
