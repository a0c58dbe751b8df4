"""The oracle against plain softmax and against the rule, row by row, in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.reference import ReferenceResult, reference_attention
from blasst.kernels.testing import (
    DialOptions,
    block_mask_from,
    cumulative,
    dense_attention,
    dialled_inputs,
    paged,
)
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry, PagedKV, RaggedKV

TILE = 4


@dataclass(frozen=True)
class Case:
    """A small ragged batch: (queries, keys) of each request."""

    seqlens: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    causal: bool
    log2_lambdas: tuple[float, ...]
    seed: int

    def tensors(self) -> tuple[torch.Tensor, RaggedKV, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = (sum(pair[i] for pair in self.seqlens) for i in (0, 1))
        q = 3 * torch.randn(queries, self.num_heads, 8, generator=generator)
        k = torch.randn(keys, self.num_kv_heads, 8, generator=generator)
        v = torch.randn(keys, self.num_kv_heads, 8, generator=generator)
        kv = RaggedKV(k, v, cumulative([pair[1] for pair in self.seqlens]))
        skip_lambda = torch.tensor([2.0**x for x in self.log2_lambdas], dtype=torch.float64)
        return q, kv, cumulative([pair[0] for pair in self.seqlens]), skip_lambda


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.integers(1, 2))
    seqlens = draw(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 19)), max_size=3))
    return Case(
        tuple(seqlens),
        num_kv_heads * draw(st.integers(1, 2)),
        num_kv_heads,
        draw(st.booleans()),
        tuple(draw(st.sampled_from([-math.inf, -6.0, -2.0, -0.1])) for _ in seqlens),
        draw(st.integers(0, 1000)),
    )


State = tuple[float, float, list[float]]
"""Running max, sum and accumulator of one row, natural base."""


class BruteForce:
    """The words of the rule alone, as loops over rows and keys: sets of (head, m, n), and lists."""

    def __init__(self, case: Case, mask: BlockMask | None) -> None:
        q, kv, cu_q, skip_lambda = case.tensors()
        self.case, self.mask = case, mask
        self.q, self.k, self.v = q.tolist(), kv.k.tolist(), kv.v.tolist()
        self.cu_q, self.cu_k = cu_q.tolist(), kv.cu_seqlens_k.tolist()
        self.limits = [math.log(x) if x else None for x in skip_lambda.tolist()]
        self.out = [[[0.0] * 8 for _ in range(case.num_heads)] for _ in self.q]
        self.lse = [[-math.inf] * len(self.q) for _ in range(case.num_heads)]
        self.skipped: list[set[tuple[int, ...]]] = [set() for _ in case.seqlens]
        self.visited: list[set[tuple[int, ...]]] = [set() for _ in case.seqlens]
        for b, (sq, _) in enumerate(case.seqlens):
            for head in range(case.num_heads):
                for m in range(-(-sq // TILE)):
                    self.tile(b, head, m)

    def tile(self, b: int, head: int, m: int) -> None:
        sq, sk = self.case.seqlens[b]
        rows = range(m * TILE, min((m + 1) * TILE, sq))
        state: dict[int, State] = {r: (-math.inf, 0.0, [0.0] * 8) for r in rows}
        first = True
        for n in reversed(range(-(-sk // TILE))):
            scores = {r: self.scores(b, head, r, n) for r in rows}
            if not any(scores.values()):
                continue
            self.visited[b].add((head, m, n))
            limit = self.limits[b]
            if limit is not None and not first:
                votes = [self.votes_skip(state[r][0], scores[r], limit) for r in rows]
                if all(votes):
                    self.skipped[b].add((head, m, n))
                    continue
            first = False
            for r in rows:
                state[r] = self.add(b, head, state[r], scores[r])
        for r, (row_max, total, acc) in state.items():
            if total:
                self.out[self.cu_q[b] + r][head] = [a / total for a in acc]
                self.lse[head][self.cu_q[b] + r] = row_max + math.log(total)

    def scores(self, b: int, head: int, row: int, n: int) -> dict[int, float]:
        sq, sk = self.case.seqlens[b]
        q = self.q[self.cu_q[b] + row][head]
        kv_head = head * self.case.num_kv_heads // self.case.num_heads
        return {
            key: _dot(q, self.k[self.cu_k[b] + key][kv_head]) / math.sqrt(8)
            for key in range(n * TILE, min((n + 1) * TILE, sk))
            if self.sees(b, head, sk - sq + row, key)
        }

    @staticmethod
    def votes_skip(running_max: float, scores: dict[int, float], limit: float) -> bool:
        block_max = max(scores.values(), default=-math.inf)
        running_max = max(running_max, block_max)
        return running_max == -math.inf or block_max - running_max < limit

    def add(self, b: int, head: int, state: State, scores: dict[int, float]) -> State:
        old_max, total, acc = state
        new_max = max([old_max, *scores.values()])
        if new_max == -math.inf:
            return state
        kv_head = head * self.case.num_kv_heads // self.case.num_heads
        shrink = math.exp(old_max - new_max)
        p = {key: math.exp(score - new_max) for key, score in scores.items()}
        values = {key: self.v[self.cu_k[b] + key][kv_head] for key in p}
        acc = [a * shrink + sum(p[c] * values[c][i] for c in p) for i, a in enumerate(acc)]
        return new_max, total * shrink + sum(p.values()), acc

    def sees(self, b: int, head: int, position: int, key: int) -> bool:
        if self.case.causal and key > position:
            return False
        if self.mask is None:
            return True
        args = (torch.tensor(x) for x in (b, head, position, key))
        return bool(self.mask.mask_mod(*args))


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _as_sets(maps: list[torch.Tensor]) -> list[set[tuple[int, ...]]]:
    return [{tuple(i) for i in m.nonzero().tolist()} for m in maps]


def _compare(case: Case, result: ReferenceResult, mask: BlockMask | None = None) -> None:
    brute = BruteForce(case, mask)
    if result.smallest_margin < 1e-6:
        return
    assert _as_sets(result.visited) == brute.visited
    assert _as_sets(result.skipped) == brute.skipped
    if not result.out.numel():
        return
    expected = torch.tensor(brute.out, dtype=torch.float64)
    torch.testing.assert_close(result.out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        result.lse, torch.tensor(brute.lse, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


SPEC = {
    causal: AttentionSpec(causal=causal, geometry=Geometry(TILE, TILE)) for causal in (True, False)
}


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_rule_row_by_row(case: Case) -> None:
    q, kv, cu_q, skip_lambda = case.tensors()
    spec = SPEC[case.causal]
    result = reference_attention(q, kv, cu_q, spec=spec, skip_lambda=skip_lambda)
    _compare(case, result)


def test_the_rule_on_a_case_that_skips() -> None:
    case = Case(((11, 19), (5, 5), (0, 7), (9, 2)), 4, 2, True, (-0.1, -0.5, -1.0, -0.1), 3)
    q, kv, cu_q, skip_lambda = case.tensors()
    result = reference_attention(q, kv, cu_q, spec=SPEC[True], skip_lambda=skip_lambda)
    assert result.counts(2)[:, 1].min() > 0
    assert result.smallest_margin > 1e-4
    _compare(case, result)


def _document(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q // 6 == k // 6) | ((h == 1) & (k < 2))


@pytest.mark.parametrize("causal", [True, False])
def test_the_rule_under_a_block_mask(causal: bool) -> None:
    case = Case(((11, 19), (8, 8)), 4, 2, causal, (-0.05, -0.2), 5)
    q, kv, cu_q, skip_lambda = case.tensors()
    mod = _document
    if causal:

        def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return _document(b, h, q, k) & (k <= q)

    mask = block_mask_from(mod, seqlens=case.seqlens, num_heads=4, geometry=SPEC[causal].geometry)
    spec = AttentionSpec(causal=causal, geometry=SPEC[causal].geometry, block_mask=mask)
    result = reference_attention(q, kv, cu_q, spec=spec, skip_lambda=skip_lambda)
    assert sum(len(s) for s in _as_sets(result.skipped)) > 0
    _compare(case, result, mask)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_dense_is_plain_softmax(case: Case) -> None:
    q, kv, cu_q, _ = case.tensors()
    result = reference_attention(q, kv, cu_q, spec=SPEC[case.causal])
    exact = dense_attention(q, kv, cu_q, causal=case.causal, dtype=torch.float64)
    torch.testing.assert_close(result.out, exact, rtol=1e-9, atol=1e-9)
    assert result.counts(case.num_kv_heads)[:, 1].sum() == 0


@settings(max_examples=20, deadline=None)
@given(cases(), st.integers(1, 9), st.booleans())
def test_pages_change_nothing(case: Case, page_size: int, transposed: bool) -> None:
    q, kv, cu_q, skip_lambda = case.tensors()
    spec = SPEC[case.causal]
    ragged = reference_attention(q, kv, cu_q, spec=spec, skip_lambda=skip_lambda)
    pages: PagedKV = paged(kv, page_size, transposed_keys=transposed)
    result = reference_attention(q, pages, cu_q, spec=spec, skip_lambda=skip_lambda)
    assert torch.equal(result.out, ragged.out)
    assert torch.equal(result.lse, ragged.lse)


def test_nothing_visible_gives_zero_and_minus_infinity() -> None:
    case = Case(((6, 2), (3, 0)), 2, 1, True, (-1.0, -1.0), 0)
    q, kv, cu_q, skip_lambda = case.tensors()
    result = reference_attention(q, kv, cu_q, spec=SPEC[True], skip_lambda=skip_lambda)
    unseen = [0, 1, 2, 3, 6, 7, 8]
    assert (result.out[unseen] == 0).all()
    assert (result.lse[:, unseen] == -math.inf).all()
    assert torch.isfinite(result.lse[:, 4:6]).all()


@pytest.mark.parametrize("skip_rate", [0.0, 0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("context", [0, 77])
def test_dialled_inputs_skip_what_they_promise(
    skip_rate: float, dtype: torch.dtype, context: int
) -> None:
    options = DialOptions(dtype, Geometry(32, 16), seed=2)
    d = dialled_inputs(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        seqlen=640,
        context=context,
        skip_rate=skip_rate,
        options=options,
    )
    spec = AttentionSpec(geometry=options.geometry)
    result = reference_attention(d.q, d.kv, d.cu_seqlens_q, spec=spec, skip_lambda=d.skip_lambda)
    assert torch.equal(result.visited[0], d.visited.expand(4, -1, -1))
    assert torch.equal(result.skipped[0], d.skipped.repeat_interleave(2, 0))
    assert torch.equal(result.counts(2), d.counts(2))
    assert result.smallest_margin > 3.0
    assert d.skip_rate == pytest.approx(min(skip_rate, 0.9), abs=0.06)
    assert result.skip_rate == pytest.approx(d.skip_rate)
