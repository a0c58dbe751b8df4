"""Tensor parallelism over two spawned workers, against the stock engine of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"VLLM_BLASST_MIN_CONTEXT": "64", "VLLM_BLASST_STATS_INTERVAL_S": "0.1"}

from common import drop, engine, finish, outputs, pages, params, prompts, tokens


def main() -> None:
    given = prompts((700, 40, 450))
    stock = engine("CPU_ATTN")
    want = tokens(outputs(stock, given, params()))
    drop(stock)
    one = engine()
    outputs(one, given, params(blasst_mag=2500))
    (single,) = pages("rank")
    drop(one)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    two = engine(tensor_parallel_size=2)
    plain = tokens(outputs(two, given, params()))
    outputs(two, given, params(blasst_mag=2500))
    ranks = [p for p in pages("rank") if p["name"] != single["name"]]
    two.llm_engine.engine_core.shutdown()
    finish({"stock": want, "plain": plain, "single": single, "ranks": ranks})


if __name__ == "__main__":
    main()
