"""Times the GPU kernels at dialled skip rates against FlashAttention-4 dense, by turns.

python -m blasst.kernels.bench.gpu_attention --lengths 8192,65536 --rates 0,0.5,0.95 --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blasst.kernels.hopper import launch as hopper
from blasst.kernels.testing import Dialled, DialOptions, cumulative, dialled_inputs
from blasst.kernels.triton import launch as triton
from blasst.kernels.types import Geometry, PagedKV, RaggedKV

HOPPER_GEOMETRY = Geometry(64, 128)
TRITON_GEOMETRY = Geometry(128, 128)
WARM_UP = 2


@dataclass(frozen=True)
class Shape:
    """Requests of equal length; tokens each."""

    tokens: int
    batch: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    causal: bool = True


@dataclass(frozen=True)
class Inputs:
    """One dialled request, repeated `batch` times, on the GPU."""

    shape: Shape
    dialled: Dialled
    q: torch.Tensor
    kv: RaggedKV
    ends: torch.Tensor
    skip_lambda: torch.Tensor
    counters: torch.Tensor
    out: torch.Tensor


def make_inputs(shape: Shape, skip_rate: float) -> Inputs:
    options = DialOptions(dtype=torch.bfloat16, geometry=HOPPER_GEOMETRY, device="cuda")
    x = dialled_inputs(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        seqlen=shape.tokens,
        skip_rate=skip_rate,
        causal=shape.causal,
        options=options,
    )
    ends = cumulative([shape.tokens] * shape.batch).cuda()
    q, k, v = (t.repeat(shape.batch, 1, 1) for t in (x.q, x.kv.k, x.kv.v))
    counters = torch.zeros(shape.num_kv_heads, 2, dtype=torch.int64, device="cuda")
    skip_lambda = x.skip_lambda.cuda().repeat(shape.batch)
    kv = RaggedKV(k, v, ends)
    return Inputs(shape, x, q, kv, ends, skip_lambda, counters, torch.empty_like(q))


def in_pages(x: Inputs, page_size: int) -> PagedKV:
    """The same keys in shuffled pages."""
    pages = x.kv.k.shape[0] // page_size
    order = torch.randperm(pages, device="cuda")
    k, v = (
        torch.empty_like(t)
        .view(pages, page_size, *t.shape[1:])
        .index_copy(0, order, t.view(pages, page_size, *t.shape[1:]))
        for t in (x.kv.k, x.kv.v)
    )
    table = order.int().view(x.shape.batch, -1)
    return PagedKV(k, v, table, x.ends.diff().int())


def contender(x: Inputs, name: str) -> Callable[[], Any]:
    """fa4, sdpa; dense or vote of hopper or triton: hopper-vote, hopper-vote-page16."""
    shape = x.shape
    scale = shape.head_dim**-0.5
    whole = [t.view(shape.batch, -1, *t.shape[1:]) for t in (x.q, x.kv.k, x.kv.v)]
    if name == "fa4":
        from flash_attn.cute.interface import _flash_attn_fwd

        out = torch.empty_like(whole[0])
        return lambda: _flash_attn_fwd(*whole, causal=shape.causal, out=out)
    if name == "sdpa":
        q, k, v = (t.transpose(1, 2) for t in whole)
        backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION

        def sdpa() -> None:
            with torch.nn.attention.sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.causal, enable_gqa=True
                )

        return sdpa
    impl, mode, *page = name.split("-")
    kv = in_pages(x, int(page[0].removeprefix("page"))) if page else x.kv
    options: dict[str, Any] = {
        "max_seqlen_q": shape.tokens,
        "softmax_scale": scale,
        "causal": shape.causal,
        "skip_lambda": x.skip_lambda if mode == "vote" else None,
        "counters": x.counters,
    }
    if impl == "triton":
        return lambda: triton.prefill(x.q, kv, x.ends, x.out, geometry=TRITON_GEOMETRY, **options)
    return lambda: hopper.prefill(x.q, kv, x.ends, x.out, **options)


def measure(x: Inputs, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each name but the first, the base, which runs before and after every two of its
    calls: neighbours share the card's clock, which the power limit moves by more than 5%.

    ms and base_ms: medians; ratio: median over the rounds, between least and most.
    """
    base = contender(x, names[0])
    return [_measure_one(x, name, base, rounds) for name in names[1:]]


def _measure_one(x: Inputs, name: str, base: Callable[[], Any], rounds: int) -> dict[str, Any]:
    call = contender(x, name)
    x.counters.zero_()
    for _ in range(WARM_UP):
        call()
        base()
    visited, skipped = x.counters.sum(0).tolist()
    order = [base] + [call, call, base] * rounds
    events = []
    for run in order:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    bases, calls = times[::3], [sum(times[i : i + 2]) / 2 for i in range(1, len(times), 3)]
    ratios = [2 * t / (bases[i] + bases[i + 1]) for i, t in enumerate(calls)]
    return {
        **vars(x.shape),
        "what": name,
        "skip_rate": skipped / visited if visited else None,
        "ms": statistics.median(calls),
        "base_ms": statistics.median(bases),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="8192", help="tokens of a request, comma-separated")
    parser.add_argument("--rates", default="0,0.5,0.75,0.95", help="skip rates, comma-separated")
    parser.add_argument(
        "--what", default="fa4,hopper-dense,hopper-vote", help="the base, then contenders"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU, and torch finds none here")
    rows = []
    for tokens in map(int, options.lengths.split(",")):
        shape = Shape(tokens, options.batch, head_dim=options.head_dim, causal=not options.full)
        for rate in map(float, options.rates.split(",")):
            new = measure(make_inputs(shape, rate), options.what.split(","), options.rounds)
            for row in new:
                skip = "" if row["skip_rate"] is None else f"{row['skip_rate']:.4f}"
                print(
                    f"| {tokens} | {rate:.2f} | {row['what']} | {skip} | {row['base_ms']:.3f} | "
                    f"{row['ms']:.3f} | {row['ratio']:.3f} ({row['least']:.3f} to "
                    f"{row['most']:.3f}) |",
                    flush=True,
                )
            rows += new
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
