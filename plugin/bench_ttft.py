"""Time to first token on a GPU: vLLM's stock backend against ours at chosen skip rates.

    python -P -m blasst.plugin.bench_ttft --lengths 16384,65536 --out FOLDER
Engines of one process take turns, on dummy weights of a Llama-3.1-8B shape; `dial` shapes their
keys. Writes ttft.json, ttft.md and ttft.svg as it goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blasst.plugin.bench_engines import (
    ENVIRONMENT,
    limit_steps,
    make_engine,
    share_weights,
    stock_backend,
    tiles,
    too_large_for_cpu,
    wait_for,
    write_llama,
)
from blasst.plugin.bench_plot import svg
from blasst.plugin.bench_table import LARGE_CHUNKS, STOCK, Cell, cells_of, markdown

REHEARSAL = 8
"""Fewer layers than these are narrow ones, for a machine without a GPU."""
LARGE = "large"
PRIMER = 8192
"""Tokens of the prompt that brings an idle chip to the power that it has while it works."""
LONG = 32768
"""So many tokens take more than a second: then to write after each costs nothing."""


@dataclass(frozen=True)
class Contender:
    """key: as in --who; name: as in the table; engine: stock or ours; rate: what is dialled; vote:
    a lambda is asked for; dense: our kernel built without a vote, which no request can ask for;
    large: steps of --large tokens, in place of --chunk."""

    key: str
    name: str
    engine: str
    rate: float = 0.0
    vote: bool = False
    dense: bool = False
    large: bool = False


FIXED = (
    Contender(STOCK, STOCK, "stock"),
    Contender("again", "stock again", "stock"),
    Contender("off", "ours, no threshold", "ours"),
    Contender("dense", "ours, dense kernel", "ours", vote=True, dense=True),
)


@dataclass(frozen=True)
class Size:
    """So many prompts of so many tokens at once, in so many timed rounds. who: besides stock; page:
    tokens of a cache page; None: vLLM's default."""

    tokens: int
    batch: int
    rounds: int
    who: tuple[Contender, ...]
    page: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", default="4096,16384,65536", help="prompt tokens, comma separated")
    add("--batches", default="1", help="prompts at once, comma separated")
    add(
        "--who",
        default="off+dense+0+0.5+0.75+0.85+0.95",
        help="contenders besides stock, joined by +: off (no threshold), dense (our kernel without "
        "a vote), again (stock a second time), a skip rate, and any of the last or stock after "
        "'large', such as largestock or large0.85: with steps of --large tokens",
    )
    add("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    add(
        "--more",
        default="",
        metavar="TOKENS:BATCH:ROUNDS[:WHO[:PAGE]]",
        help="further sizes, comma separated, after the others; one that was there before gets "
        "more rounds; WHO as in --who, which an empty one means",
    )
    add("--page", type=int, default=None, help="tokens of a cache page (default: vLLM's)")
    add("--chunk", type=int, default=8192, help="most tokens of a step (default: 8192)")
    add("--large", type=int, default=65536, help="of those that ask for it (default: 65536)")
    add("--layers", type=int, default=32)
    add("--heads", default="32,8,128", help="q heads, kv heads, head_dim (default: 32,8,128)")
    add("--dtype", default="bfloat16")
    add("--budget-s", type=float, default=1e9, help="begin nothing that would end later than this")
    add("--wait-for", type=Path, help="once ready, begin when this file exists (at most 300 s)")
    add("--out", type=Path, required=True, help="folder for ttft.json, ttft.md and ttft.svg")
    args = parser.parse_args(argv)
    try:
        args.sizes = sizes(args)
    except ValueError as e:
        parser.error(f"--lengths, --batches, --who or --more: {e}")
    reason = too_large_for_cpu(args.layers)
    if reason is not None:
        parser.error(reason)
    os.environ.update(ENVIRONMENT)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blasst-ttft-", ignore_cleanup_errors=True) as folder:
        os.environ["VLLM_BLASST_STATE_DIR"] = folder
        _run(args, Path(folder))
    return 0


def sizes(args: argparse.Namespace) -> list[Size]:
    """What is timed, in order. Raises ValueError."""
    everyone = _who(args.who)
    found = [
        Size(int(n), int(b), args.rounds, everyone, args.page)
        for n in args.lengths.split(",")
        for b in args.batches.split(",")
        if n
    ]
    for entry in filter(None, args.more.split(",")):
        numbers, rest = entry.split(":")[:3], entry.split(":")[3:]
        if len(numbers) != 3 or len(rest) > 2:
            raise ValueError(f"{entry} is not TOKENS:BATCH:ROUNDS[:WHO[:PAGE]]")
        tokens, batch, rounds = map(int, numbers)
        who = _who(rest[0]) if rest and rest[0] else everyone
        page = int(rest[1]) if len(rest) == 2 else args.page
        found.append(Size(tokens, batch, rounds, who, page))
    if not found:
        raise ValueError("nothing is to be timed")
    if min(min(s.tokens, s.batch, s.rounds) for s in found) < 1:
        raise ValueError("every number must be 1 or more")
    return found


def _who(keys: str) -> tuple[Contender, ...]:
    return tuple(contender(key) for key in keys.split("+"))


def contender(key: str) -> Contender:
    """By its key in --who. Raises ValueError."""
    if key.startswith(LARGE):
        small = contender(key.removeprefix(LARGE))
        return replace(small, key=key, name=small.name + LARGE_CHUNKS, large=True)
    for known in FIXED:
        if key == known.key:
            return known
    try:
        rate = float(key)
    except ValueError:
        raise ValueError(f"{key} is neither {', '.join(c.key for c in FIXED)} nor a rate") from None
    if not 0 <= rate < 1:
        raise ValueError(f"the skip rate {key} is not in 0..1")
    return Contender(key, f"ours, skip {rate:.0%}", "ours", rate, vote=True)


def _run(args: argparse.Namespace, folder: Path) -> None:
    import torch

    from blasst.kernels.types import Geometry
    from blasst.plugin.dial import Dial

    started = time.monotonic()
    heads = tuple(int(x) for x in args.heads.split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engines = _engines(args, folder)
    dial = Dial(
        (heads[0], heads[1], heads[2]),
        max(args.large if _any_large(args.sizes) else 0, args.chunk),
        max(size.tokens for size in args.sizes),
        getattr(torch, args.dtype),
        device,
    )
    bench = _Bench(args, engines, dial, Geometry(64, 128) if device == "cuda" else Geometry())
    with dial.installed():
        bench.warm_up()
        bench.report["start_s"] = time.monotonic() - started
        print(f"ready after {bench.report['start_s']:.0f} s", flush=True)
        gc.collect()
        gc.freeze()  # as vLLM's own server does: several engines are much to look through
        wait_for(args.wait_for)
        bench.run()
    print(bench.table(), flush=True)


def _any_large(found: Sequence[Size]) -> bool:
    return any(c.large for size in found for c in size.who)


class _Bench:
    """All sizes, and the report as it is written after each round."""

    def __init__(
        self, args: argparse.Namespace, engines: dict[int | None, Any], dial: Any, geometry: Any
    ) -> None:
        self.args = args
        self.timers = {page: _Timer(args, of_page, dial) for page, of_page in engines.items()}
        self.geometry = geometry
        self.began = 0.0
        self.report: dict[str, Any] = {"where": _where(args)}
        self.cells: list[Cell] = []

    def warm_up(self) -> None:
        """Each kernel and every size of a step once, that no timed round is the first."""
        for page, timer in self.timers.items():
            here = [size for size in self.args.sizes if size.page == page]
            longest = max(size.tokens for size in here)
            for c in {c.key: c for size in here for c in (FIXED[0], *size.who)}.values():
                tokens = min(longest, self.args.large if c.large else self.args.chunk)
                timer.dial.turn(c.rate, tokens, self.geometry)
                timer.time(c, tokens, 1 if tokens == longest else 2)

    def run(self) -> None:
        self.began = time.monotonic()
        runners: dict[tuple[int, int, int | None], _Runner] = {}
        for size in self.args.sizes:
            known = size.tokens, size.batch, size.page
            if known not in runners:
                runners[known] = _Runner(self.timers[size.page], size, self.geometry)
            took = 0.0
            for done in range(size.rounds):
                begins = time.monotonic()
                if begins - self.began + took > self.args.budget_s:
                    left = f"{size.tokens}:{size.batch}:{size.rounds - done}"
                    self.report.setdefault("not_run", []).append(left)
                    break
                for c in runners[known].round(size.who):
                    print(c, flush=True)
                    if size.tokens * size.batch >= LONG:
                        self.write(runners.values())
                self.write(runners.values())
                took = time.monotonic() - begins

    def write(self, runners: Iterable[_Runner]) -> None:
        self.cells = [c for r in runners for c in r.cells()]
        self.report["seconds"] = time.monotonic() - self.began
        report = {**self.report, "cells": [asdict(c) for c in self.cells]}
        for name, text in (
            ("ttft.json", json.dumps(report)),
            ("ttft.md", self.table()),
            ("ttft.svg", svg(self.cells)),
        ):
            (self.args.out / name).write_text(text)

    def table(self) -> str:
        return markdown(self.cells, self.report["where"])


class _Runner:
    """One size; its rounds may be run at different times."""

    def __init__(self, timer: _Timer, size: Size, geometry: Any) -> None:
        self.timer, self.size, self.geometry = timer, size, geometry
        self.times: dict[str, dict[int, list[float]]] = {STOCK: {}}
        self.skips: dict[str, float] = {}
        self.done = 0

    def round(self, who: Sequence[Contender]) -> Iterator[str]:
        """Stock and these once, in another order each time: who comes after whom matters to a chip
        at its power limit. After each a line that says what it took."""
        tokens, batch = self.size.tokens, self.size.batch
        for c in who:  # the order of the table
            self.times.setdefault(c.name, {})
        self.timer.prime()
        for c in random.Random(self.done).sample([FIXED[0], *who], 1 + len(who)):
            count = c.vote and not c.dense and c.name not in self.skips
            before = self.timer.tiles() if count else (0, 0)
            self.timer.dial.turn(c.rate, tokens, self.geometry)
            times = self.timer.time(c, tokens, batch)
            self.times[c.name][self.done] = times
            if count:
                visited, skipped = (a - b for a, b in zip(self.timer.tiles(), before, strict=True))
                self.skips[c.name] = skipped / visited if visited else 0.0
            yield f"{tokens} x {batch} {c.name}: {' '.join(f'{t:.4f}' for t in times)}"
        self.done += 1

    def cells(self) -> list[Cell]:
        size = self.size.tokens, self.size.batch, self.size.page
        return cells_of(size, self.times, self.skips)


class _Timer:
    """The engines of one page size."""

    def __init__(self, args: argparse.Namespace, engines: dict[str, Any], dial: Any) -> None:
        self.args, self.engines, self.dial = args, engines, dial

    def prime(self) -> None:
        """So that the first of a round does not find the chip rested by what was written."""
        self.time(FIXED[0], min(PRIMER, self.args.chunk), 1)

    def tiles(self) -> tuple[int, int]:
        return tiles(self.engines["ours"])

    def time(self, c: Contender, tokens: int, batch: int) -> list[float]:
        """Seconds to the only token of each prompt, from the moment that all were sent."""
        from vllm import SamplingParams

        from blasst.plugin.dial import DIALLED_LAMBDA, replaced

        extra = {"blasst_lambda": DIALLED_LAMBDA} if c.vote else None
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
        prompt = {"prompt_token_ids": [17] * tokens}
        engine = self.engines[c.engine]
        limit_steps(engine, self.args.large if c.large else self.args.chunk)
        step: Callable[[], Any] = engine.llm_engine.step
        ends: list[float] = []

        def timed() -> Any:
            outputs = step()
            now = time.perf_counter()
            ends.extend(now - started for o in outputs if o.finished)
            return outputs

        with (
            _without_vote() if c.dense else nullcontext(),
            replaced(engine.llm_engine, step=timed),
        ):
            started = time.perf_counter()
            engine.generate([prompt] * batch, params, use_tqdm=False)
        return ends


def _without_vote() -> AbstractContextManager[None]:
    """Our kernel built without a vote; no threshold leads there, for vLLM's own is dense too."""
    from blasst.kernels.plan import Batch, Plan
    from blasst.plugin.dial import replaced

    real = Plan.run

    def dense(self: Plan, q: Any, kv: Any, ends: Any, batch: Batch, **given: Any) -> Any:
        without = Batch(batch.requests, None)
        return real(self, q, kv, ends, without, **(given | {"skip_lambda": None, "counters": None}))

    return replaced(Plan, run=dense)


def _engines(args: argparse.Namespace, folder: Path) -> dict[int | None, dict[str, Any]]:
    """Stock and ours for each page size, all with the first one's weights: a GPU holds few."""
    import torch

    heads = [int(x) for x in args.heads.split(",")]
    changes: dict[str, Any] = {
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "max_position_embeddings": max(131072, max(size.tokens for size in args.sizes) + 1),
    }
    if args.layers < REHEARSAL:
        changes |= {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512}
        changes |= {"bos_token_id": 1, "eos_token_id": 2}
    model = write_llama(folder / "model", args.dtype, **changes)
    found: dict[int | None, dict[str, Any]] = {}
    first = None
    for page in {size.page: None for size in args.sizes}:
        here = [size for size in args.sizes if size.page == page]
        options = _options(args, here) | ({} if page is None else {"block_size": page})
        for name, backend in (("stock", stock_backend()), ("ours", "blasst")):
            engine = make_engine(model, backend, "eager", dummy=True, **options)
            found.setdefault(page, {})[name] = engine
            if first is None:
                first = engine
            else:
                share_weights(first, engine)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


def _options(args: argparse.Namespace, here: Sequence[Size]) -> dict[str, Any]:
    """Of engines for these sizes."""
    _, num_kv_heads, head_dim = (int(x) for x in args.heads.split(","))
    cached = max(size.tokens * size.batch for size in here) + PRIMER
    return {
        "dtype": args.dtype,
        "kv_bytes": 4 * cached * args.layers * num_kv_heads * head_dim,
        "max_model_len": max(PRIMER, max(size.tokens for size in here)) + 1,
        "max_num_batched_tokens": max(args.large if _any_large(here) else 0, args.chunk),
        "max_num_seqs": 16,
    }


def _where(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shown = {k: v for k, v in vars(args).items() if k not in ("out", "sizes", "wait_for")}
    return {"gpu": gpu, "torch": torch.__version__, "vllm": vllm.__version__, **shown}


if __name__ == "__main__":
    sys.exit(main())
