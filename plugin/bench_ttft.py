"""Time to first token on a GPU: vLLM's stock backend against ours at chosen skip rates.

    python -P -m blasst.plugin.bench_ttft --lengths 16384,65536 --out FOLDER
Two engines of one process take turns, on dummy weights of a Llama-3.1-8B shape; `dial` shapes their
keys. Writes ttft.json, ttft.md and ttft.svg after every size.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.layout import RANK
from blasst.kernels.exchange.stats import iter_stats
from blasst.plugin.bench_engines import (
    ENVIRONMENT,
    STATS_INTERVAL_S,
    make_engine,
    stock_backend,
    too_large_for_cpu,
    wait_for,
    write_llama,
)
from blasst.plugin.bench_plot import svg

REHEARSAL = 8
"""Fewer layers than these are narrow ones, for a machine without a GPU."""


@dataclass(frozen=True)
class Contender:
    """name: as in the table; engine: stock or ours; rate: what is dialled; vote: a lambda is
    asked for; dense: our kernel built without a vote, which no request can ask for."""

    name: str
    engine: str
    rate: float = 0.0
    vote: bool = False
    dense: bool = False


@dataclass
class Cell:
    """One line of the table. ttft_s: of the last of `batch` prompts; medians over the rounds.
    mean_ttft_s: of all of the batch, whose prompts came at once."""

    tokens: int
    batch: int
    contender: str
    ttft_s: float
    over_stock: float
    skip_rate: float | None
    times_s: list[float]
    mean_ttft_s: float
    mean_over_stock: float


@dataclass(frozen=True)
class Size:
    """So many prompts of so many tokens at once, in so many timed rounds. names: of the contenders
    besides stock; None: all of them."""

    tokens: int
    batch: int
    rounds: int
    names: tuple[str, ...] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", default="4096,16384,65536", help="prompt tokens, comma separated")
    add("--batches", default="1", help="prompts at once, comma separated")
    add("--rates", default="0,0.5,0.75,0.85,0.95", help="skip rates to dial")
    add("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    add(
        "--more",
        default="",
        metavar="TOKENS:BATCH:ROUNDS[:RATES]",
        help="further sizes, comma separated, after the others; RATES: only these, such as 0+0.85",
    )
    add("--block-size", type=int, default=None, help="tokens of a cache page (default: vLLM's)")
    add("--chunk", type=int, default=8192, help="most tokens of a step (default: 8192)")
    add("--layers", type=int, default=32)
    add("--heads", default="32,8,128", help="q heads, kv heads, head_dim (default: 32,8,128)")
    add("--dtype", default="bfloat16")
    add("--budget-s", type=float, default=1e9, help="begin no round after this many seconds")
    add("--no-dense", action="store_true", help="leave out our kernel without a vote")
    add("--wait-for", type=Path, help="once ready, begin when this file exists (at most 300 s)")
    add("--out", type=Path, required=True, help="folder for ttft.json and ttft.md")
    args = parser.parse_args(argv)
    try:
        args.sizes = sizes(args)
    except ValueError as e:
        parser.error(f"--lengths, --batches or --more: {e}")
    reason = too_large_for_cpu(args.layers)
    if reason is not None:
        parser.error(reason)
    os.environ.update(ENVIRONMENT)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blasst-ttft-", ignore_cleanup_errors=True) as folder:
        os.environ["VLLM_BLASST_STATE_DIR"] = folder
        _run(args, Path(folder))
    return 0


def _run(args: argparse.Namespace, folder: Path) -> None:
    import torch

    from blasst.kernels.types import Geometry
    from blasst.plugin.dial import Dial

    started = time.monotonic()
    lengths = [size.tokens for size in args.sizes]
    heads = tuple(int(x) for x in args.heads.split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engines = _engines(args, folder)
    report: dict[str, Any] = {
        "where": _where(args),
        "start_s": time.monotonic() - started,
        "cells": [],
    }
    dtype = getattr(torch, args.dtype)
    dial = Dial((heads[0], heads[1], heads[2]), args.chunk, max(lengths), dtype, device)
    geometry = Geometry(64, 128) if device == "cuda" else Geometry()
    cells: list[Cell] = []

    def late() -> bool:
        return bool(time.monotonic() - started > args.budget_s)

    with dial.installed():
        _warm_up(args, engines, dial, geometry, folder)
        wait_for(args.wait_for)
        started = time.monotonic()
        for size in args.sizes:
            if late():
                report["not_run"] = [*report.get("not_run", []), asdict(size)]
            else:
                run = _Runner(engines, dial, geometry, folder / "stats", size)
                cells += run.cells(chosen(args, size), late)
            report["cells"] = [asdict(c) for c in cells]
            (args.out / "ttft.json").write_text(json.dumps(report, indent=1))
            (args.out / "ttft.md").write_text(markdown(cells, report["where"]))
            (args.out / "ttft.svg").write_text(svg(cells))
    print(markdown(cells, report["where"]), flush=True)


def sizes(args: argparse.Namespace) -> list[Size]:
    """What is timed, in order. Raises ValueError."""
    found = [
        Size(int(n), int(b), args.rounds)
        for n in args.lengths.split(",")
        for b in args.batches.split(",")
    ]
    for entry in filter(None, args.more.split(",")):
        numbers, rates = entry.split(":")[:3], entry.split(":")[3:]
        if len(numbers) != 3 or len(rates) > 1:
            raise ValueError(f"{entry} is not TOKENS:BATCH:ROUNDS[:RATES]")
        tokens, batch, rounds = map(int, numbers)
        names = tuple(_named(float(r)) for r in rates[0].split("+")) if rates else None
        found.append(Size(tokens, batch, rounds, names))
    if min(min(s.tokens, s.batch, s.rounds) for s in found) < 1:
        raise ValueError("every number must be 1 or more")
    known = {c.name for c in contenders(args)}
    unknown = {name for s in found for name in s.names or ()} - known
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]} is not in --rates {args.rates}")
    return found


def chosen(args: argparse.Namespace, size: Size) -> list[Contender]:
    """Who takes part in one size: stock always does."""
    names = size.names
    return [c for c in contenders(args) if names is None or c.name in ("stock", *names)]


def _named(rate: float) -> str:
    return f"ours, skip {rate:.0%}"


def _warm_up(args: Any, engines: Any, dial: Any, geometry: Any, folder: Path) -> None:
    """Each kernel and every size of a step once, that no timed round is the first."""
    longest = min(args.chunk, max(size.tokens for size in args.sizes))
    size = Size(longest, 2, 1)
    _Runner(engines, dial, geometry, folder / "stats", size).cells(contenders(args), bool)


def contenders(args: argparse.Namespace) -> list[Contender]:
    """Who takes part, in the order of the table."""
    rates = [float(x) for x in args.rates.split(",")]
    found = [Contender("stock", "stock"), Contender("ours, no threshold", "ours")]
    if not args.no_dense:
        found.append(Contender("ours, dense kernel", "ours", vote=True, dense=True))
    return found + [Contender(_named(r), "ours", r, vote=True) for r in rates]


class _Runner:
    """One size."""

    def __init__(
        self, engines: dict[str, Any], dial: Any, geometry: Any, stats: Path, size: Size
    ) -> None:
        self.engines, self.dial, self.geometry, self.stats = engines, dial, geometry, stats
        self.size = size

    def cells(self, everyone: Sequence[Contender], late: Callable[[], bool]) -> list[Cell]:
        tokens, batch = self.size.tokens, self.size.batch
        times: dict[str, list[list[float]]] = {c.name: [] for c in everyone}
        skips: dict[str, float | None] = {}
        for i in range(self.size.rounds):
            if i and late():
                break
            # Another order each round: who comes after whom matters to a chip at its power limit.
            for c in random.Random(i).sample(list(everyone), len(everyone)):
                self.dial.turn(c.rate, tokens, self.geometry)
                before = self._tiles() if not i and c.vote else None
                times[c.name].append(self._time(c))
                if before is not None:
                    visited, skipped = (a - b for a, b in zip(self._tiles(), before, strict=True))
                    skips[c.name] = skipped / visited if visited else None
                print(f"{tokens} x {batch} {c.name}: {times[c.name][-1][-1]:.4f} s", flush=True)
        last = {n: statistics.median(max(r) for r in rounds) for n, rounds in times.items()}
        mean = {n: statistics.median(map(statistics.mean, rounds)) for n, rounds in times.items()}
        return [
            Cell(
                tokens,
                batch,
                n,
                last[n],
                last[n] / last["stock"],
                skips.get(n),
                [max(r) for r in rounds],
                mean[n],
                mean[n] / mean["stock"],
            )
            for n, rounds in times.items()
        ]

    def _time(self, contender: Contender) -> list[float]:
        """Seconds to the only token of each prompt, from the moment that all were sent."""
        from vllm import SamplingParams

        from blasst.plugin.dial import DIALLED_LAMBDA, replaced

        extra = {"blasst_lambda": DIALLED_LAMBDA} if contender.vote else None
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
        prompt = {"prompt_token_ids": [17] * self.size.tokens}
        engine = self.engines[contender.engine]
        step: Callable[[], Any] = engine.llm_engine.step
        ends: list[float] = []

        def timed() -> Any:
            outputs = step()
            now = time.perf_counter()
            ends.extend(now - started for o in outputs if o.finished)
            return outputs

        with (
            _without_vote() if contender.dense else nullcontext(),
            replaced(engine.llm_engine, step=timed),
        ):
            started = time.perf_counter()
            engine.generate([prompt] * self.size.batch, params, use_tqdm=False)
        return ends

    def _tiles(self) -> tuple[int, int]:
        time.sleep(4 * STATS_INTERVAL_S)
        flat = [page.arrays["tiles"] for page in iter_stats(self.stats, RANK)]
        return int(sum(sum(t[0::2]) for t in flat)), int(sum(sum(t[1::2]) for t in flat))


def _without_vote() -> AbstractContextManager[None]:
    """Our kernel built without a vote; no threshold leads there, for vLLM's own is dense too."""
    from blasst.kernels.plan import Batch, Plan
    from blasst.plugin.dial import replaced

    real = Plan.run

    def dense(self: Plan, q: Any, kv: Any, ends: Any, batch: Batch, **given: Any) -> Any:
        without = Batch(batch.requests, None)
        return real(self, q, kv, ends, without, **(given | {"skip_lambda": None, "counters": None}))

    return replaced(Plan, run=dense)


def _engines(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    heads = [int(x) for x in args.heads.split(",")]
    cached = max(size.tokens * size.batch for size in args.sizes) + 4096
    changes: dict[str, Any] = {
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
    }
    if args.layers < REHEARSAL:
        changes |= {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512}
        changes |= {"bos_token_id": 1, "eos_token_id": 2}
    model = write_llama(folder / "model", args.dtype, **changes)
    options: dict[str, Any] = {} if args.block_size is None else {"block_size": args.block_size}
    return {
        name: make_engine(
            model,
            backend,
            "eager",
            dummy=True,
            dtype=args.dtype,
            kv_bytes=4 * cached * args.layers * heads[1] * heads[2],
            max_model_len=max(size.tokens for size in args.sizes) + 1,
            max_num_batched_tokens=args.chunk,
            max_num_seqs=16,
            **options,
        )
        for name, backend in (("stock", stock_backend()), ("ours", "blasst"))
    }


def _where(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shown = {k: v for k, v in vars(args).items() if k not in ("out", "sizes", "wait_for")}
    return {"gpu": gpu, "torch": torch.__version__, "vllm": vllm.__version__, **shown}


def markdown(cells: Sequence[Cell], where: dict[str, Any]) -> str:
    """One table; ratios over the stock backend of the same rounds."""
    lines = [
        f"{where['gpu']}, vLLM {where['vllm']}, torch {where['torch']}, chunks of "
        f"{where['chunk']} tokens, pages of {where['block_size'] or 'the default size'}",
        "",
        "| prompt | at once | contender | skipped | TTFT, ms | over stock | mean TTFT, ms | "
        "over stock | rounds |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for c in cells:
        skipped = "" if c.skip_rate is None else f"{c.skip_rate:.1%}"
        mean = f"{1e3 * c.mean_ttft_s:.1f} | {c.mean_over_stock:.3f}" if c.batch > 1 else "|"
        lines.append(
            f"| {c.tokens} | {c.batch} | {c.contender} | {skipped} | {1e3 * c.ttft_s:.1f} | "
            f"{c.over_stock:.3f} | {mean} | {len(c.times_s)} |"
        )
    lines += ["", "| prompt | at once | a vote costs no time from | best |", "|--:|--:|--:|---|"]
    for (tokens, batch), points in _votes(cells).items():
        rate, ratio = min(points, key=lambda p: p[1])
        best = f"{ratio - 1:+.1%} at {rate:.0%} skipped"
        lines.append(f"| {tokens} | {batch} | {break_even(points)} | {best} |")
    return "\n".join(lines) + "\n"


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """The skip rate from which time to first token is not above stock. points: (skip rate, time
    over stock), ascending; between two of them the line is taken."""
    above = [i for i, (_, ratio) in enumerate(points) if ratio > 1]
    if not above:
        return f"{points[0][0]:.0%}"
    if above[-1] + 1 == len(points):
        return f"none up to {points[-1][0]:.0%}"
    (x0, y0), (x1, y1) = points[above[-1] : above[-1] + 2]
    return f"{x0 + (y0 - 1) / (y0 - y1) * (x1 - x0):.0%}"


def _votes(cells: Sequence[Cell]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(skip rate, time over stock) of the cells that vote, by size."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for c in cells:
        if c.skip_rate is not None:
            ratio = c.mean_over_stock if c.batch > 1 else c.over_stock
            found.setdefault((c.tokens, c.batch), []).append((c.skip_rate, ratio))
    return {size: sorted(points) for size, points in found.items()}


if __name__ == "__main__":
    sys.exit(main())
