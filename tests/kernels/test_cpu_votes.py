"""What the CPU implementations keep, and what they do not read: poisoned values, NaN, ties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.testing import (
    Dialled,
    block_mask_from,
    cumulative,
    dialled_inputs,
)
from blasst.kernels.types import LN_2, AttentionSpec, RaggedKV

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _dialled() -> Dialled:
    return dialled_inputs(num_heads=6, num_kv_heads=2, head_dim=64, seqlen=1500, skip_rate=0.75)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e38])
def test_values_of_skipped_blocks_are_not_read(attend: Attend, poison: float) -> None:
    d = _dialled()
    always_skipped = d.low.repeat_interleave(128, 1)[:, :1500].t()
    # The last key blocks are the first that some rows visit, and those are never skipped.
    own = torch.arange(1500) >= 1408
    clean, _ = attend(d.q[-92:], d.kv, cumulative([92]), skip_lambda=d.skip_lambda)
    v = d.kv.v.clone()
    v[always_skipped & ~own[:, None]] = poison
    assert (v == poison).any() or v.isnan().any()
    poisoned = RaggedKV(d.kv.k, v, d.kv.cu_seqlens_k)
    out, _ = attend(d.q[-92:], poisoned, cumulative([92]), skip_lambda=d.skip_lambda)
    assert torch.equal(out, clean)
    dense, _ = attend(d.q[-92:], poisoned, cumulative([92]))
    assert not torch.equal(dense, clean)


def test_p_times_v_runs_on_kept_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from blasst.kernels import cpu_torch as cpu

    d = _dialled()
    keys: list[tuple[int, int]] = []
    real = cpu._add

    def counted(
        scores: torch.Tensor,
        shift: torch.Tensor | None,
        row_sum: torch.Tensor,
        acc: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        keys.append((scores.shape[0], scores.shape[2] // 128))
        real(scores, shift, row_sum, acc, v)

    monkeypatch.setattr(cpu, "_add", counted)
    monkeypatch.setattr(cpu, "SUM_RANGE", (-math.inf, math.inf))  # no tile is computed twice
    prefill_attention(d.q, d.kv, d.cu_seqlens_q, skip_lambda=d.skip_lambda, impl="cpu-torch")
    visited, skipped = d.counts(3).sum(0).tolist()
    assert sum(heads * blocks for heads, blocks in keys) == visited - skipped
    assert skipped > visited / 2


def _most_keys(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k % 128 < 100) & (q >= 0)


@pytest.mark.parametrize("masked", [False, True])
def test_a_nan_row_stays_its_own_and_never_votes_skip(attend: Attend, masked: bool) -> None:
    d = _dialled()
    q = d.q.clone()
    q[1400, 0] = math.nan
    spec = AttentionSpec()
    if masked:  # the mask cuts every block
        some = block_mask_from(_most_keys, seqlens=[(1500, 1500)], num_heads=6)
        spec = AttentionSpec(block_mask=some)
    counters = torch.zeros(2, 2, dtype=torch.int64)
    out, _ = attend(
        q, d.kv, d.cu_seqlens_q, spec=spec, skip_lambda=d.skip_lambda, counters=counters
    )
    assert out[1400, 0].isnan().all()
    rest = torch.ones(1500, 6, dtype=torch.bool)
    rest[1400, 0] = False
    assert out[rest].isfinite().all()
    # No block of that tile of one head is skipped.
    assert d.skipped[0, 1400 // 128].sum() > 0
    assert counters[0, 1] == d.counts(3)[0, 1] - d.skipped[0, 1400 // 128].sum()
    assert counters[1, 1] == d.counts(3)[1, 1]


@pytest.mark.parametrize("where", [0, 17, 127])
def test_a_nan_key_keeps_a_block_that_would_be_skipped(attend: Attend, where: int) -> None:
    d = _dialled()
    low = int(d.low[1].nonzero()[0])
    k = d.kv.k.clone()
    k[low * 128 + where, 1, 5] = math.nan
    counters = torch.zeros(2, 2, dtype=torch.int64)
    kv = RaggedKV(k, d.kv.v, d.kv.cu_seqlens_k)
    out, _ = attend(d.q, kv, d.cu_seqlens_q, skip_lambda=d.skip_lambda, counters=counters)
    sees = torch.arange(1500) >= low * 128 + where
    assert torch.equal(out[:, 3:].isnan().any(-1).any(-1), sees)
    assert out[:, :3].isfinite().all()
    assert counters[0, 1] == d.counts(3)[0, 1]
    # Rows that have become NaN keep all that is left of it, too.
    assert counters[1, 1] <= d.counts(3)[1, 1] - 3 * d.skipped[1, :, low].sum()


def test_a_tie_is_kept(attend: Attend) -> None:
    """Scores are whole numbers in log2 units, so that lambda can be met exactly."""
    q, k = torch.zeros(128, 1, 64), torch.zeros(384, 1, 64)
    q[..., 0] = 1.0
    k[:128, 0, 0], k[128:256, 0, 0] = -2.0, -1.0
    kv = RaggedKV(k, k.clone(), cumulative([384]))
    spec = AttentionSpec(softmax_scale=LN_2, causal=False)
    for exponent, skipped in ((-1.0, 1), (-2.0, 0), (-0.5, 2)):
        counters = torch.zeros(1, 2, dtype=torch.int64)
        skip_lambda = torch.tensor([2.0**exponent], dtype=torch.float64)
        attend(q, kv, cumulative([128]), spec=spec, skip_lambda=skip_lambda, counters=counters)
        assert counters.tolist() == [[3, skipped]]
