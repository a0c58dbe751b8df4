"""Routes that run on a CPU give the same numbers; wrong inputs are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.api import prefill_attention
from blasst.kernels.call import check_call
from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks import flex, routes, serving
from blasst.kernels.masks.bound import AttentionMask, bind
from blasst.kernels.masks.chat import shared_prefix_sample
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.masks.mods import (
    causal,
    document,
    padding,
    shared_prefix,
    sliding_window,
    strip_history_thinking,
)
from blasst.kernels.masks.parallel import Order, Shard, shard_mask
from blasst.kernels.masks.routes import Options, masked_attention
from blasst.kernels.masks.segments import Segments, pack
from blasst.kernels.reference import reference_attention
from blasst.kernels.types import Geometry, RaggedKV

MASKS = {
    "causal": causal() & document(),
    "shared prefix": shared_prefix() & document() & padding(),
    "strip thinking": strip_history_thinking() & document() & padding(),
    "window": causal() & sliding_window(37) & document(),
    "bidirectional": document() & padding(),
}


def segments(seed: int, batch: int, seqlen: int) -> Segments:
    generator = torch.Generator().manual_seed(seed)

    def rising(high: int) -> torch.Tensor:
        drawn = torch.randint(0, high, (batch, seqlen), generator=generator)
        return drawn.sort(-1).values.int()

    documents = rising(3)
    documents[:, int(seqlen * 0.9) :] = -1
    role = (torch.arange(seqlen) // 23 % 3).int().expand(batch, -1).contiguous()
    return Segments(documents, rising(4), rising(5), role, rising(seqlen))


def tensors(
    seed: int, mask: AttentionMask, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(mask.batch, n, h, dim, generator=generator, dtype=torch.float64).to(dtype)
        for n, h in (
            (mask.seqlen_q, heads[0]),
            (mask.seqlen_k, heads[1]),
            (mask.seqlen_k, heads[1]),
        )
    ]


def levelled(seed: int, mask: AttentionMask) -> list[torch.Tensor]:
    """Stretches of 48 keys at a level of their own: some blocks lie far below the running max."""
    q, k, v = tensors(seed, mask, (2, 1), 64, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (mask.seqlen_k // 48 + 1,), generator=generator).float()
    k[..., 0] = levels.repeat_interleave(48)[: mask.seqlen_k, None]
    q[..., 0] = 8.0
    return [q, k, v]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """torch's own attention with the dense mask; rows that see nothing are 0."""
    seen = mask.dense()[:, None]
    some = seen.any(-1, keepdim=True)
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen | ~some
    )
    return torch.where(some, out, 0.0).transpose(1, 2)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    x = Inputs(q, k, v, mask, q.shape[-1] ** -0.5, want_lse=True)
    out, lse = routes.attend(x, lane="throughput", impl=impl, options=Options())
    assert lse is not None
    return out, lse


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_eager_forward_and_backward(name: str, heads: tuple[int, int]) -> None:
    mask = bind(MASKS[name], segments(0, 2, 75))
    ours = [t.requires_grad_() for t in tensors(1, mask, heads, 16, torch.float64)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out, expected = masked_attention(*ours, mask), plain(*theirs, mask)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert a.grad.isfinite().all()
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_lse_has_a_gradient(name: str) -> None:
    mask = bind(MASKS[name], segments(3, 1, 20))
    inputs = [t.requires_grad_() for t in tensors(1, mask, (2, 1), 8, torch.float64)]
    some = mask.dense().any(-1)[:, None].expand(-1, 2, -1)

    def lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return run(q, k, v, mask, "eager")[1][some]

    assert torch.autograd.gradcheck(lse, inputs, fast_mode=True)
    assert (run(*inputs, mask, "eager")[1][~some] == -torch.inf).all()


@pytest.mark.parametrize("name", sorted(MASKS))
def test_our_kernel_under_a_mask(name: str) -> None:
    mask = bind(MASKS[name], segments(4, 2, 300))
    q, k, v = tensors(5, mask, (4, 2), 64, torch.float32)
    out, lse = run(q, k, v, mask, "blasst")
    expected, expected_lse = run(q, k, v, mask, "eager")
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=0)


def test_flex_attention_compiled() -> None:
    """Inductor's C++ kernel on our block lists; lists of the wrong blocks would drop keys."""
    mask = bind(MASKS["shared prefix"] & sliding_window(200), segments(6, 1, 384))
    q, k, v = tensors(7, mask, (4, 2), 32, torch.float32)
    torch._dynamo.reset()
    # With symbolic sizes the C++ that Inductor 2.13 writes for a CPU does not compile.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), torch.no_grad():
        out, _ = flex.run(
            Inputs(q, k, v, mask, 0.2), backend="TRITON", geometry=flex.TRITON_GEOMETRY
        )
    expected = masked_attention(q, k, v, mask, impl="eager", softmax_scale=0.2)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


def test_a_process_may_use_any_number_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives up at the ninth compilation of one function."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flex._compiled.cache_clear()
    pairs = [left & right for left in MASKS.values() for right in MASKS.values()]
    masks = [*MASKS.values(), *pairs][: torch._dynamo.config.recompile_limit + 2]
    for mask in masks:
        bound = bind(mask, segments(6, 1, 64))
        q, k, v = tensors(7, bound, (2, 2), 16, torch.float32)
        with torch.no_grad():
            out, _ = flex.run(
                Inputs(q, k, v, bound, 0.2), backend="TRITON", geometry=flex.TRITON_GEOMETRY
            )
        expected = masked_attention(q, k, v, bound, impl="eager", softmax_scale=0.2)
        seen = bound.dense()[0].any(-1)  # uncompiled, FlexAttention averages the others' values
        torch.testing.assert_close(out[:, seen], expected[:, seen], atol=2e-5, rtol=0)
    flex._compiled.cache_clear()  # of functions that another test must not meet


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(sorted(MASKS)),
    st.integers(0, 1000),
    st.sampled_from([(64, 64), (128, 64), (64, 128)]),
    st.floats(0.02, 0.95),
)
def test_reference_and_cpu_skip_the_same_blocks_under_a_mask(
    name: str, seed: int, tiles: tuple[int, int], skip_lambda: float
) -> None:
    """The vote composes with the mask: only visited blocks vote, and both count the same skips."""
    mask = bind(MASKS[name], segments(seed, 1, 300))
    q, k, v = levelled(seed, mask)
    spec = serving.spec_for(mask, 0.125, Geometry(*tiles))
    ends = torch.tensor([0, 300], dtype=torch.int32)
    kv = RaggedKV(k[0], v[0], ends)
    lam = torch.tensor([skip_lambda], dtype=torch.float64)
    expected = reference_attention(q[0], kv, ends, spec=spec, skip_lambda=lam)
    assert int(expected.visited[0][0].sum()) == mask.lists(spec.geometry).visited_blocks
    if expected.smallest_margin < 1e-3:
        return
    counters = torch.zeros(1, 2, dtype=torch.int64)
    out, _ = prefill_attention(
        q[0], kv, ends, spec=spec, skip_lambda=lam, impl="cpu", counters=counters
    )
    assert torch.equal(counters, expected.counts(1))
    torch.testing.assert_close(out.double(), expected.out, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["shared prefix", "strip thinking"])
def test_triton_reference_and_cpu_agree(name: str) -> None:
    """One request, one skip map: the Triton kernel is interpreted where there is no GPU."""
    from blasst.kernels.triton import launch

    mask = bind(MASKS[name], segments(2, 1, 300))
    q, k, v = (t[0].half() for t in levelled(6, mask))
    spec = serving.spec_for(mask, 0.125, Geometry(64, 64))
    ends = torch.tensor([0, 300], dtype=torch.int32)
    kv = RaggedKV(k, v, ends)
    lam = torch.tensor([0.3], dtype=torch.float64)
    expected = reference_attention(q, kv, ends, spec=spec, skip_lambda=lam)
    assert expected.smallest_margin > 1e-3
    assert expected.skip_rate > 0
    out, counters = torch.empty_like(q), torch.zeros(2, 1, 2, dtype=torch.int64)
    launch.run(check_call(q, kv, ends, spec, lam, None, None), out, counters[0])
    prefill_attention(q, kv, ends, spec=spec, skip_lambda=lam, impl="cpu", counters=counters[1])
    assert torch.equal(counters[0], expected.counts(1))
    assert torch.equal(counters[1], expected.counts(1))
    torch.testing.assert_close(out.double(), expected.out, atol=4e-3, rtol=0)


def test_the_form_of_our_kernels_is_made_once_for_a_geometry() -> None:
    """What kernels make of it is kept with the object: lists and bits, for all layers and steps."""
    mask = bind(MASKS["shared prefix"], segments(1, 1, 300))
    small = Geometry(64, 64)
    assert mask.blasst(small) is mask.blasst(small)
    assert mask.blasst(small) is not mask.blasst(Geometry(64, 128))
    again = bind(MASKS["shared prefix"], segments(1, 1, 300))
    assert mask.blasst(small) is again.blasst(small)


def test_votes_under_a_mask_do_skip() -> None:
    mask = bind(MASKS["shared prefix"], segments(1, 1, 1024))
    q, k, v = levelled(2, mask)
    counters = torch.zeros(1, 2, dtype=torch.int64)
    options = Options(skip_lambda=0.9, counters=counters, geometry=Geometry(64, 64))
    masked_attention(q, k, v, mask, options=options)
    visited, skipped = counters[0].tolist()
    assert visited == 2 * mask.lists(Geometry(64, 64)).visited_blocks
    assert 0 < skipped < visited


def test_determinism_is_read_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = bind(MASKS["causal"], segments(0, 1, 20))
    q, k, v = tensors(0, mask, (2, 2), 16, torch.float32)
    seen = []
    real = routes.choose
    monkeypatch.setattr(
        routes, "choose", lambda p, i, c: seen.append(p.determinism) or real(p, i, c)
    )
    try:
        for strict, warn in ((False, False), (True, False), (True, True)):
            torch.use_deterministic_algorithms(strict, warn_only=warn)
            masked_attention(q, k, v, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == ["off", "strict", "warn"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q[:, :-1], k, v), "the mask is for"),
        (lambda q, k, v: (q, k, v.double()), "dtype"),
        (lambda q, k, v: (q, k[..., :8], v), "must be equal"),
        (lambda q, k, v: (q[:, :, :3], k, v), "multiple of num_kv_heads"),
    ],
)
def test_wrong_inputs(change: Any, text: str) -> None:
    mask = bind(MASKS["causal"], segments(0, 1, 20))
    with pytest.raises(InvalidInputError, match=text):
        masked_attention(*change(*tensors(0, mask, (4, 2), 16, torch.float32)), mask)
    with pytest.raises(InvalidInputError, match=r"mask is And.*bind"):
        masked_attention(*tensors(0, mask, (4, 2), 16, torch.float32), MASKS["causal"])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="lane"):
        masked_attention(*tensors(0, mask, (4, 2), 16, torch.float32), mask, lane="fast")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="flex-triton"):
        masked_attention(*tensors(0, mask, (4, 2), 16, torch.float32), mask, impl="flash")
    with pytest.raises(InvalidInputError, match="softmax_scale nan"):
        masked_attention(
            *tensors(0, mask, (4, 2), 16, torch.float32), mask, softmax_scale=float("nan")
        )
    for options, said in (
        (Options(skip_lambda=1.5), "skip_lambda: lambda 1.5 is outside"),
        (Options(skip_lambda=0.5, counters=torch.zeros(3, 2, dtype=torch.int64)), "counters"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            masked_attention(*tensors(0, mask, (4, 2), 64, torch.float32), mask, options=options)


def test_masked_attention_inside_a_compiled_model() -> None:
    """A graph break, not an error: the mask stays a Python object. No kernel of ours is traced."""
    mask = bind(MASKS["shared prefix"], segments(0, 1, 40))
    q, k, v = tensors(0, mask, (2, 2), 64, torch.float32)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return masked_attention(q * 2, k, v, mask) + 1

    compiled = torch.compile(layer, backend="eager")
    for inputs in ((q, k, v), (q.requires_grad_(), k, v)):
        out, expected = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_our_kernel_on_a_shard_of_the_queries(order: Order) -> None:
    """Its query positions count in keys; a shard's mask counts its own rows."""
    whole = bind(MASKS["shared prefix"], segments(4, 2, 384))
    mine, other = Shard(0, 2, order), Shard(1, 2, order)
    for queries, keys in ((mine, None), (other, None), (mine, mine), (mine, other), (other, mine)):
        mask = shard_mask(whole, queries, keys)
        q, k, v = tensors(5, mask, (4, 2), 64, torch.float32)
        out, lse = run(q, k, v, mask, "blasst")
        expected, expected_lse = run(q, k, v, mask, "eager")
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=0)


def test_shared_prefix_costs_fewer_blocks_than_causal() -> None:
    sample = shared_prefix_sample(range(1024), [range(512)] * 6, align=128)
    batch = pack([sample], pad_to_multiple_of=128)
    lists = {
        mask: bind(mask, batch.segments).lists(Geometry())
        for mask in (shared_prefix() & document(), causal() & document())
    }
    shared, dense = (each.visited_blocks for each in lists.values())
    assert shared < 0.7 * dense
