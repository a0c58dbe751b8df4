"""Routes on a GPU: numbers against float32, and bits of the exact lane over repeats."""

import pytest
import torch

from blasst.kernels.masks import (
    AttentionMask,
    bind,
    document,
    masked_attention,
    pack,
    padding,
    shared_prefix,
    shared_prefix_sample,
)
from blasst.kernels.masks.fa4 import fa4_reasons

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
REPEATS = 12


def problem() -> tuple[AttentionMask, list[torch.Tensor]]:
    sample = shared_prefix_sample(range(700), [range(300), range(411), range(97)])
    batch = pack([sample, sample], pad_to_multiple_of=128)
    mask = bind(shared_prefix() & document() & padding(), batch.segments, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, mask.seqlen_q, heads, 128) for heads in (8, 2, 2, 8)]
    return mask, [torch.randn(s, generator=generator, device="cuda") for s in shapes]


def gradients(
    mask: AttentionMask, tensors: list[torch.Tensor], dtype: torch.dtype, **route: str
) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in tensors[:3])
    out = masked_attention(q, k, v, mask, **route)  # type: ignore[arg-type]
    out.backward(tensors[3].to(dtype))
    return [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]


@pytest.mark.parametrize("impl", ["flex-triton", "flex-fa4", "fa4"])
def test_errors_are_those_of_bfloat16(impl: str) -> None:
    if impl != "flex-triton" and fa4_reasons():
        pytest.skip("; ".join(fa4_reasons()))
    mask, tensors = problem()
    exact = gradients(mask, tensors, torch.float32, impl="eager")
    plain = gradients(mask, tensors, torch.bfloat16, impl="eager")
    ours = gradients(mask, tensors, torch.bfloat16, impl=impl)
    for want, same_dtype, got in zip(exact, plain, ours, strict=True):
        budget = 2 * (same_dtype - want).abs().mean() + 1e-3 * want.abs().mean()
        assert (got - want).abs().mean() <= budget


def test_exact_lane_repeats_bit_for_bit() -> None:
    mask, tensors = problem()
    first = gradients(mask, tensors, torch.bfloat16, lane="exact")
    for _ in range(REPEATS - 1):
        again = gradients(mask, tensors, torch.bfloat16, lane="exact")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
