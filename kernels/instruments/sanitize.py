"""compute-sanitizer over a GPU kernel: small problems of every kind, and faults planted on purpose.

python -P -m blasst.kernels.instruments.sanitize --impl hopper
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blasst.kernels.types import Geometry

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
PLANTS = {"memcheck": "rows", "initcheck": "lambda", "synccheck": "branch", "racecheck": "order"}
"""What is planted: more query rows than there are; a lambda that nothing wrote; a wait for products
in a branch of single warps; values in shared memory that a warp reads without a barrier."""
OF_INPUTS = ("rows", "lambda")
"""Of every kernel; the others are in the device code of hopper, `plants.py`."""
IMPLS = ("hopper", "triton")
EVERYTHING = "everything"
RAN = "every problem ran"
TIMEOUT_S = 300
QUIET = {"memcheck": ("--report-api-errors", "no")}
"""Libraries ask the driver for what it may not have, and take its error for an answer."""
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


@dataclass(frozen=True)
class Case:
    """seqlens: (query rows, keys) of each request; masked: 100 tokens see each other alone."""

    seqlens: tuple[tuple[int, int], ...] = ((130, 700), (0, 0), (5, 5))
    page_size: int | None = None
    head_dim: int = 128
    vote: bool = True
    causal: bool = True
    masked: bool = False


CASES = (
    Case(),
    Case(vote=False),
    Case(vote=False, causal=False),
    Case(page_size=16),
    Case(page_size=16, vote=False),
    Case(page_size=64),
    Case(head_dim=64),
    Case(head_dim=64, page_size=32, vote=False),
    Case(seqlens=((300, 300),), masked=True),
    Case(seqlens=((300, 300),), masked=True, page_size=16, vote=False),
)


@dataclass(frozen=True)
class Run:
    """One run of a tool. plant: the fault, or None. found: errors; None = it came to no verdict."""

    tool: str
    plant: str | None
    found: int | None
    said: str

    @property
    def good(self) -> bool:
        """Clean where nothing is planted, caught where something is."""
        return self.found is not None and (self.found > 0) == (self.plant is not None)


def errors_found(text: str) -> int | None:
    """What compute-sanitizer counted; None: no verdict, or none found and not every problem ran."""
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    return max(counts) if counts and (RAN in text or max(counts) > 0) else None


def run_under(tool: str, impl: str, plant: str | None, sanitizer: str) -> Run:
    """Raises OSError where `sanitizer` is no program."""
    program = [sys.executable, "-P", "-m", "blasst.kernels.instruments.sanitize"]
    program += ["--impl", impl, "--run", plant or EVERYTHING]
    # Memory of torch's own cache hides reads beyond a tensor, and what nothing wrote.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [sanitizer, "--tool", tool, *QUIET.get(tool, ()), "--print-limit", "3", *program],
            capture_output=True, text=True, timeout=TIMEOUT_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Run(tool, plant, None, f"no end within {TIMEOUT_S} s")
    text = done.stdout + done.stderr
    told = [line.strip(" =") for line in text.splitlines() if line.startswith("=====")]
    told = [line for line in told if line and not line.startswith(("COMPUTE-SAN", "Host Frame"))]
    return Run(tool, plant, errors_found(text), " | ".join(told[:8] or text.split("\n")[-3:]))


def run_problems(impl: str, plant: str) -> None:
    """On this GPU, in this process. plant: of PLANTS, or EVERYTHING: each problem as it is."""
    import torch

    if plant not in (EVERYTHING, *OF_INPUTS):
        from blasst.kernels.instruments import plants

        plants.plant(plant)
    for case in CASES if plant == EVERYTHING else CASES[:1]:
        _run(case, impl, plant)
    torch.cuda.synchronize()
    print(RAN, flush=True)


def _run(case: Case, impl: str, plant: str) -> None:
    import torch

    from blasst.kernels.call import check_call
    from blasst.kernels.dispatch import choose, implementation
    from blasst.kernels.support import own_geometry
    from blasst.kernels.testing import block_mask_from, cumulative, paged
    from blasst.kernels.types import AttentionSpec, BlockMask, PagedKV, RaggedKV

    draw = torch.Generator().manual_seed(0)
    rows, keys = (sum(lengths) for lengths in zip(*case.seqlens, strict=True))
    q, k, v = (
        torch.randn(n, heads, case.head_dim, generator=draw).bfloat16()
        for n, heads in ((rows, 4), (keys, 2), (keys, 2))
    )
    ragged = RaggedKV(k, v, cumulative([n for _, n in case.seqlens]))
    kv: PagedKV | RaggedKV = ragged
    if case.page_size is not None:
        kv = paged(ragged, case.page_size)
    kv = type(kv)(*(t.cuda() for t in vars(kv).values()))
    skip_lambda = torch.full((len(case.seqlens),), 0.05).cuda() if case.vote else None
    counters = torch.zeros(2, 2, dtype=torch.int64).cuda()
    spec = AttentionSpec(causal=case.causal)
    if case.masked:
        geometry = Geometry(64, 128) if impl == "hopper" else Geometry()
        made = block_mask_from(
            lambda b, h, i, j: i // 100 == j // 100,
            seqlens=case.seqlens, num_heads=4, geometry=geometry,
        )  # fmt: skip
        lists = [t.cuda() for t in vars(made).values() if isinstance(t, torch.Tensor)]
        spec = replace(spec, geometry=geometry, block_mask=BlockMask(made.mask_mod, *lists))
    ends = cumulative([n for n, _ in case.seqlens]).cuda()
    call = check_call(q.cuda(), kv, ends, spec, skip_lambda, None, counters)
    chosen = choose(call.problem, impl).impl
    call = call.voting(own_geometry(call.problem, chosen))
    if plant == "lambda":
        call = replace(call, skip_lambda=torch.empty(len(case.seqlens), device="cuda"))
    if plant == "rows":
        call = replace(call, cu_seqlens_q=ends + torch.tensor([0, 0, 0, 64]).int().cuda())
    implementation(chosen)(call, torch.empty_like(call.q), counters)


def _plants(tool: str, impl: str) -> list[str]:
    planted = PLANTS[tool]
    return [planted] if impl == "hopper" or planted in OF_INPUTS else []


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 clean and every planted fault caught, 1 not, 2 it cannot run here."""
    parser = argparse.ArgumentParser(
        description="compute-sanitizer over small problems of a GPU kernel, and planted faults."
    )
    parser.add_argument("--impl", choices=IMPLS, default=IMPLS[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="may be repeated (all)")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its path")
    parser.add_argument("--run", choices=(EVERYTHING, *PLANTS.values()), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run is not None:
        run_problems(options.impl, options.run)
        return 0
    path = shutil.which(options.sanitizer)
    if path is None:
        print(f"{options.sanitizer} is not here: install it (package cuda-sanitizer)")
        return 2
    good = True
    for tool in options.tool or TOOLS:
        for plant in (None, *_plants(tool, options.impl)):
            run = run_under(tool, options.impl, plant, path)
            good = good and run.good
            what = f"planted: {plant}" if plant else f"{len(CASES)} problems"
            verdict = "as it should be" if run.good else f"WRONG: {run.said}"
            print(f"{tool}, {options.impl}, {what}: {run.found} found, {verdict}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
