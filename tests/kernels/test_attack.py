"""Random bad calls: each is refused by an error of ours before any work, or computed right."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blasst.kernels import call as calls
from blasst.kernels.api import prefill_attention
from blasst.kernels.errors import BlasstError
from blasst.kernels.hopper import launch as hopper
from blasst.kernels.testing import block_mask_from, cumulative
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, RaggedKV

Args = dict[str, Any]
SEQLENS = [(5, 20), (0, 3), (3, 16)]
KEYS = ("k", "v", "page_table", "seqlens_k", "cu_seqlens_k")
TENSORS = ("q", "cu_seqlens_q", "skip_lambda", "out", "counters", *KEYS)


def good(rng: random.Random, dtype: torch.dtype) -> Args:
    """A call that is right, of small tensors."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    args: Args = {
        "q": draw(8, 4, 64),
        "cu_seqlens_q": cumulative([n for n, _ in SEQLENS]),
        "skip_lambda": rng.choice([None, torch.tensor([0.1, 0.0, 0.5])]),
        "out": rng.choice([None, torch.full((8, 4, 64), 3.0, dtype=dtype)]),
        "counters": rng.choice([None, torch.full((2, 2), 5, dtype=torch.int64)]),
        "spec": AttentionSpec(causal=rng.random() < 0.7),
    }
    if rng.random() < 0.5:
        pages = [[0, 1], [2, -1], [5, 99]]
        return args | {
            "k": draw(6, 16, 2, 64), "v": draw(6, 16, 2, 64),
            "page_table": torch.tensor(pages, dtype=torch.int32),
            "seqlens_k": torch.tensor([n for _, n in SEQLENS], dtype=torch.int32),
        }  # fmt: skip
    return args | {
        "k": draw(39, 2, 64), "v": draw(39, 2, 64),
        "cu_seqlens_k": cumulative([n for _, n in SEQLENS]),
    }  # fmt: skip


def run(args: Args, impl: Any) -> tuple[torch.Tensor, torch.Tensor]:
    args = dict(args)
    held = {name: args.pop(name) for name in KEYS if name in args}
    kv = PagedKV(**held) if "page_table" in held else RaggedKV(**held)
    return prefill_attention(args.pop("q"), kv, args.pop("cu_seqlens_q"), **args, impl=impl)


def spread(t: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of memory."""
    return torch.stack([t, t], -1)[..., 0]


def rows_apart(t: torch.Tensor) -> torch.Tensor:
    """The same values, rows in a wider buffer."""
    return torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() else t


def reversed_axes(t: torch.Tensor) -> torch.Tensor:
    """The same values, the first axis last in memory."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t


def negated(t: torch.Tensor) -> torch.Tensor:
    """A view that negates when read, where there is one."""
    if t.dtype != torch.float32:
        return t
    return torch.complex(torch.zeros_like(t), -t).conj().imag


VIEWS: tuple[Callable[[torch.Tensor], Any], ...] = (spread, rows_apart, reversed_axes, negated)
WRONG: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t.tolist(),
    lambda t: 0.1,
    lambda t: "tensor",
    lambda t: t.to("meta"),
    lambda t: t[None],
    lambda t: t[:-1],
    lambda t: t[:0],
    lambda t: t[..., :0],
    lambda t: t.reshape(-1),
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.long(),
    lambda t: t.bool(),
    lambda t: t.to_sparse() if t.dim() else t,
    lambda t: t.detach().float().requires_grad_(),
    lambda t: t.new_empty(()),
)
NUMBERS = (-(1 << 31), -7, -1, 0, 1, 3, 6, 8, 17, 999, (1 << 31) - 1)
LAMBDAS = (float("nan"), float("inf"), -0.1, 1.0, 1 - 1e-12, 5e-324, 1e-40, 0.999)
SCALES = (
    0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-46, "0.1", True, 1j, Fraction(1, 8),
    torch.tensor(0.1), 0.3,
)  # fmt: skip


def ordinary(t: object) -> bool:
    """Whether it can be bent further."""
    return (
        isinstance(t, torch.Tensor)
        and t.layout is torch.strided
        and t.device.type == "cpu"
        and t.numel() > 0
        and not t.requires_grad
    )


def bend_tensor(args: Args, rng: random.Random) -> None:
    name = rng.choice([n for n in TENSORS if ordinary(args.get(n))] or ["spec"])
    if name != "spec":
        args[name] = rng.choice(VIEWS if rng.random() < 0.6 else WRONG)(args[name])


def bend_number(args: Args, rng: random.Random) -> None:
    names = ("cu_seqlens_q", "page_table", "seqlens_k", "cu_seqlens_k", "skip_lambda")
    for name in [n for n in names if ordinary(args.get(n)) and rng.random() < 0.5]:
        t = args[name].detach().clone().contiguous()
        t = t.double() if name == "skip_lambda" else t.to(torch.int32)
        at = rng.randrange(t.numel())
        t.view(-1)[at] = rng.choice(LAMBDAS if name == "skip_lambda" else NUMBERS)
        args[name] = t


def bend_out(args: Args, rng: random.Random) -> None:
    q, k = args["q"], args["k"]
    if not ordinary(q) or not ordinary(k) or q.shape != (8, 4, 64):
        return
    wide = torch.zeros(8, 8, 64, dtype=q.dtype)
    wide[:, :4] = q
    choices: list[Any] = [
        q,
        torch.zeros(1, 4, 64, dtype=q.dtype).expand(8, 4, 64),
        torch.zeros(8, 1, 64, dtype=q.dtype).expand(8, 4, 64),
        torch.zeros(4096, dtype=q.dtype).as_strided((8, 4, 64), (128, 32, 1)),
        wide[:, 4:],
    ]
    if k.numel() >= 2048 and k.is_contiguous():
        choices.append(k.view(-1)[:2048].view(8, 4, 64))
    args["q"], args["out"] = wide[:, :4], rng.choice(choices)


def bend_spec(args: Args, rng: random.Random) -> None:
    spec = args["spec"]
    if not isinstance(spec, AttentionSpec):
        return
    lists = block_mask_from(
        lambda *at: torch.ones(1, 1, 1, dtype=torch.bool), seqlens=SEQLENS, num_heads=4
    )
    bent: dict[str, Any] = rng.choice([
        {"softmax_scale": rng.choice(SCALES)},
        {"causal": rng.choice(["yes", 1, None])},
        {"geometry": rng.choice([(64, 128), Geometry(16, 16), Geometry(64, 128), "128 x 128"])},
        {"block_mask": rng.choice([
            True, lists, replace(lists, mask_mod="all"), replace(lists, full_counts=[1]),
            replace(lists, full_indices=lists.full_indices.to("meta")),
            replace(lists, partial_counts=lists.partial_counts.to("meta")),
            replace(lists, full_counts=lists.full_counts.to_sparse()),
            replace(lists, full_counts=lists.full_counts.float()),
        ])},
    ])  # fmt: skip
    args["spec"] = rng.choice([replace(spec, **bent), replace(spec, **bent), None, "causal"])


def attack(rng: random.Random, dtype: torch.dtype) -> Args:
    args = good(rng, dtype)
    bends = (bend_tensor, bend_tensor, bend_number, bend_out, bend_spec)
    for _ in range(rng.choice([1, 1, 2, 3])):
        rng.choice(bends)(args, rng)
    return args


def written(args: Args) -> list[torch.Tensor]:
    """What a call writes, as far as it is tensors with content."""
    found = [args.get("out"), args.get("counters")]
    tensors = [t for t in found if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.layout is torch.strided and t.device.type == "cpu"]


def plain(args: Args) -> Args:
    """The same values in memory of their own."""
    copied = {
        name: t.resolve_neg().contiguous().clone()
        for name, t in args.items()
        if isinstance(t, torch.Tensor)
    }
    return args | copied | {"out": None}


@pytest.mark.parametrize("impl", ["auto", "cpu-torch"])
def test_random_calls_on_a_cpu(impl: str) -> None:
    rng = random.Random(7)
    refused = 0
    for trial in range(700):
        args = attack(rng, torch.float32)
        before = [t.clone() for t in written(args)]
        try:
            same = plain(args) if all(_readable(t) for t in args.values()) else None
            out, lse = run(args, impl)
        except BlasstError:
            refused += 1
            assert all(torch.equal(a, b) for a, b in zip(before, written(args), strict=True))
            continue
        assert same is not None, f"{trial}: accepted"
        want, want_lse = run(same, "reference")
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4, msg=f"{trial}")
        torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=1e-4, msg=f"{trial}")
        if args["counters"] is not None:
            assert torch.equal(args["counters"], same["counters"]), trial
    assert 350 < refused < 650


def _readable(t: object) -> bool:
    return not isinstance(t, torch.Tensor) or (t.layout is torch.strided and not t.is_meta)


def check_launch(named: dict[str, Any], page_size: int) -> None:
    """What the device code takes for granted of tensors, whose values were looked at before."""
    batch = named["cu_seqlens_q"].numel() - 1
    heads = named["q"].shape[1]
    for name in ("cu_seqlens_q", "lengths"):
        assert named[name].dtype == torch.int32
        assert named[name].stride() == (1,) or named[name].numel() < 2
    assert named["lengths"].numel() == batch + (page_size == 0)
    table, skip_lambda, counters = named["table"], named["skip_lambda"], named["counters"]
    assert table is None or table.dim() == 1 or table.stride(1) == 1 or table.shape[1] < 2
    assert skip_lambda is None or (skip_lambda.shape == (batch,) and skip_lambda.is_contiguous())
    assert skip_lambda is None or bool((skip_lambda.float() < 1).all())
    if counters is not None:
        assert counters.shape == (named["k"].shape[-2], 2)
        assert counters.is_contiguous()
        assert counters.dtype == torch.int64
    out = named["out"]
    assert out.shape == named["q"].shape
    reach = sum(s * (n - 1) for s, n in zip(out.stride(), out.shape, strict=True)) + 1
    places = torch.arange(reach).as_strided(out.shape, out.stride())
    assert places.unique().numel() == out.numel()
    assert 2.0**-126 < named["scale"] < 2.0**126
    assert heads % named["k"].shape[-2] == 0
    assert all(named[n].layout is torch.strided and not named[n].is_neg() for n in "qkv")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """CPU tensors pass for those of an H200; what would be launched is looked at and kept."""
    launched: list[dict[str, Any]] = []
    real = calls._problem
    as_gpu: dict[str, Any] = {"device_type": "cuda", "capability": (9, 0)}
    monkeypatch.setattr(calls, "_problem", lambda *a: replace(real(*a), **as_gpu))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(hopper, "_processors", lambda device: 132)

    def launch(named: dict[str, Any], page_size: int) -> None:
        check_launch(named, page_size)
        launched.append(named)

    def compiled(config: Any) -> Callable[..., None]:
        names = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "lengths", "table", "skip_lambda",
                 "counters", "trace", "lists", "scale")  # fmt: skip
        return lambda *a: launch(dict(zip(names, a, strict=False)), config.page_size)

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            names = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "lengths", "table",
                     "skip_lambda", "counters", "lists", "k_box", "v_box", "scale")  # fmt: skip
            assert max(grid[1:]) <= 65535
            return lambda *a, **how: launch(dict(zip(names, a, strict=False)), how["PAGE"])

    monkeypatch.setattr(hopper, "_compiled", compiled)
    device = SimpleNamespace(prefill_kernel=Kernel())
    monkeypatch.setitem(sys.modules, "blasst.kernels.triton.device", device)
    return launched


@pytest.mark.parametrize("impl", ["hopper", "triton", "auto"])
def test_random_calls_of_a_gpu(impl: str, fake_gpu: list[dict[str, Any]]) -> None:
    rng = random.Random(11)
    refused = 0
    for _ in range(700):
        args = attack(rng, torch.bfloat16)
        try:
            run(args, impl)
        except BlasstError:
            refused += 1
    assert 300 < refused < 690
    assert len(fake_gpu) > 10


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_more_requests_than_a_grid_takes(impl: str, fake_gpu: list[dict[str, Any]]) -> None:
    batch = 32768
    q = torch.zeros(batch, 2, 64, dtype=torch.bfloat16)
    ends = torch.arange(batch + 1, dtype=torch.int32)
    with pytest.raises(BlasstError, match="65536 requests times kv heads are more than the 65535"):
        prefill_attention(q, RaggedKV(q, q, ends), ends, impl=impl)
    half = slice(0, batch // 2)
    prefill_attention(q[half], RaggedKV(q[half], q[half], ends[: batch // 2 + 1]),
                      ends[: batch // 2 + 1], impl=impl)  # fmt: skip
    assert len(fake_gpu) == 1


@pytest.mark.parametrize("impl", [None, 3, ["cpu"]])
def test_an_impl_is_a_name(impl: Any) -> None:
    with pytest.raises(BlasstError, match="impl is"):
        run(good(random.Random(0), torch.float32), impl)


def test_columns_of_one_buffer_are_no_overlap() -> None:
    wide = torch.randn(8, 8, 64, generator=torch.Generator().manual_seed(0))
    args = good(random.Random(3), torch.float32) | {"q": wide[:, :4]}
    want, _ = run(plain(args), "reference")
    out, _ = run(args | {"out": wide[:, 4:]}, "cpu-torch")
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    with pytest.raises(BlasstError, match="out shares memory with q"):
        run(args | {"out": wide[:, 3:7]}, "cpu-torch")
