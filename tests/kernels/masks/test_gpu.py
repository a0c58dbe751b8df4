"""Routes on a GPU: numbers against float32, and bits of the exact lane over repeats."""

import pytest
import torch

from blasst.kernels.errors import UnsupportedError
from blasst.kernels.masks import (
    AttentionMask,
    Segments,
    bind,
    causal,
    document,
    flex,
    masked_attention,
    pack,
    padding,
    parallel,
    routes,
    shared_prefix,
    shared_prefix_sample,
)
from blasst.kernels.masks.crossover import MEASURED
from blasst.kernels.masks.fa4 import fa4_reasons
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.masks.parallel import Shard, shard_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Of torch 2.11, and of names that CUTLASS and FlashAttention-4 use.
    pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
REPEATS = 12


def problem(
    head_dim: int = 128, multiple_of: int = 128
) -> tuple[AttentionMask, list[torch.Tensor]]:
    """3016 tokens, or 3072 with padding."""
    sample = shared_prefix_sample(range(700), [range(300), range(411), range(97)])
    batch = pack([sample, sample], pad_to_multiple_of=multiple_of)
    mask = bind(shared_prefix() & document() & padding(), batch.segments, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, mask.seqlen_q, heads, head_dim) for heads in (8, 2, 2, 8)]
    return mask, [torch.randn(s, generator=generator, device="cuda") for s in shapes]


def gradients(
    mask: AttentionMask, tensors: list[torch.Tensor], dtype: torch.dtype, **route: str
) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in tensors[:3])
    out = masked_attention(q, k, v, mask, **route)  # type: ignore[arg-type]
    out.backward(tensors[3].to(dtype))
    return [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]


OURS = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


def inference(mask: AttentionMask, tensors: list[torch.Tensor], impl: str) -> torch.Tensor:
    with torch.no_grad():
        q, k, v = (t.bfloat16() for t in tensors[:3])
        return masked_attention(q, k, v, mask, impl=impl)


@OURS
def test_auto_runs_our_kernel_for_inference_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    first = MEASURED.first("blasst", (9, 0), False, 128)
    assert first <= 1 << 17
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, first, heads, 128) for heads in (8, 2, 2)]
    long = [torch.randn(s, generator=generator, device="cuda") for s in shapes]
    layout = Segments.from_position_ids(torch.arange(first)[None] % 700)
    mask = bind(causal() & document(), layout, "cuda")
    routes._log.cache_clear()
    with caplog.at_level("INFO", logger="blasst.kernels"):
        ours = inference(mask, long, "auto")
    assert any(r.message.startswith("masked attention runs on blasst: ") for r in caplog.records)
    assert torch.equal(ours, inference(mask, long, "blasst"))
    for impl in ("flex-triton", "flex-fa4", "fa4"):
        caplog.clear()
        assert (inference(mask, long, impl).float() - ours.float()).abs().max() < 0.05
        assert not any("blasst:" in r.message for r in caplog.records)


@OURS
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_our_kernel_errs_as_bfloat16_and_does_not_wait() -> None:
    mask, tensors = problem()
    exact = masked_attention(*tensors[:3], mask, impl="eager")
    plain = masked_attention(*(t.bfloat16() for t in tensors[:3]), mask, impl="eager")
    ours = inference(mask, tensors, "blasst")
    budget = 2 * (plain.float() - exact).abs().mean() + 1e-3 * exact.abs().mean()
    assert (ours.float() - exact).abs().mean() <= budget
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        again = inference(mask, tensors, "blasst")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(ours, again)


@pytest.mark.parametrize(
    ("impl", "head_dim", "multiple_of"),
    [
        *((impl, 128, n) for impl in ("flex-triton", "flex-fa4", "fa4") for n in (1, 128)),
        *(("fa4", head_dim, 1) for head_dim in (32, 64, 96)),
    ],
)
def test_errors_are_those_of_bfloat16(impl: str, head_dim: int, multiple_of: int) -> None:
    if impl != "flex-triton" and fa4_reasons():
        pytest.skip("; ".join(fa4_reasons()))
    mask, tensors = problem(head_dim, multiple_of)
    exact = gradients(mask, tensors, torch.float32, impl="eager")
    plain = gradients(mask, tensors, torch.bfloat16, impl="eager")
    ours = gradients(mask, tensors, torch.bfloat16, impl=impl)
    for want, same_dtype, got in zip(exact, plain, ours, strict=True):
        budget = 2 * (same_dtype - want).abs().mean() + 1e-3 * want.abs().mean()
        assert (got - want).abs().mean() <= budget


@pytest.mark.parametrize("impl", ["flex-triton", "fa4"])
def test_partial_results_merge(impl: str) -> None:
    """As in ring attention: halves of the keys, merged by lse, whose gradient counts too."""
    if impl == "fa4" and fa4_reasons():
        pytest.skip("; ".join(fa4_reasons()))
    whole, tensors = problem()
    exact = gradients(whole, tensors, torch.float32, impl="eager")
    plain = gradients(whole, tensors, torch.bfloat16, impl="eager")
    q, k, v = (t.bfloat16().detach().requires_grad_() for t in tensors[:3])
    everything, parts = Shard(0, 1), []
    for keys in (Shard(0, 2), Shard(1, 2)):
        mask = shard_mask(whole, everything, keys)
        x = Inputs(q, keys.take(k), keys.take(v), mask, q.shape[-1] ** -0.5, want_lse=True)
        out, lse = routes.attend(x, lane="throughput", impl=impl, options=routes.Options())
        assert lse is not None
        parts.append((out, lse))
    merged = parallel._merge(parts)
    merged.backward(tensors[3].bfloat16())
    got = [merged.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]
    for want, same_dtype, ours in zip(exact, plain, got, strict=True):
        budget = 3 * (same_dtype - want).abs().mean() + 1e-3 * want.abs().mean()
        assert (ours - want).abs().mean() <= budget


@pytest.mark.parametrize("setting", [(False, False), (True, True), (True, False)])
def test_exact_lane_repeats_bit_for_bit(
    setting: tuple[bool, bool], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])
    mask, tensors = problem()
    first = gradients(mask, tensors, torch.bfloat16, lane="exact")
    for _ in range(REPEATS - 1):
        again = gradients(mask, tensors, torch.bfloat16, lane="exact")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def other_length(length: int, tensors: list[torch.Tensor]) -> None:
    """A forward and a backward of the exact lane over another length."""
    layout = Segments.from_position_ids(torch.arange(length)[None] % 500)
    mask = bind(shared_prefix() & document() & padding(), layout, "cuda")
    drawn = [torch.randn(1, length, t.shape[2], 128, device="cuda") for t in tensors]
    gradients(mask, drawn, torch.bfloat16, lane="exact")


def test_exact_lane_keeps_its_bits_when_other_lengths_come() -> None:
    """Lengths after ours and, compiled anew, before it; and without the padding at its end."""
    mask, tensors = problem()
    short, _ = problem(multiple_of=1)
    found = []
    for before, after in (((), (640, 4097)), ((100, 1280), ())):
        flex._compiled.cache_clear()
        torch._dynamo.reset()
        for length in before:
            other_length(length, tensors)
        found.append(gradients(mask, tensors, torch.bfloat16, lane="exact"))
        for length in after:
            other_length(length, tensors)
            found.append(gradients(mask, tensors, torch.bfloat16, lane="exact"))
    rows = short.seqlen_q
    unpadded = gradients(short, [t[:, :rows] for t in tensors], torch.bfloat16, lane="exact")
    found.append(
        [torch.cat([t, full[:, rows:]], 1) for t, full in zip(unpadded, found[0], strict=True)]
    )
    for again in found[1:]:
        assert [torch.equal(a, b) for a, b in zip(found[0], again, strict=True)] == [True] * 4


@pytest.mark.skipif(bool(fa4_reasons()), reason="; ".join(fa4_reasons()))
def test_strict_refuses_fa4_and_warn_only_says_so(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    mask, tensors = problem()
    torch.use_deterministic_algorithms(True)
    for impl in ("flex-fa4", "fa4"):
        with pytest.raises(UnsupportedError, match="flex-triton"):
            gradients(mask, tensors, torch.bfloat16, impl=impl)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(routes.NotReproducibleWarning):
        gradients(mask, tensors, torch.bfloat16, impl="fa4")
    with pytest.raises(UnsupportedError, match="flex-triton only"):
        gradients(mask, tensors, torch.bfloat16, impl="fa4", lane="exact")


def beside(
    held: list[torch.Tensor], before: int, after: tuple[int, ...], pad: int = 0
) -> list[torch.Tensor]:
    """out, dq, dk, dv of one document of the row: `before` tokens stand before it, documents of
    `after` tokens and `pad` tokens of padding behind it."""
    own = held[0].shape[1]
    sizes = [n for n in (before, own, *after, pad) if n]
    ids = torch.arange(len(sizes))
    if pad:
        ids[-1] = -1
    total = sum(sizes)
    segment = (torch.arange(total) - before) // 160 % 4
    fields = [ids.repeat_interleave(torch.tensor(sizes)), segment, segment, segment % 3, segment]
    layout = Segments(*(f.int()[None].contiguous() for f in fields))
    mask = bind(shared_prefix() & document() & padding(), layout, "cuda")
    drawn = [torch.randn(1, total, t.shape[2], 128, device="cuda") for t in held]
    for t, mine in zip(drawn, held, strict=True):
        t[:, before : before + own] = mine
    got = gradients(mask, drawn, torch.bfloat16, lane="exact")
    return [t[:, before : before + own] for t in got]


def test_exact_lane_does_not_see_the_rest_of_a_batch() -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    held = [torch.randn(1, 700, h, 128, generator=generator, device="cuda") for h in (8, 2, 2, 8)]
    layout = Segments.from_position_ids(torch.arange(700)[None] % 400)
    results = []
    for rows in (1, 2, 5):
        fields = [t.expand(rows, -1).contiguous() for t in vars(layout).values()]
        mask = bind(shared_prefix() & document(), Segments(*fields), "cuda")
        rest = [torch.randn(rows - 1, *t.shape[1:], device="cuda") for t in held]
        drawn = [torch.cat([t, other]) for t, other in zip(held, rest, strict=True)]
        results.append([t[:1] for t in gradients(mask, drawn, torch.bfloat16, lane="exact")])
    for other in results[1:]:
        assert [torch.equal(a, b) for a, b in zip(results[0], other, strict=True)] == [True] * 4


@pytest.mark.parametrize("own", [640, 700])
def test_exact_lane_does_not_see_neighbours(own: int) -> None:
    """A document keeps its bits, forward and backward, alone, before padding, and whatever stands
    behind it or, in whole blocks, before it."""
    generator = torch.Generator("cuda").manual_seed(1)
    held = [torch.randn(1, own, h, 128, generator=generator, device="cuda") for h in (8, 2, 2, 8)]
    alone = beside(held, 0, ())
    for before, after, pad in (
        (0, (1408,), 0), (0, (700, 708), 0), (0, (377, 1031), 0), (0, (128,) * 11, 0),
        (0, (), 68), (0, (30,), 38), (256, (500,), 0), (1280, (), 17),
    ):  # fmt: skip
        other = beside(held, before, after, pad)
        assert [torch.equal(a, b) for a, b in zip(alone, other, strict=True)] == [True] * 4
