"""`blasst bench masks`, section votes: a skip threshold on top of a mask, against FA4's forward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from blasst.kernels.bench import mask_cases as cases
from blasst.kernels.bench.mask_cases import Run
from blasst.kernels.bench.masks import Plan, Row, refusal
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.serving import spec_for
from blasst.kernels.types import Geometry, RaggedKV

STEP = 8.0
FINE = 16
SHARES = (0.0, 0.5, 0.75, 0.95)
GEOMETRY = Geometry(128, 128)


def votes(plan: Plan) -> Iterator[Row]:
    """Forward only. low: share of key blocks far below the others; skip_rate: what was skipped of
    the visited blocks, counted."""
    for tokens in plan.lengths:
        for name in cases.MASKS:
            case = plan.case(name, tokens)
            mask = cases.bound(case)
            (q, k, v), _ = cases.inputs(case)
            runs: dict[str, Run] = {}
            rates: dict[str, float] = {}
            rivals = ("fa4",) if plan.device == "cuda" else ("eager",)
            left_out = {}
            for rival in rivals:
                run = cases.forward(cases.attend(rival, mask), (q, k, v))
                if (why := refusal(run)) is not None:
                    left_out[rival] = why
                else:
                    runs[rival] = run
            runs["dense"] = _ours(mask, q, k, v, None, None)
            for share in SHARES:
                counters = torch.zeros(k.shape[2], 2, dtype=torch.int64, device=k.device)
                leveled = _lower(k, share)
                run = _ours(mask, _aligned(q), leveled, v, 2.0**-8, counters)
                run()
                visited, skipped = counters.sum(0).tolist()
                label = f"vote, {share:.0%} low"
                rates[label] = skipped / visited if visited else 0.0
                runs[label] = run
            ms = cases.interleaved(runs, plan.rounds, plan.device)
            first = next(iter(ms.values()))
            for label, each in ms.items():
                yield {
                    "mask": name, "tokens": tokens, "what": label,
                    "skip_rate": rates.get(label), "forward_ms": each, "ratio": each / first,
                }  # fmt: skip
            for label, why in left_out.items():
                yield {"mask": name, "tokens": tokens, "what": label, "left_out": why}


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
    blocks = -(-k.shape[1] // GEOMETRY.tile_n)
    level = torch.zeros(blocks, dtype=torch.int64)
    order = torch.randperm(max(0, blocks - 1), generator=torch.Generator().manual_seed(0))
    low = order[: round(share * len(order))]
    level[low] = low - blocks
    levels = level.repeat_interleave(GEOMETRY.tile_n)[: k.shape[1], None].to(k.device)
    k[..., 0], k[..., 1] = levels // FINE * FINE, levels % FINE
    return k


def _ours(
    mask: AttentionMask,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    skip_lambda: float | None,
    counters: torch.Tensor | None,
) -> Run:
    """Our kernel alone on a GPU: what it reads of the mask is made once, as lists are."""
    from blasst.kernels.api import prefill_attention
    from blasst.kernels.call import check_call

    spec = spec_for(mask, q.shape[-1] ** -0.5, GEOMETRY)
    tokens = q.shape[1]
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)
    kv = RaggedKV(k[0], v[0], ends)
    threshold = None if skip_lambda is None else torch.tensor([skip_lambda], device=q.device)
    if not q.is_cuda:
        return lambda: prefill_attention(
            q[0], kv, ends, spec=spec, skip_lambda=threshold, counters=counters
        )
    from blasst.kernels.block_lists import block_lists
    from blasst.kernels.triton.launch import prefill

    out = torch.empty_like(q[0])
    made = block_lists(check_call(q[0], kv, ends, spec, threshold, None, None))
    return lambda: prefill(
        q[0],
        kv,
        ends,
        out,
        max_seqlen_q=tokens,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=spec.causal,
        geometry=GEOMETRY,
        skip_lambda=threshold,
        counters=counters,
        lists=made,
    )
