"""Random combinations of masks over random layouts, through every route that runs on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.masks.bound import AttentionMask, bind
from blasst.kernels.masks.expr import Mask
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.masks.mods import (
    causal,
    document,
    padding,
    shared_prefix,
    sliding_window,
    strip_history_thinking,
)
from blasst.kernels.masks.routes import Options, attend
from blasst.kernels.masks.segments import Segments
from blasst.kernels.types import Geometry

Fields = dict[str, torch.Tensor]
Seen = Callable[[Fields, torch.Tensor, torch.Tensor], torch.Tensor]
"""(fields [seqlen], query index [seqlen, 1], key index [seqlen]) -> visible."""

PLAIN: tuple[tuple[Mask, Seen], ...] = (
    (causal(), lambda t, q, k: k <= q),
    (document(), lambda t, q, k: t["document"][q] == t["document"][k]),
    (padding(), lambda t, q, k: (t["document"][q] >= 0) & (t["document"][k] >= 0)),
    (sliding_window(1), lambda t, q, k: q - k < 1),
    (sliding_window(40), lambda t, q, k: q - k < 40),
    (
        shared_prefix(),
        lambda t, q, k: (k <= q) & ((t["segment"][k] == 0) | (t["segment"][k] == t["segment"][q])),
    ),
    (
        strip_history_thinking(),
        lambda t, q, k: (k <= q) & ~((t["role"][k] == 1) & (t["turn"][k] < t["turn"][q])),
    ),
)


@st.composite
def combinations(draw: st.DrawFn, depth: int = 3) -> tuple[Mask, Seen]:
    how = draw(st.sampled_from(["plain", "and", "and", "or", "not"])) if depth else "plain"
    if how == "plain":
        return draw(st.sampled_from(PLAIN))
    mask, seen = draw(combinations(depth - 1))
    if how == "not":
        return ~mask, lambda t, q, k: ~seen(t, q, k)
    other, other_seen = draw(combinations(depth - 1))
    if how == "and":
        return mask & other, lambda t, q, k: seen(t, q, k) & other_seen(t, q, k)
    return mask | other, lambda t, q, k: seen(t, q, k) | other_seen(t, q, k)


@st.composite
def layouts(draw: st.DrawFn) -> Segments:
    """Documents of one token and of many, padding between them and at the end."""
    batch = draw(st.integers(1, 3))
    seqlen = draw(st.one_of(st.integers(1, 9), st.integers(60, 150), st.sampled_from([128, 129])))
    rows: dict[str, list[list[int]]] = {n: [] for n in ("document", "segment", "turn", "role")}
    for _ in range(batch):
        lengths = draw(st.lists(st.sampled_from([1, 1, 2, 17, 64, 90]), min_size=1, max_size=12))
        gaps = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
        step = draw(st.integers(3, 30))
        row: dict[str, list[int]] = {name: [] for name in rows}
        for i, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
            row["document"] += [-1 if gap else i] * length
            row["segment"] += [j // step % 3 for j in range(length)]
            row["turn"] += [j // (2 * step) for j in range(length)]
            row["role"] += [3 if gap else j // step % 2 for j in range(length)]
        for name, values in row.items():
            fill = -1 if name == "document" else 0
            rows[name].append((values + [fill] * seqlen)[:seqlen])
    fields = [torch.tensor(values, dtype=torch.int32) for values in rows.values()]
    return Segments(*fields, torch.zeros_like(fields[0]))


def visible(segments: Segments, seen: Seen) -> torch.Tensor:
    place = torch.arange(segments.seqlen)
    shape = segments.seqlen, segments.seqlen
    rows = []
    for b in range(segments.batch):
        fields = {name: segments.field(name)[b] for name in ("document", "segment", "turn", "role")}
        rows.append(seen(fields, place[:, None], place).expand(shape))
    return torch.stack(rows)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; rows that see nothing: 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask[:, None], -math.inf)
    blind = ~mask.any(-1)[:, None, :, None]
    p = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return (p @ v).transpose(1, 2), torch.logsumexp(scores, -1)


def tensors(bound: AttentionMask, seed: int) -> list[torch.Tensor]:
    """q, k, v: 4 heads on 2; tokens lie side by side in memory, not the elements of a head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(bound.batch, heads, 64, bound.seqlen_q) for heads in (4, 2, 2)]
    return [torch.randn(s, generator=generator).permute(0, 3, 1, 2) for s in shapes]


@pytest.mark.filterwarnings("error")
@settings(deadline=None, max_examples=40)
@given(layouts(), combinations(), st.integers(0, 99))
def test_routes_equal_the_dense_mask(
    segments: Segments, combined: tuple[Mask, Seen], seed: int
) -> None:
    mask, seen = combined
    bound, expected = bind(mask, segments), visible(segments, seen)
    assert torch.equal(bound.dense(), expected)
    q, k, v = tensors(bound, seed)
    out, lse = plain(q, k, v, expected)
    scale = q.shape[-1] ** -0.5
    for geometry in (None, Geometry(64, 64), Geometry(32, 128)):
        for skip_lambda in (None, 0.0):
            options = Options(geometry=geometry, skip_lambda=skip_lambda)
            x = Inputs(q, k, v, bound, scale, want_lse=True)
            ours, ours_lse = attend(x, lane="throughput", impl="blasst", options=options)
            torch.testing.assert_close(ours.double(), out, atol=3e-5, rtol=0)
            assert ours_lse is not None
            torch.testing.assert_close(ours_lse.double(), lse, atol=3e-5, rtol=0)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    theirs = [t.detach().clone().requires_grad_() for t in leaves]
    x = Inputs(*leaves, bound, scale)
    ours, _ = attend(x, lane="throughput", impl="auto", options=Options())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    (ours * weight).sum().backward()
    (plain(*theirs, expected)[0] * weight).sum().backward()
    for mine, other in zip(leaves, theirs, strict=True):
        assert mine.grad is not None
        assert mine.grad.isfinite().all()
        torch.testing.assert_close(mine.grad, other.grad)
