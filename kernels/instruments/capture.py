"""Runs on the GPU that the instruments look at: one traced launch, or launches for a profiler.

python -m blasst.kernels.instruments.capture PROBLEM IMPL RATE...   what `blasst trace --counters`
runs under Nsight Compute: dense, then a vote at each rate, one launch each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from blasst.kernels.bench.problems import PROBLEMS, Inputs, geometry_for, make_inputs, ours
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.hopper.config import WARP, WARPGROUP, Config
from blasst.kernels.hopper.launch import config_for, prefill
from blasst.kernels.instruments.record import Recording, reads_of
from blasst.kernels.instruments.steps import STEPS
from blasst.kernels.types import PagedKV

DTYPE = "bfloat16"


def warp_names(config: Config) -> dict[int, str]:
    """Of a thread block of the Hopper kernel: a loading warpgroup, then those that consume."""
    a_group = WARPGROUP // WARP
    return {
        warp: f"group {warp // a_group - 1} warp {warp % a_group}"
        if warp >= a_group
        else f"load warp {warp}"
        for warp in range(config.threads // WARP)
    }


def inputs(problem: str, impl: str, rate: float) -> Inputs:
    """Of a named problem on the GPU."""
    shape = PROBLEMS[problem]
    geometry = geometry_for(impl, shape, "cuda", DTYPE)
    return make_inputs(shape, rate, device="cuda", dtype=getattr(torch, DTYPE), geometry=geometry)


def record(problem: str, rate: float | None, visits: int, block: tuple[int, int, int]) -> Recording:
    """One launch of the Hopper kernel with clocks; rate: None = dense, without a vote.

    visits: key blocks that there is room for; block: the thread block to look at, counted as
    (head of the group, query tile from the last one, kv head).
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise UnsupportedError(["clocks are read in the Hopper kernel: it needs such a GPU"])
    x = inputs(problem, "hopper", rate or 0.0)
    paged = isinstance(x.kv, PagedKV)
    config = config_for(
        DTYPE,
        x.shape.head_dim,
        causal=x.shape.causal,
        page_size=x.shape.page_size or 0 if paged else 0,
        vote=rate is not None,
        count=rate is not None,
    )
    names = warp_names(config)
    buffer = torch.zeros(1 + len(names), visits, STEPS, dtype=torch.int64, device="cuda")
    counters = torch.zeros(x.shape.num_kv_heads, 2, dtype=torch.int64, device="cuda")
    tokens = x.shape.tokens
    assert tokens is not None
    for _ in range(2):  # the first one warms up
        buffer.zero_()
        buffer[0, 0, :3] = torch.tensor(block)
        prefill(
            x.q,
            x.kv,
            x.cu_seqlens_q,
            torch.empty_like(x.q),
            max_seqlen_q=tokens,
            softmax_scale=x.shape.head_dim**-0.5,
            causal=x.shape.causal,
            skip_lambda=None if rate is None else x.skip_lambda,
            counters=None if rate is None else counters,
            trace=buffer,
        )
    what = "dense" if rate is None else f"vote, {rate:.0%} skipped"
    about = {"problem": problem, "rate": rate, "block": block, "gpu": torch.cuda.get_device_name()}
    return Recording(f"{problem}, {what}", names, reads_of(buffer.cpu().tolist()), about)


def launch_names(rates: Sequence[float]) -> list[str]:
    """What `main` runs, in this order."""
    return ["dense", *(f"vote {rate:.0%}" for rate in rates)]


def main(argv: Sequence[str]) -> None:
    problem, impl, rates = argv[0], argv[1], [float(rate) for rate in argv[2:]]
    runs = [ours(impl, inputs(problem, impl, 0.0), vote=False).run]
    runs += [ours(impl, inputs(problem, impl, rate), vote=True).run for rate in rates]
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1:])
