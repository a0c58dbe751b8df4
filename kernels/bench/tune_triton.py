"""Times configurations of the Triton kernel against each other on this GPU, interleaved.

python -m blasst.kernels.bench.tune_triton --tokens 16384 --json FILE
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from blasst.kernels.call import Call, check_call
from blasst.kernels.testing import DialOptions, cumulative, dialled_inputs
from blasst.kernels.triton import launch
from blasst.kernels.triton.config import Config
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, RaggedKV

MODES = ("dense", "vote")
RATES = (0.0, 0.5, 0.95)
PAGE_SIZE = 16
WORKERS = 12
DIAL = Geometry(64, 128)  # the coarsest blocks and finest rows of all candidates


@dataclass(frozen=True)
class Candidate:
    """paged: run on pages of PAGE_SIZE instead of contiguous keys."""

    tile_m: int
    tile_n: int
    config: Config
    paged: bool = False

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.tile_m, self.tile_n)

    def __str__(self) -> str:
        c = self.config
        parts = [f"{self.tile_m}x{self.tile_n}", f"w{c.num_warps}", f"s{c.num_stages}"]
        parts += ["ahead" if c.v_ahead else "late"]
        parts += [f"or late s{c.demand_stages}"] if c.demand_stages else []
        parts += [f"r{c.max_registers}"] if c.max_registers else []
        parts += [f"c{c.chunk}"] if c.demand_stages else []
        parts += ["boxes"] if c.boxes else []
        parts += ["ballot"] if c.ballot else []
        return " ".join(parts + (["page16"] if self.paged else []))


def _pair(stages: int, v_ahead: bool = True, demand: int = 0, chunk: int = 64) -> Config:
    """Two programs a multiprocessor, blocks by the copy engine."""
    return Config(8, stages, v_ahead, 128, demand, chunk, boxes=True, ballot=True)


CANDIDATES = (
    Candidate(128, 128, Config(8, 3, True)),
    Candidate(128, 128, Config(8, 3, True, ballot=True)),
    Candidate(128, 128, Config(8, 3, False, ballot=True)),
    Candidate(128, 128, Config(8, 3, True, boxes=True, ballot=True)),
    Candidate(128, 64, Config(4, 2, True)),
    Candidate(128, 64, Config(8, 2, True, 128)),
    Candidate(128, 64, _pair(2)),
    Candidate(128, 64, _pair(3, v_ahead=False)),
    Candidate(128, 64, _pair(2, demand=3, chunk=16)),
    Candidate(128, 64, _pair(2, demand=3)),
    Candidate(128, 128, Config(8, 5, True), paged=True),
    Candidate(128, 64, Config(8, 3, True, 128), paged=True),
    Candidate(128, 64, Config(8, 3, True, 128, ballot=True), paged=True),
    Candidate(128, 64, Config(4, 3, True), paged=True),
)


@dataclass(frozen=True)
class Inputs:
    """One prompt at one dialled skip rate, on the GPU; pages: the same keys in pages."""

    contiguous: Call
    pages: Call
    counters: torch.Tensor
    out: torch.Tensor

    def run(self, candidate: Candidate, vote: bool) -> None:
        call = self.pages if candidate.paged else self.contiguous
        skip_lambda = call.skip_lambda if vote else None
        call = replace(call, geometry=candidate.geometry, skip_lambda=skip_lambda)
        launch.run(call, self.out, self.counters if vote else None, candidate.config)


def make_inputs(tokens: int, skip_rate: float, device: str, dtype: torch.dtype) -> Inputs:
    """32 q and 8 kv heads of 128, the shape of a Llama 8B layer."""
    x = dialled_inputs(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        seqlen=tokens,
        skip_rate=skip_rate,
        options=DialOptions(dtype=dtype, geometry=DIAL),
    )
    q, k, v = (t.to(device) for t in (x.q, x.kv.k, x.kv.v))
    ends = cumulative([tokens]).to(device)
    order = torch.randperm(tokens // PAGE_SIZE).to(device)
    in_pages = (tokens // PAGE_SIZE, PAGE_SIZE, *k.shape[1:])
    paged_k, paged_v = torch.empty_like(k).view(in_pages), torch.empty_like(v).view(in_pages)
    paged_k[order], paged_v[order] = k.view(in_pages), v.view(in_pages)
    contiguous, pages = (
        check_call(q, kv, ends, AttentionSpec(), x.skip_lambda.to(device), None, None)
        for kv in (
            RaggedKV(k, v, ends),
            PagedKV(paged_k, paged_v, order.int()[None], ends[1:]),
        )
    )
    counters = torch.zeros(8, 2, dtype=torch.int64, device=device)
    return Inputs(contiguous, pages, counters, torch.empty_like(q))


def compile_candidate(candidate: Candidate) -> str:
    """Fills Triton's cache on disk, in a process of its own; "" or why it cannot run."""
    x = make_inputs(256, 0.0, "cuda", torch.bfloat16)
    try:
        for vote in (False, True):
            x.run(candidate, vote)
        torch.cuda.synchronize()
    except Exception as e:  # whatever it is, it is told and the others go on
        return f"{type(e).__name__}: {e}"
    return ""


def reference(x: Inputs) -> torch.Tensor:
    call = x.contiguous
    q, k, v = (t.transpose(0, 1)[None] for t in (call.q, call.kv.k, call.kv.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def milliseconds(call: Callable[[], Any]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(candidates: Sequence[Candidate], x: Inputs, rounds: int) -> list[dict[str, Any]]:
    """One row a candidate and mode: median ms, skip rate, largest error."""
    exact = reference(x)
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        for mode in MODES:
            x.counters.zero_()
            x.out.fill_(torch.nan)
            x.run(candidate, mode == "vote")
            visited, skipped = x.counters.sum(0).tolist()
            rows.append({
                "candidate": str(candidate), "mode": mode,
                "skip_rate": skipped / visited if visited else 0.0,
                "error": float((x.out - exact).abs().max()), "times": [],
            })  # fmt: skip
    runs = [(c, m) for c in candidates for m in MODES]
    turns = list(zip(rows, runs, strict=True))
    for i in range(rounds):
        for row, (candidate, mode) in random.Random(i).sample(turns, len(turns)):
            row["times"].append(milliseconds(partial(x.run, candidate, mode == "vote")))
    for row in rows:
        row["ms"] = statistics.median(row.pop("times"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="candidates whose name has it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU, and torch finds none here")
    chosen = [c for c in CANDIDATES if options.only in str(c)]
    if not chosen:
        parser.error(f"--only {options.only!r}: no candidate has it; they are {CANDIDATES[0]}, ...")
    begin = time.perf_counter()
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        reasons = list(pool.map(compile_candidate, chosen))
    for candidate, reason in zip(chosen, reasons, strict=True):
        if reason:
            print(f"{candidate}: cannot run: {reason[:200]}", flush=True)
    able = [c for c, reason in zip(chosen, reasons, strict=True) if not reason]
    print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for rate in RATES:
        x = make_inputs(options.tokens, rate, "cuda", torch.bfloat16)
        # Dense on the same data: what the data skip changes the card's clock, hence its time.
        rows += [{"rate": rate, **row} for row in measure(able, x, options.rounds)]
    print(f"{'candidate':30s} dense ms, then vote over dense at {RATES}; skip rates; errors")
    for name in map(str, able):
        dense, vote = (
            [row for row in rows if row["candidate"] == name and row["mode"] == mode]
            for mode in MODES
        )
        times = " ".join(f"{row['ms']:7.3f}" for row in dense)
        ratios = " ".join(f"{v['ms'] / d['ms']:6.3f}" for d, v in zip(dense, vote, strict=True))
        skips = " ".join(f"{row['skip_rate']:.3f}" for row in vote)
        errors = " ".join(f"{row['error']:.1e}" for row in (*dense, *vote))
        print(f"{name:30s} {times} | {ratios} | {skips} | {errors}")
    print(f"done after {time.perf_counter() - begin:.0f} s")
    if options.json:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tokens": options.tokens,
            "unable": {str(c): r for c, r in zip(chosen, reasons, strict=True) if r},
            "candidates": {str(c): asdict(c) for c in able},
            "rows": rows,
        }
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
