"""`blasst bench attention`: times prefill attention on inputs whose skip rate is chosen."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from blasst.kernels.bench import mask_verb
from blasst.kernels.errors import BlasstError, refuse

MIN_TOKENS = 128
MAX_TOKENS = 1 << 20
PAGE_UNIT = 16  # tokens, of every page size in use
DTYPES = ("float32", "bfloat16", "float16")
_ABOUT = """Prefill attention at chosen skip rates; times in milliseconds.

On a CPU: problems smollm2-135m (9 q / 3 kv heads x 64) and llama-8b (32 / 8 x 128), one causal
prompt of each of --lengths over a paged cache. On a GPU: 32 q / 8 kv heads x 128, one causal
prompt unless said otherwise: 8k, 16k, 32k, 64k, 128k, 8k-full (two requests, not causal), 16k-hd64
and 64k-hd64 (head_dim 64), 64k-page16, -page32, -page64, -page128, -page256 (paged keys).

Peers: fa4, cudnn, flex (FlexAttention in Triton), vllm-fa3, torch-sdpa, vllm-cpu; all dense, each
loaded only when asked for, and left out with a reason when it cannot be."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `blasst bench`."""
    parser.description = (
        "Benchmarks. Each round runs every contender once, in another order; medians are shown."
    )
    parser.epilog = "exit codes: 0 measured, 1 an implementation cannot run here, 2 wrong usage"
    verbs = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    mask_verb.configure(
        verbs.add_parser(
            "masks",
            help="block masks for training: routes, errors, determinism, masks under a vote",
            description="Masked attention, B=1, H=16, D=128, bfloat16 (float32 on a CPU).",
            epilog=parser.epilog,
        )
    )
    attention = verbs.add_parser(
        "attention",
        help="prefill attention: dense, with a vote at chosen skip rates, and peers",
        description=_ABOUT,
        epilog=parser.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = attention.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where (default: auto)")
    add("--problem", action="append", metavar="NAME", help="may be repeated (default: both of a "
        "CPU's, 64k on a GPU)")  # fmt: skip
    add("--lengths", type=_lengths, default=[4096, 8192, 16384], metavar="N,N",
        help="prompt tokens of a CPU's problems (default: 4096,8192,16384)")  # fmt: skip
    add("--skip-rates", type=_rates, default=[0.0, 0.5, 0.75, 0.95], metavar="R,R",
        help="share of blocks to skip, at least 0, below 1 (default: 0,0.5,0.75,0.95)")  # fmt: skip
    add("--impl", action="append", metavar="NAME", help="implementation; may be repeated, skip "
        "rates are dialled for the first (default: auto)")  # fmt: skip
    add("--dtype", default=None, choices=DTYPES, help="of q, k and v (default: float32 on a CPU, "
        "bfloat16 on a GPU)")  # fmt: skip
    add("--peer", action="append", default=[], metavar="NAME",
        help="may be repeated; ratios are over the first")  # fmt: skip
    add("--pages", type=_pages, default=[], metavar="N,N", help="also time ours on the same keys "
        "in shuffled pages of N tokens")  # fmt: skip
    add("--beside", action="store_true", help="run the first peer (without one: dense) before and "
        "after every two calls of each contender; ratios are over these neighbours, which share "
        "the clock of a power-limited card (default: everything once a round)")  # fmt: skip
    add("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    add("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    add("--markdown", type=Path, default=None, metavar="FILE", help="also write the table here")
    add("--svg", type=Path, default=None, metavar="FILE",
        help="also draw time against skip rate here, with the floor of the GPU")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 cannot run, 2 wrong usage."""
    try:
        import torch

        from blasst.kernels.bench import attention, peers, problems, report
    except ImportError as e:
        return refuse(f"blasst bench needs torch: {e}; install blasst[cpu] or blasst[cuda]", 1)
    if args.benchmark == "masks":
        return mask_verb.run(args, _command(sys.argv[1:]))
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    names = args.problem or list(problems.DEFAULTS[device])
    here = [name for name, shape in problems.PROBLEMS.items() if shape.on == device]
    for kind, chosen, known in (("problem", names, here), ("peer", args.peer, list(peers.PEERS))):
        unknown = [name for name in chosen if name not in known]
        if unknown:
            where = f" on {device}" if kind == "problem" else ""
            known_here = ", ".join(known) + where
            return refuse(f"{kind} {unknown[0]!r} is unknown; choose from {known_here}", 2)
    if args.rounds < 1 or (args.threads is not None and args.threads < 1):
        return refuse("--rounds and --threads must be at least 1", 2)
    if device == "cuda" and not torch.cuda.is_available():
        return refuse("--device cuda: torch finds no GPU here", 1)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    plan = attention.Plan(
        names, args.lengths, args.skip_rates, args.peer, args.impl or ["auto"], device, dtype,
        args.rounds, device == "cpu", args.pages, args.beside,
    )  # fmt: skip
    machine = attention.machine(device)
    try:
        cells, left_out = attention.measure(
            plan, lambda text: print(text, file=sys.stderr, flush=True)
        )
    except BlasstError as e:
        return refuse(str(e), 1)
    table = report.markdown(cells, machine, left_out, _command(sys.argv[1:]))
    if args.markdown is not None:
        args.markdown.write_text(table)
    if args.svg is not None:
        args.svg.write_text(report.svg(cells, floor=device == "cuda"))
    result = {
        "where": machine, "left_out": left_out, "cells": [asdict(cell) for cell in cells],
    }  # fmt: skip
    print(json.dumps(result, indent=1) if args.json else table)
    return 0


def _command(argv: list[str]) -> str:
    """The command that repeats the table, without the place that it was written to."""
    kept = list(argv)
    for option in ("--markdown", "--svg"):
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return "blasst " + shlex.join(kept)


def _lengths(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,N; give tokens such as 4096") from None
    if not all(MIN_TOKENS <= n <= MAX_TOKENS for n in values):
        raise argparse.ArgumentTypeError(f"lengths must be {MIN_TOKENS} to {MAX_TOKENS} tokens")
    return values


def _pages(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not N,N; give page sizes such as 16"
        ) from None
    if not all(n >= PAGE_UNIT and n % PAGE_UNIT == 0 for n in values):
        raise argparse.ArgumentTypeError(f"page sizes must be multiples of {PAGE_UNIT}")
    return values


def _rates(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not R,R; give shares such as 0.5") from None
    if not all(0.0 <= rate < 1.0 for rate in values):
        raise argparse.ArgumentTypeError("skip rates must be at least 0 and below 1")
    return values
