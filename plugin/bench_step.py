"""What a step costs with our backend: decode throughput, host work for metadata, waits.

    python -P -m blasst.plugin.bench_step llama-8b --dtype bfloat16 --out FOLDER
Stock and ours side by side in one process. Writes step.json, and trace.json.gz of torch's profiler
over one mixed step of ours.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import gzip
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from blasst.plugin.bench_engines import (
    ENVIRONMENT,
    GRAPHS,
    make_engine,
    on_cpu,
    stock_backend,
    unusable_reason,
    wait_for,
    write_llama,
)

MAG = 2500
OURS = "blasst: "
"""Begins the names of our functions' ranges in a trace."""
WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cudaMalloc",
    "cudaHostAlloc",
    "cudaFreeHost",
)
"""Calls of CUDA's runtime that may keep the host waiting for the device."""
MIXED_STEPS = 3
PARTS = {"host", "waits", "decode"}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a Hugging Face folder, or llama-8b: that shape with dummy weights")
    add("--batches", default="8,256", help="decodes at once, comma separated (default: 8,256)")
    add("--decode-tokens", type=int, default=64, help="timed steps of a round (default: 64)")
    add("--rounds", type=int, default=9, help="interleaved (default: 9), after one to warm up")
    add("--graphs", choices=list(GRAPHS), default="decode", help="what is captured")
    add("--prefill", type=int, default=4096, help="tokens of the prompt that votes in mixed steps")
    add("--chunk", type=int, default=2048, help="most tokens of a step (default: 2048)")
    add("--dtype", default="float32")
    add("--kv-gib", type=float, default=24, help="cache of each engine (default: 24)")
    add("--parts", default="host,waits,decode", help="what is measured (default: all of these)")
    add("--budget-s", type=float, default=1e9, help="begin no part or round after these seconds")
    add("--wait-for", type=Path, help="once ready, begin when this file exists (at most 300 s)")
    add("--out", type=Path, required=True, help="folder for step.json and trace.json.gz")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = sorted(set(args.parts) - PARTS)
    reason = f"{unknown[0]} is no part" if unknown else unusable_reason(args.model)
    if reason is not None:
        parser.error(reason)
    os.environ.update(ENVIRONMENT)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blasst-step-", ignore_cleanup_errors=True) as folder:
        os.environ["VLLM_BLASST_STATE_DIR"] = folder
        dummy = args.model == "llama-8b"
        model = write_llama(Path(folder) / "model", args.dtype) if dummy else Path(args.model)
        _Steps(args, model, dummy).run()
    return 0


class _Steps:
    """The parts of one measurement, and `result` as it is written after each."""

    def __init__(self, args: argparse.Namespace, model: Path, dummy: bool) -> None:
        self.args = args
        self.batches = [int(b) for b in args.batches.split(",")]
        self.began = time.monotonic()
        self.result: dict[str, Any] = {}
        self.engines = {
            name: make_engine(
                model,
                backend,
                args.graphs,
                dummy=dummy,
                dtype=args.dtype,
                kv_bytes=int(args.kv_gib * (1 << 30)),
                max_model_len=args.prefill + args.decode_tokens + 64,
                max_num_batched_tokens=args.chunk,
                max_num_seqs=max(*self.batches, 2),
            )
            for name, backend in (("stock", stock_backend()), ("ours", "blasst"))
            if name == "ours" or args.parts != ["host"]
        }
        self.result["start_s"] = time.monotonic() - self.began
        gc.collect()
        gc.freeze()  # as vLLM's own server does
        wait_for(args.wait_for)
        self.began = time.monotonic()

    def run(self) -> None:
        most = max(self.batches)
        if "host" in self.args.parts:
            self.part(f"host work, {most} requests", partial(self.host_work, most))
        if "waits" in self.args.parts:
            self.part(f"waits, {most} requests", partial(self.waits, most))
        for batch in self.batches if "decode" in self.args.parts else ():
            self.part(f"decode, {batch} requests", partial(self.decode, batch))

    def part(self, name: str, what: Callable[[], dict[str, Any]]) -> None:
        if self.late():
            self.result[name] = "not run: out of time"
        else:
            self.result[name] = what()
        (self.args.out / "step.json").write_text(json.dumps(self.result, indent=1))
        print(f"{name}: {json.dumps(self.result[name])[:1800]}", flush=True)

    def late(self) -> bool:
        return bool(time.monotonic() - self.began > self.args.budget_s)

    def decode(self, batch: int) -> dict[str, Any]:
        """Tokens per second of steps in which nothing but decodes runs."""
        rates: dict[str, list[float]] = {name: [] for name in self.engines}
        for i in range(self.args.rounds + 1):
            if i > 1 and self.late():
                break
            for name in sorted(self.engines, reverse=bool(i & 1)):
                rate = self.decode_rate(self.engines[name], batch)
                if i:
                    rates[name].append(rate)
        ratios = [o / s for o, s in zip(rates["ours"], rates["stock"], strict=True)]
        return {
            "tokens_per_s": {name: statistics.median(r) for name, r in rates.items()},
            "over_stock_median": statistics.median(ratios),
            "over_stock_range": [min(ratios), max(ratios)],
            "rounds": len(ratios),
        }

    def decode_rate(self, engine: Any, batch: int) -> float:
        steps = self.args.decode_tokens
        self.send(engine, self.prompts(batch, 16), steps + 8)
        _until(engine, batch * 4)  # every prefill, and some decodes
        started = time.perf_counter()
        produced = _until(engine, batch * (steps - 8))
        rate = produced / (time.perf_counter() - started)
        _until(engine)
        return rate

    def host_work(self, batch: int) -> dict[str, Any]:
        """Microseconds of our own functions, and of vLLM's builder of metadata, in steps with
        batch - 1 decodes and one prompt that votes; `note` of all steps."""
        found: dict[str, list[float]] = {}
        # A builder's clock would time the clocks of what it calls, too.
        for functions in (_ours(), *([builder] for builder in _builders())):
            with _timed(found, functions):
                for _ in range(5):
                    self.mixed(self.engines["ours"], batch, blasst_mag=MAG)
        rows = {}
        for name, seconds in found.items():
            times = sorted(1e6 * s for s in seconds)
            rows[name] = {
                "calls": len(times),
                "median_us": round(statistics.median(times), 1),
                "p90_us": round(times[int(0.9 * (len(times) - 1))], 1),
            }
        return rows

    def mixed(self, engine: Any, batch: int, watch: Any = None, **extra: Any) -> None:
        """Decodes of batch - 1 requests, among which a prompt is prefilled in chunks; `watch`
        is entered for MIXED_STEPS of them."""
        self.send(engine, self.prompts(batch - 1, 16), 24)
        _until(engine, (batch - 1) * 4)
        self.send(engine, self.prompts(1, self.args.prefill), 2, **extra)
        with watch or nullcontext():
            for _ in range(MIXED_STEPS):
                engine.llm_engine.step()
        _until(engine)

    def waits(self, batch: int) -> dict[str, Any]:
        """Calls of CUDA's runtime in the same mixed steps, stock and ours, and inside our code."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        counts: dict[str, dict[str, int]] = {}
        inside: Counter[str] = Counter()
        for name, engine in self.engines.items():
            extra = {} if name == "stock" else {"blasst_mag": MAG}
            profile: Any = torch.profiler.profile(activities=activities)
            with _ranges():
                self.mixed(engine, batch, profile, **extra)
            events = profile.events() or []
            calls = Counter(e.name for e in events if e.name.startswith("cuda"))
            counts[name] = dict(sorted(calls.items()))
            if name == "ours":
                inside = _inside(events)
                self.keep(profile)
        return {
            "runtime calls": counts,
            "in our ranges": dict(inside.most_common()),
            "waits in our ranges": sum(inside[name] for name in WAITS),
        }

    def keep(self, profile: Any) -> None:
        trace = self.args.out / "trace.json"
        profile.export_chrome_trace(str(trace))
        data = trace.read_bytes()
        trace.unlink()
        with gzip.open(self.args.out / "trace.json.gz", "wb") as out:
            out.write(data)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        rng = random.Random(count)
        return [[rng.randrange(3, 250) for _ in range(tokens)] for _ in range(count)]

    def send(self, engine: Any, prompts: list[list[int]], tokens: int, **extra: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra or None
        )
        engine.enqueue([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        for state in engine.llm_engine.output_processor.request_states.values():
            state.output_kind = RequestOutputKind.DELTA  # enqueue asks for the end alone


def _until(engine: Any, tokens: int | None = None) -> int:
    """Steps until so many tokens came out, or all requests have ended; how many did."""
    produced = 0
    while engine.llm_engine.has_unfinished_requests() and (tokens is None or produced < tokens):
        produced += sum(len(o.outputs[0].token_ids) for o in engine.llm_engine.step())
    return produced


ATTN_METADATA = 5
"""Place among the arguments of a layer's forward: layer, q, k, v, cache, metadata."""


def _ours() -> list[tuple[Any, str]]:
    """Our functions that run in a step, outside the layers first."""
    from blasst.plugin.rank import Rank
    from blasst.plugin.voting import VotingBuilder, VotingImpl

    return [
        (Rank, "note"),
        (Rank, "rows"),
        (Rank, "end_step"),
        (VotingBuilder, "split_batch"),
        (VotingImpl, "forward"),
    ]


def _builders() -> list[tuple[Any, str]]:
    """What makes the metadata of a step: ours with vLLM's in it, and vLLM's alone."""
    if on_cpu():
        from blasst.plugin import cpu_backend

        ours: Any = cpu_backend.BlasstCPUBuilder
    else:
        from blasst.plugin import cuda_backend

        ours = cuda_backend.BlasstCUDABuilder
    owners = [owner for owner in ours.__mro__ if "build" in vars(owner)]
    return [(owner, "build") for owner in owners[:2]]


@contextmanager
def _wrapped(
    make: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    functions: Sequence[tuple[Any, str]],
) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name in functions]
    for owner, name, method in before:
        setattr(owner, name, make(f"{owner.__name__}.{name}", method))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _timed(found: dict[str, list[float]], functions: Sequence[tuple[Any, str]]) -> Any:
    """Seconds of each call in a step that votes."""
    from blasst.plugin.request_tap import current_votes

    def make(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name.endswith("forward") and getattr(args[ATTN_METADATA], "blasst", None) is None:
                return method(self, *args, **kwargs)
            if name.endswith("end_step") and not self.voted:
                return method(self, *args, **kwargs)
            if name.endswith("build") and current_votes() is None:
                return method(self, *args, **kwargs)
            began = time.perf_counter()
            result = method(self, *args, **kwargs)
            spent = time.perf_counter() - began
            if name.endswith(("note", "end_step", "forward")) or result is not None:
                found.setdefault(name, []).append(spent)
            return result

        return run

    return _wrapped(make, functions)


def _ranges() -> Any:
    """Each call becomes a range of the trace."""
    import torch

    def make(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(OURS + name):
                return method(*args, **kwargs)

        return run

    return _wrapped(make, _ours())


def _inside(events: Sequence[Any]) -> Counter[str]:
    """Names of the runtime's calls that begin inside a range of ours, on the same thread. The
    profiler repeats a range where its kernels ran, which is later and on the device."""
    ranges: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        if e.name.startswith(OURS) and e.device_type.name == "CPU":
            ranges.setdefault(e.thread, []).append((e.time_range.start, e.time_range.end))
    for spans in ranges.values():
        spans.sort()
    found: Counter[str] = Counter()
    for e in events:
        spans = ranges.get(e.thread, [])
        i = bisect.bisect(spans, (e.time_range.start, math.inf)) - 1
        if e.name.startswith("cuda") and i >= 0 and e.time_range.start <= spans[i][1]:
            found[e.name] += 1
    return found


if __name__ == "__main__":
    sys.exit(main())
