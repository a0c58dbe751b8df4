"""Masks, inputs and contenders of `blasst bench masks`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from blasst.kernels.masks import bind, causal, document, shared_prefix, strip_history_thinking
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.expr import Mask
from blasst.kernels.masks.fa4 import load_fa4
from blasst.kernels.masks.mods import Role
from blasst.kernels.masks.routes import masked_attention
from blasst.kernels.masks.segments import Segments

MASKS: dict[str, Mask] = {
    "causal": causal(),
    "shared_prefix": shared_prefix(),
    "strip_thinking": strip_history_thinking(),
}
EXACT = "exact"
"""Not a route: FlexAttention on Triton as the exact lane compiles it."""
ROUTES = ("fa4", "flex-fa4", "flex-triton", EXACT)
FORWARD_ONLY = "blasst"
CAUSAL_ONLY = ("sdpa-causal", "fa4-causal")
"""Kernels for causality without a mask: what the mask's generality costs."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is computed: batch x tokens, num_heads q and kv heads of head_dim."""

    mask: str
    tokens: int
    batch: int = 1
    num_heads: int = 16
    head_dim: int = 128
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16


def segments(tokens: int, batch: int = 1) -> Segments:
    """One layout for all three masks: a prefix of a quarter and three suffixes; four turns, each an
    eighth user, half thinking, the rest answer."""
    place = torch.arange(tokens)
    prefix, turn = tokens // 4, max(1, tokens // 4)
    segment = torch.where(
        place < prefix, 0, 1 + (place - prefix) // max(1, (tokens - prefix + 2) // 3)
    )
    within = place % turn
    role = torch.full_like(place, Role.ANSWER)
    role[within < turn // 8 + turn // 2] = Role.THINK
    role[within < turn // 8] = Role.TEXT
    columns = (torch.zeros_like(place), segment, place // turn, role, place)
    return Segments(*(c.int().expand(batch, -1).contiguous() for c in columns))


def bound(case: Case) -> AttentionMask:
    """The case's mask on its device."""
    return bind(MASKS[case.mask], segments(case.tokens, case.batch), case.device)


def documents(lengths: Sequence[int], tokens: int) -> Segments:
    """`segments` of the first document, beside others of these lengths."""
    first = segments(lengths[0])
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:tokens].int()[None]
    padded = [
        torch.nn.functional.pad(t, (0, tokens - lengths[0]))
        for t in (first.segment_ids, first.turn_ids, first.role_ids, first.position_ids)
    ]
    return Segments(ids, *padded)


def packed(name: str, layout: Segments, device: str) -> AttentionMask:
    """A mask among documents."""
    return bind(MASKS[name] & document(), layout, device)


def inputs(case: Case, seed: int = 0) -> tuple[Tensors, torch.Tensor]:
    """(q, k, v) [batch, tokens, heads, head_dim], and a gradient of the output."""
    generator = torch.Generator(case.device).manual_seed(seed)
    shape = case.batch, case.tokens, case.num_heads, case.head_dim
    q, k, v, grad = (
        torch.randn(shape, generator=generator, device=case.device).to(case.dtype) for _ in range(4)
    )
    return (q, k, v), grad


def attend(route: str, mask: AttentionMask) -> Callable[..., torch.Tensor]:
    """(q, k, v) -> out of a route; of the exact lane ("exact"); of torch's attention with the dense
    mask ("sdpa"); or of torch's or FlashAttention-4's own causal kernel, without a mask
    ("sdpa-causal", "fa4-causal")."""
    if route == "fa4-causal":
        return lambda q, k, v: load_fa4().interface.flash_attn_func(q, k, v, causal=True)[0]
    if route == EXACT:
        return lambda q, k, v: masked_attention(q, k, v, mask, lane="exact")
    if not route.startswith("sdpa"):
        return lambda q, k, v: masked_attention(q, k, v, mask, impl=route)
    dense = mask.dense()[:, None] if route == "sdpa" else None

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, is_causal=dense is None
        )
        return out.transpose(1, 2)

    return sdpa


def forward(function: Callable[..., torch.Tensor], qkv: Tensors) -> Run:
    """Inference."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            return function(*qkv)

    return run


def both(function: Callable[..., torch.Tensor], qkv: Tensors, grad: torch.Tensor) -> Run:
    """Forward and backward: returns [out, dq, dk, dv]."""
    leaves = [t.detach().clone().requires_grad_() for t in qkv]

    def run() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = function(*leaves)
        out.backward(grad)  # type: ignore[no-untyped-call]
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return run


def interleaved(runs: Mapping[str, Run], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds; every round runs each contender once, in turn; two rounds warm up.

    On a GPU between events, on a CPU of processor time.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            elapsed = _timed(run, device)
            if i >= 2:
                times[name].append(elapsed)
    return {name: statistics.median(t) for name, t in times.items()}


def _timed(run: Run, device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        run()
        return 1e3 * (time.process_time() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))
