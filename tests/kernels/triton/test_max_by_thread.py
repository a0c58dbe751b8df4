"""What a thread of a product holds of a row: the maxima by which a tile votes."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the Triton kernel needs triton")
tl = pytest.importorskip("triton.language", reason="the Triton kernel needs triton")

from blasst.kernels.triton.device import _max_by_thread  # noqa: E402  (not without triton)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def kernel(Scores, Out, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    m, n, four = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, 4)
    scores = tl.load(Scores + m[:, None] * TILE_N + n[None, :])
    tl.store(Out + m[:, None] * 4 + four[None, :], _max_by_thread(scores, TILE_M, TILE_N))


@pytest.mark.parametrize("tile", [(128, 64), (32, 16)])
def test_pairs_of_columns_eight_apart_share_a_maximum(tile: tuple[int, int]) -> None:
    scores = torch.randn(tile, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = torch.empty(tile[0], 4, device=DEVICE)
    kernel[(1,)](scores, out, *tile)
    want = scores.view(tile[0], -1, 4, 2).amax((1, 3))
    assert torch.equal(out, want)
    assert torch.equal(out.amax(1), scores.amax(1))
