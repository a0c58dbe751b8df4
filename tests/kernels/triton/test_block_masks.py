"""Block masks on the Triton kernel against the oracle: which blocks are visited, seen, skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blasst.kernels.block_lists import block_lists
from blasst.kernels.call import check_call
from blasst.kernels.reference import run_reference
from blasst.kernels.testing import block_mask_from
from blasst.kernels.triton.launch import run
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry, MaskMod

pytest.importorskip("triton", reason="the Triton kernel needs triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

GEOMETRY = Geometry(32, 32)
SEQLENS = ((70, 150), (40, 40))
LOW = {"low": 0.6, "geometry": GEOMETRY, "seqlens_q": (70, 40), "seqlens_k": (150, 40)}


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Documents of 50 keys, and the first 20 keys for all."""
    return (q // 50 == k // 50) | (k < 20)


def strided(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Differs by head and request, leaves some blocks empty and some rows without any key."""
    return ((q + k + h) % 3 != 0) & (k // 32 != h % 3) & (q != 100 + b)


def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= 0) & (k >= 0)


def attend(
    inputs: Any, mask: BlockMask, causal: bool, skip_lambda: list[float] | None
) -> tuple[torch.Tensor, Any]:
    """Runs the kernel, compares with the oracle; (counters, what the oracle says)."""
    device = inputs.q.device
    lists = {k: v.to(device) for k, v in vars(mask).items() if k != "mask_mod"}
    spec = AttentionSpec(
        causal=causal, block_mask=BlockMask(mask.mask_mod, **lists), geometry=GEOMETRY
    )
    lambdas = None if skip_lambda is None else torch.tensor(skip_lambda, device=device)
    call = check_call(inputs.q, inputs.ragged, inputs.cu_seqlens_q, spec, lambdas, None, None)
    want = run_reference(call)
    # NaN where nobody sees a block at lambda 0: no tie.
    assert not want.smallest_margin < 1e-3, "the inputs hold a tie"
    out = torch.full_like(inputs.q, torch.nan)
    counters = torch.zeros(2, 2, dtype=torch.int64, device=device)
    lse = run(call, out, counters)
    eps = 2 * torch.finfo(inputs.q.dtype).eps
    torch.testing.assert_close(out.double(), want.out, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)
    if skip_lambda is not None:
        torch.testing.assert_close(counters, want.counts(2))
    return counters, want


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask_mod", [documents, strided, everything])
def test_matches_the_oracle(
    make_case: Callable[..., tuple[Any, Any]], mask_mod: MaskMod, causal: bool
) -> None:
    _, inputs = make_case(**LOW)
    mask = block_mask_from(mask_mod, seqlens=SEQLENS, num_heads=4, geometry=GEOMETRY)
    attend(inputs, mask, causal, None)
    counters, _ = attend(inputs, mask, causal, [0.3, 0.05])
    assert counters[:, 1].sum() > 0


def test_lists_of_all_heads_with_a_mask_of_each(
    make_case: Callable[..., tuple[Any, Any]],
) -> None:
    """One list for all requests and heads; the mask still tells the heads apart."""
    _, inputs = make_case(**LOW)
    m_blocks, n_blocks = 3, 5
    lists = torch.arange(n_blocks).expand(1, 1, m_blocks, n_blocks).int().contiguous()
    counts = torch.full((1, 1, m_blocks), n_blocks, dtype=torch.int32)
    none = torch.zeros_like(counts)
    attend(inputs, BlockMask(strided, counts, lists, none, lists), True, [0.3, 0.05])


def test_a_first_block_without_a_visible_key_is_visited_not_skipped(
    make_case: Callable[..., tuple[Any, Any]],
) -> None:
    """The oracle's rule for the first visited block holds where nothing can be seen."""
    _, inputs = make_case(**{**LOW, "low": 0.0})
    hides_last = block_mask_from(
        lambda b, h, q, k: (k < 96) & (q >= 0), seqlens=SEQLENS, num_heads=4, geometry=GEOMETRY
    )
    # Block 4 is listed as partial although the mask lets nobody see it.
    counts, indices = hides_last.partial_counts.clone(), hides_last.partial_indices.clone()
    counts[0] = 1
    indices[0, :, :, 0] = 4
    mask = BlockMask(
        hides_last.mask_mod, counts, indices, hides_last.full_counts, hides_last.full_indices
    )
    _, want = attend(inputs, mask, False, [0.3, 0.05])
    assert want.visited[0][:, :, 4].all()
    assert not want.skipped[0][:, :, 4].any()


def test_lambda_0_skips_not_even_a_block_that_nobody_sees(
    make_case: Callable[..., tuple[Any, Any]],
) -> None:
    _, inputs = make_case(**LOW)
    m_blocks, n_blocks = 3, 5
    lists = torch.arange(n_blocks).expand(1, 1, m_blocks, n_blocks).int().contiguous()
    counts = torch.full((1, 1, m_blocks), n_blocks, dtype=torch.int32)
    none = torch.zeros_like(counts)
    mask = BlockMask(lambda b, h, q, k: (k // 32 != 1) & (q >= 0), counts, lists, none, lists)
    counters, _ = attend(inputs, mask, False, [0.0, 0.0])
    assert counters[:, 1].sum() == 0
    counters, _ = attend(inputs, mask, False, [1e-30, 1e-30])
    assert counters[:, 1].sum() > 0


def test_lists_name_blocks_from_right_to_left_and_bits_of_partial_ones(
    make_case: Callable[..., tuple[Any, Any]],
) -> None:
    _, inputs = make_case(**LOW)
    mask = block_mask_from(documents, seqlens=SEQLENS, num_heads=4, geometry=GEOMETRY)
    spec = AttentionSpec(causal=True, block_mask=mask, geometry=GEOMETRY)
    call = check_call(
        inputs.q.cpu(), type(inputs.ragged)(*(t.cpu() for t in vars(inputs.ragged).values())),
        inputs.cu_seqlens_q.cpu(), spec, None, None, None,
    )  # fmt: skip
    lists = block_lists(call)
    # The rows of request 0 are at keys 80 to 149: in documents 1 and 2; all see the first 20 keys.
    assert lists.counts[0, 0].tolist() == [4, 3, 3]
    assert lists.blocks[0, 0, 0, :4].tolist() == [3, 2, 1, 0]
    assert lists.blocks[0, 0, 2, :3].tolist() == [4, 3, 0]
    # Rows 20 on are in document 2; block 3 starts with the last four keys of document 1, and with
    # the key of row 16.
    first = lists.bits[int(lists.tiles[0, 0, 0, 0]), :, 0]
    reach = [(1 << max(0, row - 15)) - 1 for row in range(32)]
    assert first.tolist() == [r & (0b1111 if i < 20 else -16) for i, r in enumerate(reach)]
    # Block 3 lies in document 2 for rows 64 on, after its own first four keys.
    assert lists.bits[int(lists.tiles[0, 0, 2, 1]), 0, 0] == -16
