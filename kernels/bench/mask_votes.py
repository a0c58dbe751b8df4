"""`blasst bench masks`, section votes: a skip threshold on top of a mask, against FA4's forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from blasst.kernels.bench import mask_cases as cases
from blasst.kernels.bench.mask_cases import Run
from blasst.kernels.bench.masks import Plan, Row, fa4_forward, refusal
from blasst.kernels.call import Call, check_call
from blasst.kernels.dispatch import choose, implementation
from blasst.kernels.errors import BlasstError
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.serving import spec_for
from blasst.kernels.support import own_geometry
from blasst.kernels.types import AttentionSpec, RaggedKV

STEP = 8.0
FINE = 16
SHARES = (0.0, 0.5, 0.75, 0.95)
TILE_N = 128  # keys of a level; every implementation of a GPU votes on so many
IN_A_ROW = 4  # launches of one measurement: the host prepares the next while one runs


@dataclass(frozen=True)
class Ballot:
    """Contenders of one mask and length, compiled. ours: the implementation that votes; rates:
    skipped of the visited blocks, by contender."""

    mask: str
    tokens: int
    ours: str
    runs: dict[str, Run]
    rates: dict[str, float]
    left_out: dict[str, str]


def votes(plan: Plan) -> Iterator[Row]:
    """Forward only, of prepared calls. low: share of key blocks far below the others; skip_rate:
    what was skipped of the visited blocks, counted. ours: the implementation that ran."""
    for tokens in plan.lengths:
        for name in plan.masks:
            yield from timed_votes(plan, ballot(plan, name, tokens))


def ballot(plan: Plan, name: str, tokens: int) -> Ballot:
    """Every contender that counts or is a rival runs once."""
    case = plan.case(name, tokens)
    mask = cases.bound(case)
    (q, k, v), _ = cases.inputs(case)
    rivals, left_out = _rivals(plan, mask, (q, k, v))
    runs = dict(rivals)
    ours, runs["dense"] = _ours(mask, q, k, v, None, None)
    found = Ballot(name, tokens, ours, runs, {}, left_out)
    if name == "causal":
        _, runs["dense, no mask"] = _ours(None, q, k, v, None, None)
    for share in SHARES:
        counters = torch.zeros(k.shape[2], 2, dtype=torch.int64, device=k.device)
        label = f"vote, {share:.0%} low"
        _, runs[label] = _ours(mask, _aligned(q), _lower(k, share), v, 2.0**-8, counters)
        runs[label]()
        visited, skipped = counters.sum(0).tolist()
        found.rates[label] = skipped / visited if visited else 0.0
    return found


def timed_votes(plan: Plan, found: Ballot) -> Iterator[Row]:
    """One row a contender; ratio: over the first, the rival where it runs."""
    ms = cases.interleaved(
        {label: _in_a_row(run, plan.device) for label, run in found.runs.items()},
        plan.rounds,
        plan.device,
    )
    first = next(iter(ms.values()))
    where: Row = {"mask": found.mask, "tokens": found.tokens, "ours": found.ours}
    for label, each in ms.items():
        yield {
            **where, "what": label, "skip_rate": found.rates.get(label),
            "forward_ms": each / _launches(plan.device), "ratio": each / first,
        }  # fmt: skip
    for label, why in found.left_out.items():
        yield {**where, "what": label, "left_out": why}


def _launches(device: str) -> int:
    return IN_A_ROW if device == "cuda" else 1


def _in_a_row(run: Run, device: str) -> Run:
    def launches() -> None:
        for _ in range(_launches(device)):
            run()

    return launches


def _rivals(
    plan: Plan, mask: AttentionMask, qkv: cases.Tensors
) -> tuple[dict[str, Run], dict[str, str]]:
    """FlashAttention-4 under the same mask, its lists made before; and why it cannot."""
    if plan.device != "cuda":
        return {"eager": cases.forward(cases.attend("eager", mask), qkv)}, {}
    try:
        run = cases.forward(fa4_forward(mask), qkv)
    except BlasstError as e:
        return {}, {"fa4": str(e)}
    why = refusal(run)
    return ({"fa4": run}, {}) if why is None else ({}, {"fa4": why})


def _aligned(q: torch.Tensor) -> torch.Tensor:
    """Queries along the two directions in which keys have a level, STEP (natural log) a unit."""
    q = q.clone()
    q[..., :2] = STEP * q.shape[-1] ** 0.5
    return q


def _lower(k: torch.Tensor, share: float) -> torch.Tensor:
    """A share of key blocks, not the last one, lies below all blocks to their right.

    Levels are whole numbers in two columns: each part is exact in bfloat16.
    """
    k = k.clone()
    blocks = -(-k.shape[1] // TILE_N)
    level = torch.zeros(blocks, dtype=torch.int64)
    order = torch.randperm(max(0, blocks - 1), generator=torch.Generator().manual_seed(0))
    low = order[: round(share * len(order))]
    level[low] = low - blocks
    levels = level.repeat_interleave(TILE_N)[: k.shape[1], None].to(k.device)
    k[..., 0], k[..., 1] = levels // FINE * FINE, levels % FINE
    return k


def _ours(
    mask: AttentionMask | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    skip_lambda: float | None,
    counters: torch.Tensor | None,
) -> tuple[str, Run]:
    """The implementation that runs here, and a call of it that was checked before. mask: None =
    causal without one."""
    tokens, device = q.shape[1], q.device
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    kv = RaggedKV(k[0], v[0], ends)
    threshold = None if skip_lambda is None else torch.tensor([skip_lambda], device=device)
    out = torch.empty_like(q[0])

    def checked(spec: AttentionSpec) -> Call:
        return check_call(q[0], kv, ends, spec, threshold, out, counters)

    problem = checked(AttentionSpec()).problem
    if mask is not None:
        problem = replace(problem, causal=mask.is_causal, block_mask=True)
    impl = choose(problem).impl
    geometry = own_geometry(problem, impl)
    spec = AttentionSpec(geometry=geometry)
    if mask is not None:
        spec = spec_for(mask, q.shape[-1] ** -0.5, geometry)
    call, start = checked(spec), implementation(impl)
    return str(impl), lambda: start(call, out, counters)
