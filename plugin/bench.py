"""What the backend costs and skips inside vLLM, measured in one process.

    python -P -m blasst.plugin.bench overhead MODEL     ours without a threshold against stock
    python -P -m blasst.plugin.bench skip-rate MODEL    skip rate and time to first token per MAG
Both print one JSON object; times are medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.layout import RANK
from blasst.kernels.exchange.stats import iter_stats

ENGINE_ENV = {
    # One process: no transport between the clock and the engine.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_BLASST_MIN_CONTEXT": "1",
    "VLLM_BLASST_STATS_INTERVAL_S": "0.05",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("overhead", "skip-rate"))
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument(
        "--lengths", default="2048", help="prompt lengths in tokens, comma separated"
    )
    parser.add_argument("--mags", default="14000,10000,7000,4500,2500,1500,1000")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each kind (median taken)")
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL of `blasst ruler generate`, instead of random ids"
    )
    args = parser.parse_args(argv)
    os.environ.update(ENGINE_ENV)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    lengths = [int(x) for x in args.lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="blasst-bench-") as state:
        os.environ["VLLM_BLASST_STATE_DIR"] = state
        result = (
            _overhead(args, lengths)
            if args.what == "overhead"
            else _skip_rate(args, lengths, state)
        )
    json.dump(result, sys.stdout, indent=1)
    print()
    return 0


def _overhead(args: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    stock_name = "CPU_ATTN" if _on_cpu() else "FLASH_ATTN"
    engines = {
        "stock": _engine(args, lengths, stock_name),
        "blasst": _engine(args, lengths, "blasst"),
    }
    rows = []
    for length in lengths:
        prompts = _prompts(args, length, args.repeats + 1)
        for kind, tokens in (("ttft_s", 1), ("decode_tokens_per_s", args.decode_tokens)):
            times: dict[str, list[float]] = {name: [] for name in engines}
            texts: dict[str, list[Any]] = {name: [] for name in engines}
            for i, prompt in enumerate(prompts):
                for name in sorted(engines, reverse=bool(i & 1)):
                    seconds, output = _timed(engines[name], prompt, tokens)
                    texts[name].append(output)
                    if i:  # the first round warms up
                        times[name].append(seconds)
            row: dict[str, Any] = {"prompt_tokens": length, "figure": kind}
            for name, values in times.items():
                median = statistics.median(values)
                row[name] = median if kind == "ttft_s" else (tokens - 1) / median
            ratios = [b / s for b, s in zip(times["blasst"], times["stock"], strict=True)]
            row["time_ratio_median"] = statistics.median(ratios)
            row["time_ratio_range"] = [min(ratios), max(ratios)]
            row["tokens_equal"] = texts["stock"] == texts["blasst"]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return {"what": "overhead", "stock": stock_name, "repeats": args.repeats, "rows": rows}


def _skip_rate(args: argparse.Namespace, lengths: Sequence[int], state: str) -> dict[str, Any]:
    engine = _engine(args, lengths, "blasst")
    mags: list[float | None] = [None, *(float(m) for m in args.mags.split(","))]
    rows = []
    for length in lengths:
        prompts = _prompts(args, length, args.repeats + 1)
        _timed(engine, prompts[0], 1)
        cells: dict[float | None, list[float]] = {mag: [] for mag in mags}
        tiles = {mag: [0, 0] for mag in mags}
        before = _tiles(Path(state) / "stats")
        for i, prompt in enumerate(prompts[1:]):
            for mag in mags[i % len(mags) :] + mags[: i % len(mags)]:
                seconds, _ = _timed(engine, prompt, 1, mag)
                after = _tiles(Path(state) / "stats")
                cells[mag].append(seconds)
                tiles[mag] = [t + a - b for t, a, b in zip(tiles[mag], after, before, strict=True)]
                before = after
        dense = statistics.median(cells[None])
        for mag in mags:
            visited, skipped = tiles[mag]
            row = {
                "prompt_tokens": len(prompts[1]),
                "mag": mag,
                "tiles_visited": visited,
                "skip_rate": skipped / visited if visited else None,
                "ttft_s": statistics.median(cells[mag]),
                "ttft_over_dense": statistics.median(cells[mag]) / dense,
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return {"what": "skip-rate", "repeats": args.repeats, "rows": rows}


def _engine(args: argparse.Namespace, lengths: Sequence[int], backend: str) -> Any:
    from vllm import LLM

    return LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=max(lengths) + (0 if args.prompts else args.decode_tokens + 8),
        max_num_seqs=4,
        enable_prefix_caching=False,
        enforce_eager=True,
        attention_backend=backend,
        disable_log_stats=True,
    )


def _timed(
    engine: Any, prompt: list[int], tokens: int, mag: float | None = None
) -> tuple[float, Any]:
    from vllm import SamplingParams

    def params(max_tokens: int) -> Any:
        return SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if mag is None else {"blasst_mag": mag},
        )

    if tokens > 1:  # decode speed: the prefill is short, and its token is not counted
        prompt = prompt[:16]
        engine.generate({"prompt_token_ids": prompt}, params(1), use_tqdm=False)
        started = time.perf_counter()
        (out,) = engine.generate({"prompt_token_ids": prompt}, params(1), use_tqdm=False)
        first = time.perf_counter() - started
        started = time.perf_counter()
        (out,) = engine.generate({"prompt_token_ids": prompt}, params(tokens), use_tqdm=False)
        return time.perf_counter() - started - first, list(out.outputs[0].token_ids)
    started = time.perf_counter()
    (out,) = engine.generate({"prompt_token_ids": prompt}, params(1), use_tqdm=False)
    return time.perf_counter() - started, list(out.outputs[0].token_ids)


def _tiles(folder: Path) -> tuple[int, int]:
    """(visited, skipped) over all ranks, once the pages have caught up with the last step."""
    time.sleep(4 * float(ENGINE_ENV["VLLM_BLASST_STATS_INTERVAL_S"]))
    flat = [page.arrays["tiles"] for page in iter_stats(folder, RANK)]
    return int(sum(sum(t[0::2]) for t in flat)), int(sum(sum(t[1::2]) for t in flat))


def _prompts(args: argparse.Namespace, length: int, count: int) -> list[list[int]]:
    if args.prompts is not None:
        lines = args.prompts.read_text().splitlines()
        found = [ids for ids in (json.loads(x)["prompt"] for x in lines) if len(ids) <= length]
        if len(found) < count:
            sys.exit(
                f"blasst: error: {args.prompts} holds {len(found)} prompts of at most {length} "
                f"tokens, {count} are needed; generate more or lower --repeats"
            )
        return sorted(found, key=len, reverse=True)[:count]
    rng = random.Random(length)
    return [[rng.randrange(100, 4000) for _ in range(length)] for _ in range(count)]


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


if __name__ == "__main__":
    sys.exit(main())
