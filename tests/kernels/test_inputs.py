"""Bad calls: one error that names every reason, before any work; and who may run what."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.dispatch import choose
from blasst.kernels.errors import BlasstError, InvalidInputError, UnsupportedError
from blasst.kernels.native import build
from blasst.kernels.support import own_geometry, unsupported_reasons
from blasst.kernels.testing import block_mask_from, cumulative
from blasst.kernels.types import AttentionSpec, Geometry, Impl, PagedKV, Problem, RaggedKV

OUT = torch.full((8, 4, 64), 3.0)
COUNTERS = torch.full((2, 2), 5, dtype=torch.int64)


def _good() -> dict[str, Any]:
    return {
        "q": torch.ones(8, 4, 64),
        "k": torch.ones(6, 16, 2, 64),
        "v": torch.ones(6, 16, 2, 64),
        "page_table": torch.tensor([[0, 1], [5, -1]], dtype=torch.int32),
        "seqlens_k": torch.tensor([20, 16], dtype=torch.int32),
        "cu_seqlens_q": cumulative([5, 3]),
        "spec": AttentionSpec(),
        "skip_lambda": torch.tensor([0.1, 0.0]),
        "out": OUT.clone(),
        "counters": COUNTERS.clone(),
        "impl": "auto",
    }


def _call(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    args = dict(args)
    kv = PagedKV(*(args.pop(name) for name in ("k", "v", "page_table", "seqlens_k")))
    return prefill_attention(args.pop("q"), kv, args.pop("cu_seqlens_q"), **args)


def test_the_good_call_is_good() -> None:
    out, lse = _call(_good())
    assert out.isfinite().all()
    assert lse.isfinite().all()


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"q": torch.ones(8, 256)},
        ["q has shape [8, 256], it must be [total_q, num_heads, head_dim]"],
    ),
    ({"k": torch.ones(6, 16, 2)}, ["k has shape [6, 16, 2]", "v [6, 16, 2, 64]"]),
    ({"v": torch.ones(6, 16, 1, 64)}, ["k has shape [6, 16, 2, 64], v [6, 16, 1, 64]"]),
    ({"k": torch.ones(6, 16, 2, 32)}, ["k has head_dim 32, q has 64"]),
    ({"k": torch.ones(6, 16, 2, 64).half()}, ["k has dtype torch.float16, q has torch.float32"]),
    ({"k": torch.ones(6, 16, 2, 64, device="meta")}, ["k is on meta, q on cpu"]),
    ({"cu_seqlens_q": torch.tensor([0, 5, 8])}, ["cu_seqlens_q has dtype torch.int64"]),
    ({"cu_seqlens_q": _ints()}, ["cu_seqlens_q is empty"]),
    ({"cu_seqlens_q": _ints(1, 5, 8)}, ["cu_seqlens_q starts with 1"]),
    ({"cu_seqlens_q": _ints(0, 9, 8)}, ["cu_seqlens_q falls from 9 to 8 at request 1"]),
    ({"cu_seqlens_q": _ints(0, 5, 7)}, ["cu_seqlens_q ends with 7, the tensor has 8 rows"]),
    ({"cu_seqlens_q": _ints(0, 8)}, ["page_table 2 rows for a batch of 1", "must be [1]"]),
    (
        {"seqlens_k": _ints(20, 33)},
        ["seqlens_k of request 1 is 33, its page_table row holds 0 to 32"],
    ),
    ({"seqlens_k": _ints(-1, 16)}, ["seqlens_k of request 0 is -1"]),
    ({"seqlens_k": torch.tensor([20.0, 16.0])}, ["seqlens_k has dtype torch.float32"]),
    ({"seqlens_k": _ints(20, 17)}, ["page_table[1, 1] is -1, outside the cache's pages 0..5"]),
    ({"page_table": _ints(0, 6, 5, 0).view(2, 2)}, ["page_table[0, 1] is 6"]),
    ({"page_table": _ints(0, 1)}, ["page_table has shape [2], it must be [batch, max_pages]"]),
    ({"skip_lambda": torch.tensor([0.1])}, ["skip_lambda has shape [1], it must be [2]"]),
    ({"skip_lambda": torch.tensor([1, 0])}, ["skip_lambda has dtype torch.int64"]),
    ({"skip_lambda": torch.zeros(2, device="meta")}, ["skip_lambda is on meta"]),
    ({"skip_lambda": torch.tensor([math.nan, 0.0])}, ["skip_lambda[0]: lambda nan is not finite"]),
    ({"skip_lambda": torch.tensor([0.0, 1.0])}, ["skip_lambda[1]: lambda 1 is outside"]),
    ({"skip_lambda": torch.tensor([-0.1, 0.0])}, ["skip_lambda[0]: lambda -0.1 is outside"]),
    ({"out": torch.ones(8, 4, 64).half()}, ["out is torch.float16 [8, 4, 64]"]),
    ({"out": torch.ones(7, 4, 64)}, ["out is torch.float32 [7, 4, 64]"]),
    (
        {"counters": torch.zeros(2, 2)},
        ["counters is torch.float32 [2, 2], it must be int64 [2, 2]"],
    ),
    ({"counters": torch.zeros(3, 2, dtype=torch.int64)}, ["counters is torch.int64 [3, 2]"]),
    ({"spec": AttentionSpec(softmax_scale=0.0)}, ["softmax_scale 0.0 must be a finite number > 0"]),
    ({"spec": AttentionSpec(softmax_scale=math.nan)}, ["softmax_scale nan"]),
    ({"q": torch.ones(8, 4, 64, requires_grad=True)}, ["requires a gradient"]),
]


@pytest.mark.parametrize(("changes", "messages"), BAD, ids=[m[0][:48] for _, m in BAD])
def test_bad_inputs(changes: dict[str, Any], messages: list[str]) -> None:
    args = _good() | changes
    out, counters = args["out"].clone(), args["counters"].clone()
    with pytest.raises(InvalidInputError) as caught:
        _call(args)
    for message in messages:
        assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert torch.equal(args["out"], out)
    assert torch.equal(args["counters"], counters)


def test_all_reasons_come_at_once() -> None:
    changes = {
        "cu_seqlens_q": _ints(0, 9, 7),
        "seqlens_k": _ints(99, 16),
        "skip_lambda": torch.tensor([math.nan, 2.0]),
        "counters": torch.zeros(1),
    }
    with pytest.raises(InvalidInputError) as caught:
        _call(_good() | changes)
    assert len(caught.value.reasons) == 6


def test_ragged_keys_are_checked_too() -> None:
    q, k = torch.ones(8, 4, 64), torch.ones(10, 2, 64)
    for ends, message in (
        (_ints(0, 10), "cu_seqlens_k has 2 elements for a batch of 2"),
        (_ints(0, 11, 10), "cu_seqlens_k falls"),
        (_ints(0, 4, 9), "cu_seqlens_k ends with 9"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            prefill_attention(q, RaggedKV(k, k, ends), cumulative([5, 3]))


def test_block_masks_are_checked() -> None:
    def everything(*args: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, 1, 1, dtype=torch.bool)

    good = block_mask_from(everything, seqlens=[(5, 20), (3, 16)], num_heads=4)
    assert _call(_good() | {"spec": AttentionSpec(block_mask=good)})[0].isfinite().all()
    for bad, message in (
        (replace(good, full_counts=good.full_counts.long()), "must be int32"),
        (replace(good, full_counts=good.full_counts + 9), "counts must lie in 0..1"),
        (replace(good, full_indices=good.full_indices - 1), "indices must not be negative"),
        (replace(good, full_counts=good.full_counts[0]), "have shapes"),
        (
            replace(
                good,
                partial_counts=good.partial_counts[:, :3],
                partial_indices=good.partial_indices[:, :3],
            ),
            "the call needs [2 or 1, 4 or 1, at least 1]",
        ),
    ):
        with pytest.raises(InvalidInputError) as caught:
            _call(_good() | {"spec": AttentionSpec(block_mask=bad)})
        assert message in str(caught.value)


@pytest.mark.parametrize("tile", [0, -128, 100])
def test_bad_geometry(tile: int) -> None:
    with pytest.raises(ValueError, match="must be a power of two"):
        Geometry(tile_n=tile)


PROBLEM = Problem(head_dim=64, num_heads=9, num_kv_heads=3, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("impl", ["auto", "cpu", "cpu-torch"])
def test_what_the_cpu_runs(
    dtype: str, head_dim: int, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose.cache_clear()
    monkeypatch.setattr(build, "reasons", lambda: ())
    expected = Impl.CPU if impl == "auto" else impl
    assert choose(replace(PROBLEM, dtype=dtype, head_dim=head_dim), impl).impl == expected


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    choose.cache_clear()
    monkeypatch.setattr(build, "reasons", lambda: ("no C compiler runs; install one",))
    assert choose(PROBLEM).impl is Impl.CPU_TORCH
    assert "not cpu: no C compiler runs; install one" in str(choose(PROBLEM))
    with pytest.raises(UnsupportedError, match="cpu: no C compiler runs; install one"):
        choose(PROBLEM, "cpu")
    choose.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 80}, "head_dim 80 is not one of 64, 128"),
        ({"dtype": "float64"}, "dtype float64 is not one of float32, bfloat16, float16"),
        ({"num_kv_heads": 2}, "num_heads 9 is not a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_heads 9 is not a multiple of num_kv_heads 0"),
        ({"device_type": "cuda", "capability": (9, 0)}, "this implementation needs the CPU"),
    ],
)
def test_what_the_cpu_refuses(changes: dict[str, Any], reason: str) -> None:
    problem = replace(PROBLEM, **changes)
    assert any(reason in r for r in unsupported_reasons(problem, Impl.CPU))
    with pytest.raises(UnsupportedError, match=f"cpu: .*{reason}"):
        choose(problem, "cpu")
    with pytest.raises(UnsupportedError) as caught:
        choose(problem)
    assert {str(r).split(":")[0] for r in caught.value.reasons} == {
        "blackwell",
        "hopper",
        "triton",
        "cpu",
        "cpu-torch",
    }


GPU_PROBLEM = replace(
    PROBLEM, device_type="cuda", capability=(9, 0), dtype="bfloat16", head_dim=128, page_size=16
)


@pytest.fixture
def tool_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every package that compiles kernels were installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("tool_chains")
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_gpu_kernels_run_where_they_are_built_for(capability: tuple[int, int]) -> None:
    problem = replace(GPU_PROBLEM, capability=capability)
    for impl, fits in (
        (Impl.BLACKWELL, capability[0] == 10),
        (Impl.HOPPER, capability == (9, 0)),
        (Impl.TRITON, capability >= (8, 0)),
    ):
        reasons = unsupported_reasons(problem, impl)
        assert (not reasons) == fits
        told = f"the GPU has compute capability {capability[0]}.{capability[1]}, it needs"
        assert fits or reasons[0].startswith(told)


@pytest.mark.usefixtures("tool_chains")
@pytest.mark.parametrize(
    ("changes", "impl", "reason"),
    [
        ({"page_size": 48}, "hopper", "page_size 48 is not one of 16, 32, 64, 128, 256"),
        ({"head_dim": 96}, "hopper", "head_dim 96 is not one of 64, 128"),
        ({"dtype": "float32"}, "hopper", "dtype float32 is not one of bfloat16, float16"),
        ({"geometry": Geometry(128, 128)}, "hopper", "votes on 64 x 128, not on 128 x 128"),
        ({"page_size": 24}, "blackwell", "page_size 24 is not a multiple of 16"),
        ({"head_dim": 96}, "blackwell", "head_dim 96 is not one of 64, 128"),
        ({"dtype": "float32"}, "blackwell", "dtype float32 is not one of bfloat16, float16"),
        ({"geometry": Geometry(64, 128)}, "blackwell", "votes on 128 x 128, not on 64 x 128"),
        (
            {"block_mask": True, "geometry": Geometry(256, 128)},
            "blackwell",
            "visits the lists of a block mask on 128 x 128, not on 256 x 128",
        ),
        ({"head_dim": 96}, "triton", "head_dim 96 is not one of 64, 128"),
        ({"dtype": "float32"}, "triton", "dtype float32 is not one of bfloat16, float16"),
        ({"geometry": Geometry(8, 64)}, "triton", "tile_m 8 is not one of 16, 32, 64, 128"),
    ],
)
def test_gpu_kernels_are_refused_with_the_reason(
    changes: dict[str, Any], impl: str, reason: str
) -> None:
    capability = (10, 0) if impl == "blackwell" else (9, 0)
    problem = replace(GPU_PROBLEM, capability=capability, **changes)
    with pytest.raises(UnsupportedError, match=f"{impl}: .*{reason}"):
        choose(problem, impl)


def test_a_missing_tool_chain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for impl, package, capability in (
        (Impl.BLACKWELL, "nvidia-cutlass-dsl", (10, 0)),
        (Impl.HOPPER, "nvidia-cutlass-dsl", (9, 0)),
        (Impl.TRITON, "triton", (9, 0)),
    ):
        (reason,) = unsupported_reasons(replace(GPU_PROBLEM, capability=capability), impl)
        assert reason == f"the package {package} is not installed; install blasst[cuda]"


@pytest.mark.usefixtures("tool_chains")
def test_the_geometry_is_the_implementations_own_unless_it_is_given() -> None:
    choose.cache_clear()
    assert choose(GPU_PROBLEM).impl is Impl.HOPPER
    assert own_geometry(GPU_PROBLEM, Impl.HOPPER) == Geometry(64, 128)
    assert own_geometry(PROBLEM, Impl.CPU) == Geometry()
    assert own_geometry(GPU_PROBLEM, Impl.TRITON) == Geometry(128, 64)
    newer = replace(GPU_PROBLEM, capability=(10, 0))
    assert choose(newer).impl is Impl.BLACKWELL
    assert own_geometry(newer, Impl.BLACKWELL) == Geometry(128, 128)
    other = choose(replace(GPU_PROBLEM, geometry=Geometry(128, 128)))
    assert other.impl is Impl.TRITON
    assert "votes on 64 x 128, not on 128 x 128" in str(other)
    choose.cache_clear()


def test_automatic_choice_is_logged_with_reasons(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose.cache_clear()
    monkeypatch.setattr(build, "reasons", lambda: ())
    with caplog.at_level(logging.INFO, "blasst.kernels"):
        choice = choose(PROBLEM)
        choose(PROBLEM)
    assert list(choice.reasons) == [Impl.BLACKWELL, Impl.HOPPER, Impl.TRITON]
    assert len(caplog.messages) == 1
    assert "attention runs on cpu (not blackwell: tensors are on cpu" in caplog.messages[0]


def test_unknown_and_unsupported_impls_touch_nothing() -> None:
    args = _good()
    with pytest.raises(InvalidInputError, match="impl 'gpu' is unknown; choose one of auto"):
        _call(args | {"impl": "gpu"})
    with pytest.raises(UnsupportedError, match="hopper: tensors are on cpu"):
        _call(args | {"impl": "hopper"})
    assert torch.equal(args["out"], OUT)
    assert torch.equal(args["counters"], COUNTERS)
    assert issubclass(UnsupportedError, BlasstError)


def test_the_reference_can_be_asked_for() -> None:
    args = _good()
    out, lse = _call(args)
    expected, expected_lse = _call(_good() | {"impl": "reference"})
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert args["counters"].sum() > COUNTERS.sum()
