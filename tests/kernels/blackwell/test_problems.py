"""That the problems of the proof can fail: they skip, and unequal thresholds show."""

from __future__ import annotations

import functools

import pytest

from blasst.kernels.blackwell.config import ROWS, Config
from blasst.kernels.blackwell.problems import Part, parts
from blasst.kernels.reference import reference_attention
from blasst.kernels.testing import cumulative
from blasst.kernels.types import AttentionSpec, Geometry
from blasst.kernels.verify import plans
from blasst.kernels.verify.subjects.attention import Kernel, Shape, prefill_inputs
from blasst.kernels.verify.subjects.masks import block_mask

GEOMETRY = Geometry(ROWS, 128)
VOTING = [p for p in parts() if p.config.vote and p.name != "long"]


def skipped(config: Config, shape: Shape) -> tuple[int, int]:
    """Blocks that the oracle skips, and with the first request's threshold for all."""
    return _skipped(config.dtype, config.head_dim, config.causal, shape)


@functools.cache
def _skipped(dtype: str, head_dim: int, causal: bool, shape: Shape) -> tuple[int, int]:
    kernel = Kernel(dtype, head_dim, causal, 0, True, True, GEOMETRY)
    q, kv, lambdas = prefill_inputs(kernel, shape)
    cu_q = cumulative([queries for queries, _ in shape.seqlens])
    mask = None
    if shape.mask:
        mask = block_mask(shape.mask, shape.seqlens, shape.num_heads, GEOMETRY)
    spec = AttentionSpec(causal=causal, block_mask=mask, geometry=GEOMETRY)
    found = []
    for given in (lambdas, lambdas[:1].expand(len(lambdas)).contiguous()):
        result = reference_attention(q, kv, cu_q, spec=spec, skip_lambda=given)
        found.append(int(result.counts(shape.num_kv_heads)[:, 1].sum()))
    return found[0], found[1]


@pytest.mark.parametrize("part", VOTING, ids=lambda p: p.name)
def test_every_voting_build_skips_blocks(part: Part) -> None:
    hostile_masks_first = reversed(part.shapes) if part.config.block_mask else part.shapes
    assert any(skipped(part.config, shape)[0] for shape in hostile_masks_first)


def test_a_kernel_with_the_threshold_of_another_request_is_noticed() -> None:
    for name in ("vote", "vote, own P", "vote, not causal", "head_dim 64, float16, pages of 16",
                 "staying", "staying, own P"):  # fmt: skip
        (part,) = [p for p in VOTING if p.name == name]
        several = [skipped(part.config, s) for s in part.shapes if len(s.seqlens) > 1]
        assert any(own != other for own, other in several), name


def test_so_do_the_problems_that_verify_runs_by_default() -> None:
    config = Config("bfloat16", 128, True, 0, True, True)
    found = [skipped(config, shape) for shape in plans.defaults(None)]
    assert all(own > 0 for own, _ in found)
    assert any(own != other for own, other in found)
    assert all(not s.mags for s in plans.defaults(None, dense=True))
