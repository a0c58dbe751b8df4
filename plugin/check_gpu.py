"""What must hold when a GPU serves with the backend: tokens, skip counts, no waits for the device.

    python -P -m blasst.plugin.check_gpu MODEL --short FILE --long FILE --out FOLDER
FILEs: JSONL of `blasst ruler generate`. Writes check.json after every step; a step that fails is
written down with its error and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.layout import RANK
from blasst.kernels.exchange.stats import iter_stats
from blasst.plugin.bench_engines import (
    ENVIRONMENT,
    LORA_NOISE,
    LORA_RANK,
    STATS_INTERVAL_S,
    lora_in_order,
    make_engine,
    stock_backend,
    write_lora,
)
from blasst.plugin.dial import replaced


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 every step ran and held, 1 one did not, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a Hugging Face folder")
    add("--short", type=Path, required=True, help="prompts whose tokens are compared")
    add("--long", type=Path, required=True, help="prompts whose skip rate is measured")
    add("--mags", default="14000,10000,7000,4500,2500,1500,1000")
    add("--graphs", default="decode", help="eager, decode or default; comma separated: all of them")
    add(
        "--steps",
        default="tokens,counts,skips,waits",
        help="which steps, in this order; also prefix (with prefix caching in --options)",
    )
    add("--runner", choices=("v1", "v2"), help="vLLM's model runner (default: vLLM's choice)")
    add("--options", type=json.loads, default={}, metavar="JSON", help="of both engines")
    add("--lora", action="store_true", help="every request uses a random LoRA adapter")
    add(
        "--lora-noise",
        type=float,
        default=LORA_NOISE,
        help=f"standard deviation of its entries (default: {LORA_NOISE})",
    )
    add(
        "--lora-in-order",
        action="store_true",
        help="and vLLM's kernel of adapters adds in a fixed order, so that runs can be compared",
    )
    add(
        "--again",
        type=int,
        default=1,
        help="how often stock and ours without a threshold answer again, where answers of one "
        "engine differ from run to run (default: 1)",
    )
    add("--another", metavar="BACKEND", help="of vLLM's own, whose tokens are compared as well")
    add("--kv-gib", type=float, default=4, help="cache of each engine (default: 4)")
    add("--dtype", default="bfloat16")
    add("--max-tokens", type=int, default=8, help="of an answer (default: 8)")
    add("--chunk", type=int, default=8192, help="most tokens of a step (default: 8192)")
    add("--out", type=Path, required=True, help="folder for check.json")
    args = parser.parse_args(argv)
    for needed in (Path(args.model) / "config.json", args.short, args.long):
        if not needed.is_file():
            parser.error(f"{needed} does not exist; docs/gpu.md says how prompts are made")
    os.environ.update(ENVIRONMENT)
    if args.runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2"))
    args.out.mkdir(parents=True, exist_ok=True)
    # A rank puts its statistics page back while the folder is being removed.
    with tempfile.TemporaryDirectory(prefix="blasst-check-", ignore_cleanup_errors=True) as folder:
        os.environ["VLLM_BLASST_STATE_DIR"] = folder
        if args.lora:
            write_lora(Path(folder) / "lora", Path(args.model), args.lora_noise)
        if args.lora_in_order:
            lora_in_order()
        held = _Check(args, Path(folder)).run()
    return 0 if held else 1


ANSWER_TOKENS = 24
"""Enough for a number of RULER's behind a few words."""


class _Check:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.stats, self.adapter = args, folder / "stats", folder / "lora"
        self.short = [line["prompt"] for line in _lines(args.short)]
        self.long = [line["prompt"] for line in _lines(args.long)]
        self.gold = [line.get("gold", []) for line in _lines(args.long)]
        self.result: dict[str, Any] = {"prompts": [len(self.short), len(self.long)]}
        self.held = True

    def run(self) -> bool:
        for graphs in self.args.graphs.split(","):
            engines = {
                "stock": self.engine(stock_backend(), graphs),
                "ours": self.engine("blasst", graphs),
            }
            if self.args.another is not None:
                engines["another"] = self.engine(self.args.another, graphs)
            self.result["runner"] = type(_runner(engines["ours"])).__module__
            for name in self.args.steps.split(","):
                self.step(f"{name}, {graphs}", partial(getattr(self, name), engines))
            del engines
            gc.collect()
        return self.held

    def step(self, name: str, what: Callable[[], dict[str, Any]]) -> None:
        started = time.monotonic()
        try:
            found = what()
        except Exception as e:
            traceback.print_exc()
            found = {"held": False, "error": f"{type(e).__name__}: {e}"[:2000]}
        self.held &= bool(found["held"])
        found["seconds"] = round(time.monotonic() - started, 1)
        self.result[name] = found
        (self.args.out / "check.json").write_text(json.dumps(self.result, indent=1))
        print(f"{name}: {json.dumps(found)[:1500]}", flush=True)

    def tokens(self, engines: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens that differ from a first run of stock's: stock again and ours without a
        threshold (the most of all runs), ours at lambda 0, another of vLLM's backends."""
        before = self.tiles()
        stock = self.answers(engines["stock"], self.short)

        def apart(who: str, **extra: Any) -> int:
            run = self.answers(engines[who], self.short, **extra)
            return sum(a != b for a, b in zip(stock, run, strict=True))

        runs = [(apart("stock"), apart("ours")) for _ in range(self.args.again)]
        differ = {
            "stock again": max(again for again, _ in runs),
            "no threshold": max(ours for _, ours in runs),
            "lambda 0": apart("ours", blasst_lambda=0),
        }
        if "another" in engines:
            differ[self.args.another] = apart("another")
        if self.args.lora:
            self.args.lora = False
            differ["without the adapter"] = apart("stock")
            self.args.lora = True
        visited, skipped = (a - b for a, b in zip(self.tiles(), before, strict=True))
        alone = min(40, len(self.short))
        one_by_one = [self.answers(engines["stock"], [p]) for p in self.short[:alone]]
        asked: list[tuple[str, str, dict[str, Any]]]
        asked = [("no threshold", "ours", {}), ("lambda 0", "ours", {"blasst_lambda": 0})]
        if "another" in engines:
            asked.append((self.args.another, "another", {}))
        for name, who, extra in asked:
            differ[f"{name}, one by one"] = sum(
                self.answers(engines[who], [p], **extra) != wanted
                for p, wanted in zip(self.short, one_by_one, strict=False)
            )
        # What sums in no fixed order (see lora_in_order) differs from run to run.
        noise = 2 * differ["stock again"]
        held = differ["no threshold"] <= noise and visited > 0 and skipped == 0
        if "another" in engines:  # two backends of vLLM's round in different orders as well
            held &= differ["lambda 0"] <= noise + 2 * differ[self.args.another]
        return {
            "held": held,
            "differ": differ,
            "runs of stock and ours": runs,
            "prompts": len(stock),
            "prompts one by one": alone,
            "tiles": [visited, skipped],
        }

    def skips(self, engines: dict[str, Any]) -> dict[str, Any]:
        """Per MAG: skip rate of each layer, time to first token, answers against dense and gold."""
        rows: list[dict[str, Any]] = []
        mags = [None, *(float(m) for m in self.args.mags.split(","))]
        dense: dict[int, Any] = {}
        for round_ in range(2):  # the first one warms up
            for mag in mags:
                times, same, right, before = [], 0, 0, self.layers()
                for i, prompt in enumerate(self.long):
                    extra: dict[str, Any] = {} if mag is None else {"blasst_mag": mag}
                    started = time.perf_counter()
                    self.answers(engines["ours"], [prompt], max_tokens=1, **extra)
                    times.append(time.perf_counter() - started)
                    if round_:
                        (answer,) = self.answers(
                            engines["ours"], [prompt], max_tokens=ANSWER_TOKENS, **extra
                        )
                        same += answer == dense.setdefault(i, answer)
                        right += _holds(answer, self.gold[i])
                if round_:
                    spent = [
                        [a - b for a, b in zip(x, y, strict=True)]
                        for x, y in zip(self.layers(), before, strict=True)
                    ]
                    rows.append(
                        {
                            "mag": mag,
                            "skip_rate": _rate(spent),
                            "layers": [_rate([layer]) for layer in spent],
                            "ttft_s": _by_length(self.long, times),
                            "answers_as_dense": same,
                            "answers_right": right,
                        }
                    )
        rates = [r["skip_rate"] or 0.0 for r in rows[1:]]
        return {"held": rates == sorted(rates) and rates[-1] > 0, "rows": rows}

    def counts(self, engines: dict[str, Any]) -> dict[str, Any]:
        """Each layer's very tensors on every implementation: blocks visited and skipped."""
        found: list[dict[str, Any]] = []
        for prompt in (self.long[0], self.long[len(self.long) // 2]):
            with _recounted(found):
                self.answers(engines["ours"], [prompt], max_tokens=1, blasst_mag=2500)
        apart = [
            sum(abs(a - b) for a, b in zip(x["served"], x[name], strict=True)) / x["served"][0]
            for x in found
            for name in x
            if name not in ("served", "largest_error")
        ]
        skipped = sum(x["served"][1] for x in found)
        held = bool(found) and max(apart) < 1e-3 and skipped > 0
        return {"held": held, "largest_share_apart": max(apart, default=None), "calls": found}

    def waits(self, engines: dict[str, Any]) -> dict[str, Any]:
        """torch refuses whatever would wait for the device while our code runs in a mixed batch."""
        calls = {"split": 0, "forward": 0}
        extra = [{"blasst_mag": 2500} if i % 2 else {} for i in range(16)]
        with _no_waits(calls):
            engines["ours"].generate(
                [{"prompt_token_ids": p} for p in (self.short * 16)[:16]],
                [self.params(4, **e) for e in extra],
                use_tqdm=False,
            )
        return {"held": calls["split"] > 0 and calls["forward"] > 0, **calls}

    def prefix(self, engines: dict[str, Any]) -> dict[str, Any]:
        """Prompts sent again find their own prefix, and never one of another threshold."""
        prompts = self.short[:40]
        wanted = self.answers(engines["stock"], prompts)
        mags = [None, None, 2500, 2500, 1500, None]
        runs = [
            self.finished(engines["ours"], prompts, **({} if m is None else {"blasst_mag": m}))
            for m in mags
        ]
        cached = [sum(r.num_cached_tokens or 0 for r in run) for run in runs]
        differ = [
            sum(list(r.outputs[0].token_ids) != w for r, w in zip(run, wanted, strict=True))
            for run in runs
        ]
        # Prompts share their beginnings, so the first of a threshold find some of each other's; a
        # second threshold finds as little as the first did, though all lies in the cache by then.
        own = cached[2] == cached[4] < cached[3] == cached[1] == cached[5]
        held = own and differ[1] == differ[5] == 0
        return {"held": held, "mags": mags, "cached tokens": cached, "differ from stock": differ}

    def params(self, max_tokens: int, **extra: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None
        )

    def answers(
        self, engine: Any, prompts: Sequence[list[int]], max_tokens: int = 0, **extra: Any
    ) -> list[list[int]]:
        found = self.finished(engine, prompts, max_tokens, **extra)
        return [list(r.outputs[0].token_ids) for r in found]

    def finished(
        self, engine: Any, prompts: Sequence[list[int]], max_tokens: int = 0, **extra: Any
    ) -> list[Any]:
        """vLLM's outputs."""
        params = self.params(max_tokens or self.args.max_tokens, **extra)
        given = [{"prompt_token_ids": p} for p in prompts]
        lora = None
        if self.args.lora:
            from vllm.lora.request import LoRARequest

            lora = LoRARequest("random", 1, str(self.adapter))
        outputs: list[Any] = engine.generate(given, params, use_tqdm=False, lora_request=lora)
        return outputs

    def layers(self) -> list[list[int]]:
        """[visited, skipped] of each layer, once the page has caught up."""
        time.sleep(4 * STATS_INTERVAL_S)
        config = json.loads((Path(self.args.model) / "config.json").read_text())
        rows = [[0, 0] for _ in range(config["num_hidden_layers"])]
        for page in iter_stats(self.stats, RANK):
            tiles = page.arrays["tiles"]
            size = len(tiles) // len(rows)
            for i, row in enumerate(rows):
                row[0] += int(sum(tiles[i * size : (i + 1) * size : 2]))
                row[1] += int(sum(tiles[i * size + 1 : (i + 1) * size : 2]))
        return rows

    def tiles(self) -> tuple[int, int]:
        rows = self.layers()
        return sum(r[0] for r in rows), sum(r[1] for r in rows)

    def engine(self, backend: str, graphs: str) -> Any:
        options: dict[str, Any] = dict(self.args.options)
        if self.args.lora:
            options |= {"enable_lora": True, "max_lora_rank": LORA_RANK}
        return make_engine(
            self.args.model,
            backend,
            graphs,
            kv_bytes=int(self.args.kv_gib * (1 << 30)),
            dtype=self.args.dtype,
            max_model_len=max(map(len, self.long + self.short)) + 64,
            max_num_batched_tokens=self.args.chunk,
            max_num_seqs=64,
            **options,
        )


def _recounted(found: list[dict[str, Any]]) -> AbstractContextManager[None]:
    """While it is, each of our kernel's calls is repeated on the other implementations."""
    import torch

    from blasst.kernels.dispatch import choose
    from blasst.kernels.plan import Plan, plan
    from blasst.kernels.types import Impl, PagedKV

    real = Plan.run

    def count(
        p: Plan, q: Any, kv: PagedKV, ends: Any, batch: Any, skip_lambda: Any
    ) -> tuple[Any, Any]:
        out = torch.empty_like(q)
        counters = torch.zeros(p.problem.num_kv_heads, 2, dtype=torch.int64, device=q.device)
        real(p, q, kv, ends, batch, skip_lambda=skip_lambda, out=out, counters=counters)
        return counters.sum(0).tolist(), out

    def repeated(
        self: Plan, q: Any, kv: PagedKV, ends: Any, batch: Any, *, skip_lambda: Any, **given: Any
    ) -> Any:
        result = real(self, q, kv, ends, batch, skip_lambda=skip_lambda, **given)
        first = batch.requests[0]
        used = slice(first.q_start, first.q_start + first.seqlen_q)
        pages = -(-first.seqlen_k // kv.k.shape[1])
        own = kv.page_table[0, :pages].long()
        table = torch.arange(pages, dtype=torch.int32, device=q.device)[None]
        small = PagedKV(kv.k[own], kv.v[own], table, kv.seqlens_k)
        served, want = count(self, q, kv, ends, batch, skip_lambda)
        row = {"served": served, "largest_error": 0.0}
        on_cpu = replace(self.problem, device_type="cpu", capability=None, geometry=self.geometry)
        others = [Impl.TRITON, choose(on_cpu).impl] if q.is_cuda else [Impl.REFERENCE]
        for impl in others:
            device = q.device if impl is Impl.TRITON else "cpu"
            problem = replace(self.problem, geometry=self.geometry)
            other = plan(problem, impl, self.softmax_scale)
            moved = PagedKV(*(t.to(device) for t in vars(small).values()))
            counted, out = count(
                other, q.to(device), moved, ends.to(device), batch, skip_lambda.to(device)
            )
            row[str(impl)] = counted
            error = float((out[used].cpu().float() - want[used].cpu().float()).abs().max())
            row["largest_error"] = max(row["largest_error"], error)
        found.append(row)
        return result

    return replaced(Plan, run=repeated)


@contextmanager
def _no_waits(calls: dict[str, int]) -> Iterator[None]:
    import torch

    from blasst.plugin.voting import VotingBuilder, VotingImpl

    def strict(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if not torch.cuda.is_available():
                return method(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    with (
        replaced(VotingBuilder, split_batch=strict("split", VotingBuilder.split_batch)),
        replaced(VotingImpl, forward=strict("forward", VotingImpl.forward)),
    ):
        yield


def _runner(engine: Any) -> Any:
    """vLLM's model runner of an engine in this process."""
    worker = engine.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def _rate(rows: Sequence[Sequence[int]]) -> float | None:
    visited = sum(r[0] for r in rows)
    return sum(r[1] for r in rows) / visited if visited else None


def _by_length(prompts: Sequence[Sequence[int]], times: Sequence[float]) -> dict[str, float]:
    """Medians, of prompts whose length rounds to the same number of 1024 tokens."""
    groups: dict[str, list[float]] = {}
    for prompt, seconds in zip(prompts, times, strict=True):
        groups.setdefault(f"{round(len(prompt) / 1024)}K", []).append(seconds)
    return {name: statistics.median(values) for name, values in groups.items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _holds(answer: list[int], gold: list[int]) -> bool:
    """Whether an answer holds these tokens side by side; False when there are none."""
    size = len(gold)
    return size > 0 and any(answer[i : i + size] == gold for i in range(len(answer) - size + 1))


if __name__ == "__main__":
    sys.exit(main())
