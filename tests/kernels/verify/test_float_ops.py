"""Floating-point opcodes: exact where they are exact, and what happens to NaN and subnormals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from blasst.kernels.verify import float_ops

Compute = Callable[..., np.ndarray[Any, Any]]
F32 = np.float32


def values(seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(32) * 10.0 ** rng.integers(-3, 4, 32)).astype(F32)


def rounded(exact: Fraction, mode: str) -> float:
    """The float32 on the wanted side of an exact value."""
    near = F32(float(exact))
    if Fraction(float(near)) == exact or mode in ("", ".rn"):
        return float(near)
    above = near if Fraction(float(near)) > exact else np.nextafter(near, F32(np.inf))
    below = near if Fraction(float(near)) < exact else np.nextafter(near, F32(-np.inf))
    if mode == ".rz":
        return float(below if exact > 0 else above)
    return float(above if mode == ".rp" else below)


MODES = ["", ".rn", ".rz", ".rm", ".rp"]
FORMS = [(name, mode) for name in ("add", "sub", "mul", "fma") for mode in MODES[name == "fma" :]]


@pytest.mark.parametrize(("name", "mode"), FORMS)
def test_rounding(name: str, mode: str, compute: Compute) -> None:
    count = 3 if name == "fma" else 2
    sources = [values(i) for i in range(count)]
    got = compute(f"{name}{mode}.f32", "f32", *(("f32", s) for s in sources)).view(F32)
    for lane in range(32):
        a, b, *c = (Fraction(float(s[lane])) for s in sources)
        exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + (c or [0])[0]}[name]
        assert float(got[lane]) == rounded(exact, mode), (name, mode, lane)


@pytest.mark.parametrize("opcode", ["add.rn.f32x2", "add.rm.f32x2", "mul.rn.f32x2", "fma.rn.f32x2"])
def test_pairs_are_two_numbers(opcode: str, compute: Compute) -> None:
    single = opcode.replace("x2", "")
    sources = [np.stack([values(2 * i), values(2 * i + 1)], 1) for i in range(3)]
    sources = sources if "fma" in opcode else sources[:2]
    got = compute(opcode, "f32x2", *(("f32x2", s) for s in sources)).view(F32).reshape(32, 2)
    for half in range(2):
        want = compute(single, "f32", *(("f32", s[:, half].copy()) for s in sources))
        assert got[:, half].tolist() == want.view(F32).tolist()


def test_max_takes_the_number_and_nan_mode_the_nan(compute: Compute) -> None:
    a, b = values(0), values(1)
    a[:4] = np.nan
    b[2:6] = np.nan
    c = np.full(32, -np.inf, F32)
    for extra in ([], [c]):
        sources = [("f32", s) for s in (a, b, *extra)]
        got = compute("max.f32", "f32", *sources).view(F32)
        want = np.fmax(np.fmax(a, b), extra[0]) if extra else np.fmax(a, b)
        assert np.array_equal(got, want, equal_nan=True)
        strict = compute("max.NaN.f32", "f32", *sources).view(F32)
        assert np.isnan(strict[:6]).all()
        assert not np.isnan(strict[6:]).any()
    assert np.array_equal(
        compute("min.f32", "f32", ("f32", a), ("f32", b)).view(F32), np.fmin(a, b), equal_nan=True
    )


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ex2.approx.ftz", lambda x: 2.0**x),
        ("lg2.approx.ftz", lambda x: math.log2(abs(x))),
        ("rcp.approx.ftz", lambda x: 1 / x),
        ("rsqrt.approx.ftz", lambda x: abs(x) ** -0.5),
        ("sqrt.approx.ftz", lambda x: abs(x) ** 0.5),
        ("tanh.approx", math.tanh),
        ("sin.approx", math.sin),
        ("cos.approx", math.cos),
        ("abs", abs),
        ("neg", lambda x: -x),
    ],
)
def test_functions(name: str, function: Callable[[float], float], compute: Compute) -> None:
    a = np.clip(values(0), -60, 60).astype(F32)
    if name.startswith(("lg2", "rsqrt", "sqrt")):
        a = np.abs(a)
    got = compute(f"{name}.f32", "f32", ("f32", a)).view(F32)
    np.testing.assert_allclose(got, [function(float(x)) for x in a], rtol=3e-7, atol=1e-7)


def test_exp2_of_minus_infinity_is_zero_and_flushes(compute: Compute) -> None:
    a = np.full(32, -np.inf, F32)
    a[1], a[2], a[3] = -130.0, 200.0, np.nan
    got = compute("ex2.approx.ftz.f32", "f32", ("f32", a)).view(F32)
    assert got[0] == 0.0
    assert got[1] == 0.0
    assert got[2] == np.inf
    assert np.isnan(got[3])
    kept = compute("ex2.approx.f32", "f32", ("f32", a)).view(F32)
    assert kept[1] == F32(2.0**-130)


def test_division(compute: Compute) -> None:
    a, b = values(0), values(1)
    for name in ("div.rn", "div.full", "div.approx"):
        got = compute(f"{name}.f32", "f32", ("f32", a), ("f32", b)).view(F32)
        assert np.array_equal(got, a / b)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversion_to_16_bits_rounds_like_torch(
    kind: str, dtype: torch.dtype, compute: Compute
) -> None:
    high, low = values(0), values(1)
    high[0] = np.nan
    got = compute(f"cvt.rn.{kind}x2.f32", "b32", ("f32", high), ("f32", low))
    halves = got.view(np.uint16).reshape(32, 2)
    for at, source in ((1, high), (0, low)):
        want = torch.from_numpy(source).to(dtype).view(torch.int16).numpy().view(np.uint16)
        numbers = ~np.isnan(source)
        assert np.array_equal(halves[numbers, at], want[numbers])
    assert halves[0, 1] == 0x7FFF
    one = compute(f"cvt.rn.{kind}.f32", kind, ("f32", low))
    assert np.array_equal(one, halves[:, 0])
    back = compute(f"cvt.f32.{kind}", "f32", (kind, one)).view(F32)
    assert np.array_equal(back, torch.from_numpy(low).to(dtype).float().numpy())
    relu = compute(f"cvt.rn.relu.{kind}x2.f32", "b32", ("f32", low), ("f32", low))
    assert not (relu.view(np.uint16) >> 15).any()


@pytest.mark.parametrize(("kind", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
@pytest.mark.parametrize("name", ["add", "mul", "max", "fma.rn"])
def test_packed_16_bit_arithmetic(
    name: str, kind: str, dtype: torch.dtype, compute: Compute
) -> None:
    pairs = [
        torch.randn(64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)
    ]
    pairs = pairs if name == "fma.rn" else pairs[:2]
    sources = [(kind, p.view(torch.int16).numpy().view(np.uint32)) for p in pairs]
    got = compute(f"{name}.{kind}", kind, *sources).view(np.int16)
    wide = [p.double() for p in pairs]
    want = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "max": torch.maximum,
        "fma.rn": lambda a, b, c: a * b + c,
    }[name](*wide).float()
    assert torch.equal(torch.from_numpy(got.copy()).view(dtype), want.to(dtype))


def test_the_tables_have_no_opcode_without_a_test_here() -> None:
    """Families, not single opcodes: a new family needs a test."""
    tested = {"add", "sub", "mul", "fma", "max", "min", "ex2", "lg2", "rcp", "rsqrt", "sqrt",
              "tanh", "sin", "cos", "abs", "neg", "div", "cvt", "copysign"}  # fmt: skip
    assert {name.split(".")[0] for name in float_ops.TABLE} == tested


def test_copysign_takes_the_sign_of_the_first(compute: Compute) -> None:
    a, b = values(0), np.abs(values(1))
    got = compute("copysign.f32", "f32", ("f32", a), ("f32", b)).view(F32)
    assert np.array_equal(got, np.copysign(b, a))
