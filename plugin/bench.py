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
from blasst.plugin.bench_engines import (
    ENVIRONMENT,
    GRAPHS,
    STATS_INTERVAL_S,
    make_engine,
    stock_backend,
    unusable_reason,
    write_llama,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("overhead", "skip-rate"))
    parser.add_argument(
        "model", help="a Hugging Face folder, or llama-8b: that shape with dummy weights"
    )
    parser.add_argument("--graphs", choices=list(GRAPHS), default="eager", help="what is captured")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once (default: 1)")
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
    reason = unusable_reason(args.model)
    if reason is not None:
        parser.error(reason)
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    lengths = [int(x) for x in args.lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="blasst-bench-", ignore_cleanup_errors=True) as state:
        os.environ["VLLM_BLASST_STATE_DIR"] = state
        args.dummy = args.model == "llama-8b"
        if args.dummy:
            args.model = str(write_llama(Path(state) / "model", args.dtype))
        result = (
            _overhead(args, lengths)
            if args.what == "overhead"
            else _skip_rate(args, lengths, state)
        )
    json.dump(result, sys.stdout, indent=1)
    print()
    return 0


def _overhead(args: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    stock_name = stock_backend()
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
                    seconds, output = _timed(engines[name], [prompt] * args.batch, tokens)
                    texts[name].append(output)
                    if i:  # the first round warms up
                        times[name].append(seconds)
            row: dict[str, Any] = {"prompt_tokens": length, "figure": kind}
            for name, values in times.items():
                median = statistics.median(values)
                row[name] = median if kind == "ttft_s" else args.batch * (tokens - 1) / median
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
        _timed(engine, prompts[:1], 1)
        cells: dict[float | None, list[float]] = {mag: [] for mag in mags}
        tiles = {mag: [0, 0] for mag in mags}
        before = _tiles(Path(state) / "stats")
        for i, prompt in enumerate(prompts[1:]):
            for mag in mags[i % len(mags) :] + mags[: i % len(mags)]:
                seconds, _ = _timed(engine, [prompt], 1, mag)
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
    return make_engine(
        args.model,
        backend,
        args.graphs,
        dummy=args.dummy,
        dtype=args.dtype,
        max_model_len=max(lengths) + (0 if args.prompts else args.decode_tokens + 8),
        max_num_seqs=max(4, args.batch),
    )


def _timed(
    engine: Any, prompts: list[list[int]], tokens: int, mag: float | None = None
) -> tuple[float, Any]:
    """Seconds until the last prompt has its tokens, and the tokens. Of more than one token the
    time of the first is taken off: what is left is decoding, of prompts cut to 16 tokens."""
    from vllm import SamplingParams

    def generate(max_tokens: int) -> tuple[float, Any]:
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if mag is None else {"blasst_mag": mag},
        )
        given = [{"prompt_token_ids": p if tokens == 1 else p[:16]} for p in prompts]
        started = time.perf_counter()
        outputs = engine.generate(given, params, use_tqdm=False)
        return time.perf_counter() - started, [list(o.outputs[0].token_ids) for o in outputs]

    if tokens == 1:
        return generate(1)
    generate(1)
    first, _ = generate(1)
    seconds, found = generate(tokens)
    return seconds - first, found


def _tiles(folder: Path) -> tuple[int, int]:
    """(visited, skipped) over all ranks, once the pages have caught up with the last step."""
    time.sleep(4 * STATS_INTERVAL_S)
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
    vocabulary = int(json.loads((Path(args.model) / "config.json").read_text())["vocab_size"])
    rng = random.Random(length)
    top = min(4000, vocabulary)
    return [[rng.randrange(top // 4, top) for _ in range(length)] for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
