"""What a mask, a chat or a sample must not silently take for something else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks import flex
from blasst.kernels.masks.bound import bind
from blasst.kernels.masks.chat import Tags, Template
from blasst.kernels.masks.expr import KEY, QUERY
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.masks.mods import causal, document, sliding_window
from blasst.kernels.masks.routes import Options, masked_attention
from blasst.kernels.masks.segments import Piece, Sample, Segments, pack


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: KEY.position < 2.5, TypeError, "float"),
        (lambda: QUERY.index - 1.5 >= KEY.index, TypeError, "float"),
        (lambda: sliding_window(2.5), TypeError, "float"),  # type: ignore[arg-type]
        (lambda: sliding_window(1 << 31), ValueError, "beyond int32"),
        (lambda: KEY.role < 1 << 40, ValueError, "beyond int32"),
        (lambda: causal() & True, TypeError, "bool"),  # type: ignore[operator]
        (lambda: causal() | 1, TypeError, "int"),  # type: ignore[operator]
        (lambda: list(Tags().split("<think>a<think>b</think>c")), InvalidInputError, "twice"),
        (lambda: list(Tags().split("<think>a<think>b</think>c</think>")), InvalidInputError, "tw"),
        (lambda: Tags(opening=""), InvalidInputError, "at least one character"),
        (lambda: Template(header='{"role": "{role}"}'), InvalidInputError, "for braces"),
        (lambda: pack([Sample(())]), InvalidInputError, "sample 0 has no tokens"),
        (lambda: pack([Sample((Piece((1,)), Piece((2,), after=-1)))]), InvalidInputError, "-1"),
        (lambda: pack([Sample((Piece((1,), after=0),))]), InvalidInputError, "earlier piece"),
    ],
)
def test_refused(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_equal_tags_pair_in_order() -> None:
    assert [text for _, text in Tags("|", "|").split("a|b|c")] == ["a", "|b|", "c"]


def test_integers_are_no_queries() -> None:
    mask = bind(causal(), Segments.from_position_ids(torch.arange(4)[None]))
    q = torch.ones(1, 4, 2, 8, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="floating dtype"):
        masked_attention(q, q, q, mask, impl="eager")
    f = q.float()
    with pytest.raises(InvalidInputError, match="num_kv_heads 0"):
        masked_attention(f, f[:, :, :0], f[:, :, :0], mask, impl="eager")


def test_eager_is_float32_under_autocast_too() -> None:
    mask = bind(causal(), Segments.from_position_ids(torch.arange(70)[None]))
    q = torch.randn(1, 70, 2, 16, generator=torch.Generator().manual_seed(0))
    plain = masked_attention(q, q, q, mask, impl="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(masked_attention(q, q, q, mask, impl="eager"), plain)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile counts its recompilations, and nothing is generated."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: real(f, backend="eager", **o))
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


@pytest.mark.usefixtures("uncompiled")
@torch._dynamo.config.patch(recompile_limit=1)
def test_a_process_may_use_any_number_of_models() -> None:
    """Other heads than the first ones are not one recompilation too many."""
    segments = Segments.from_position_ids(torch.arange(32)[None])
    bound = bind(causal() & document(), segments)
    for heads, kv_heads in ((2, 2), (4, 2), (4, 1)):
        q, k, v = (torch.randn(1, 32, n, 8) for n in (heads, kv_heads, kv_heads))
        with torch.no_grad():
            out, _ = flex.run(
                Inputs(q, k, v, bound, 0.3), backend="TRITON", geometry=flex.TRITON_GEOMETRY
            )
        expected = masked_attention(q, k, v, bound, impl="eager", softmax_scale=0.3)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


MASK = bind(causal() & document(), Segments.from_position_ids(torch.arange(48)[None] % 30))
Q, K = torch.ones(1, 48, 4, 64), torch.ones(1, 48, 2, 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": [1.0]}, "q is list, it must be a tensor"),
        ({"k": None}, "k is NoneType, it must be a tensor"),
        ({"q": torch.ones(())}, r"q has shape \[\], it must be \[batch, seqlen, heads, head_dim\]"),
        ({"q": Q[..., :0]}, r"q has shape \[1, 48, 4, 0\]"),
        ({"q": Q[:, :, :0]}, r"q has shape \[1, 48, 0, 64\]"),
        ({"q": Q.to_sparse()}, "q is torch.sparse_coo"),
        ({"q": torch.complex(Q, -Q).conj().imag}, "a view that changes values when read"),
        ({"softmax_scale": "x"}, "softmax_scale is str, it must be a number or None"),
        ({"softmax_scale": True}, "softmax_scale is bool"),
        ({"softmax_scale": 1e39}, "softmax_scale 1e\\+39 must be a finite number > 0"),
        ({"options": {"skip_lambda": 0.1}}, "options is dict, it must be Options"),
        ({"options": Options(skip_lambda="x")}, "skip_lambda: lambda must be a number, not str"),  # type: ignore[arg-type]
        ({"options": Options(skip_lambda=1.0)}, "skip_lambda: lambda 1 is outside"),
        ({"options": Options(counters=[[0, 0]])}, "counters is list"),  # type: ignore[arg-type]
        ({"options": Options(geometry=(64, 64))}, "geometry is tuple"),  # type: ignore[arg-type]
        (
            {name: t.to(torch.float8_e4m3fn) for name, t in zip("qkv", (Q, K, K), strict=True)},
            "q has dtype torch.float8_e4m3fn, it must be a floating dtype: torch.float64",
        ),
    ],
)
def test_wrong_kinds(changes: dict[str, Any], text: str) -> None:
    args = {"q": Q, "k": K, "v": K} | changes
    with torch.no_grad(), pytest.raises(InvalidInputError, match=text):
        masked_attention(mask=MASK, **args)
