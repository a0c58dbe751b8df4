"""Floating point: float32, pairs of it, and 16-bit pairs. Approximations are exact here.

A fused multiply-add rounds twice (float64, then float32), of which one in 2**29 shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.signature import Signature, same

SMALLEST = np.float32(2.0**-126)
ROUNDINGS = {".rn": 0, ".rz": 0, ".rm": -1, ".rp": 1}


def flush(a: Array) -> Array:
    """Subnormal numbers to zero of the same sign."""
    return np.where(np.abs(a) < SMALLEST, np.copysign(np.float32(0), a), a)


def _directed(total: Array, rest: Array | float, rounding: str, out: Array) -> None:
    """A float64 total plus a rest below its last bit, to float32 in a rounding mode."""
    nearest = total.astype(np.float32)
    back = nearest.astype(np.float64)
    above = (back > total) | ((back == total) & (rest < 0))
    below = (back < total) | ((back == total) & (rest > 0))
    if rounding == ".rz":
        wrong = np.where(back > 0, above, below) & (back != 0)
        towards = np.zeros_like(nearest)
    elif rounding == ".rm":
        wrong, towards = above, np.full_like(nearest, -np.inf)
    else:
        wrong, towards = below, np.full_like(nearest, np.inf)
    out[:] = np.where(wrong, np.nextafter(nearest, towards), nearest)


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The float64 sum, and what it leaves of the exact one (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _fma(a: Array, b: Array, c: Array, out: Array) -> None:
    exact = a.astype(np.float64)
    exact *= b
    exact += c
    out[:] = exact


def _rounded(name: str, rounding: str) -> Callable[..., None]:
    """Products of two float32 are exact in float64."""

    def compute(*args: Array) -> None:
        *sources, out = args
        wide = [s.astype(np.float64) for s in sources]
        rest: Array | float = 0.0
        if name in ("fma", "mul"):
            total = wide[0] * wide[1]
            if name == "fma":
                total, rest = _sum(total, wide[2])
        else:
            total, rest = _sum(wide[0], wide[1] if name == "add" else -wide[1])
        _directed(total, rest, rounding, out)

    return compute


def _with_flush(function: Callable[..., Any]) -> Callable[..., None]:
    def compute(*args: Array) -> None:
        *sources, out = args
        function(*(flush(s) for s in sources), out)
        out[:] = flush(out)

    return compute


def _max3(choose: Any) -> Callable[..., None]:
    def compute(a: Array, b: Array, c: Array, out: Array) -> None:
        choose(choose(a, b), c, out)

    return compute


def _exp2(a: Array, out: Array) -> None:
    np.exp2(a, out)


def _reciprocal(a: Array, out: Array) -> None:
    np.divide(np.float32(1), a, out)


def _rsqrt(a: Array, out: Array) -> None:
    np.divide(np.float32(1), np.sqrt(a), out)


def to_bf16(a: Array) -> Array:
    """uint32 with the bits of a bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(a).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded)


def from_bf16(bits: Array) -> Array:
    """float32 from the low half of uint16 or uint32 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_f16(a: Array) -> Array:
    bits = a.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(a), np.uint32(0x7FFF), bits)


def _pack(convert: Callable[[Array], Array], relu: bool) -> Callable[..., None]:
    """The first source goes into the high half."""

    def compute(high: Array, low: Array, out: Array) -> None:
        if relu:
            high, low = (np.where(np.isnan(v), v, np.maximum(v, 0)) for v in (high, low))
        out[:] = (convert(high) << np.uint32(16)) | convert(low)

    return compute


def _convert16(convert: Callable[[Array], Array]) -> Callable[..., None]:
    def compute(a: Array, out: Array) -> None:
        out[:] = convert(a)

    return compute


def _float_of_f16(a: Array, out: Array) -> None:
    out[:] = a.view(np.float16)


def _float_of_bf16(a: Array, out: Array) -> None:
    out[:] = from_bf16(a)


def _pairs(function: Callable[..., Array], bf16: bool) -> Callable[..., None]:
    """A function of float32 on both halves of packed 16-bit numbers."""

    def compute(*args: Array) -> None:
        *sources, out = args
        halves = []
        for shift in (0, 16):
            parts = [
                ((s >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(np.uint16) for s in sources
            ]
            numbers = [
                from_bf16(p) if bf16 else p.view(np.float16).astype(np.float32) for p in parts
            ]
            result = np.asarray(function(*numbers), np.float32)
            halves.append(to_bf16(result) if bf16 else _to_f16(result))
        out[:] = halves[0] | (halves[1] << np.uint32(16))

    return compute


def _fma32(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _arithmetic(table: dict[str, Signature], kind: str) -> None:
    plain: dict[str, tuple[Callable[..., Any], int]] = {
        "add": (np.add, 2),
        "sub": (np.subtract, 2),
        "mul": (np.multiply, 2),
        "fma": (_fma, 3),
    }
    for name, (nearest, count) in plain.items():
        for rounding in ("", *ROUNDINGS):
            if name == "fma" and not rounding:
                continue
            function = nearest if rounding in ("", ".rn") else _rounded(name, rounding)
            table[f"{name}{rounding}.{kind}"] = same(function, kind, count)
            table[f"{name}{rounding}.ftz.{kind}"] = same(_with_flush(function), kind, count)


def _table() -> dict[str, Signature]:
    table: dict[str, Signature] = {}
    for kind in ("f32", "f32x2"):
        _arithmetic(table, kind)
    both = {"": lambda f: f, ".ftz": _with_flush}
    for ftz, wrap in both.items():
        for name, choose, nan in (("max", np.fmax, np.maximum), ("min", np.fmin, np.minimum)):
            table[f"{name}{ftz}.f32"] = same(wrap(choose), "f32")
            table[f"{name}{ftz}.NaN.f32"] = same(wrap(nan), "f32")
        for name, function in (
            ("ex2.approx", _exp2),
            ("lg2.approx", np.log2),
            ("rcp.approx", _reciprocal),
            ("rcp.rn", _reciprocal),
            ("rsqrt.approx", _rsqrt),
            ("sqrt.approx", np.sqrt),
            ("sqrt.rn", np.sqrt),
            ("sin.approx", np.sin),
            ("cos.approx", np.cos),
        ):
            table[f"{name}{ftz}.f32"] = same(wrap(function), "f32", 1)
        for name in ("div.rn", "div.full", "div.approx"):
            table[f"{name}{ftz}.f32"] = same(wrap(np.divide), "f32")
        table[f"abs{ftz}.f32"] = same(wrap(np.abs), "f32", 1)
        table[f"neg{ftz}.f32"] = same(wrap(np.negative), "f32", 1)
    table["tanh.approx.f32"] = same(np.tanh, "f32", 1)
    table["copysign.f32"] = same(lambda a, b, out: np.copysign(b, a, out), "f32")
    for kind, bf16 in (("bf16x2", True), ("f16x2", False)):
        for name, pair_function, count in (
            ("add", np.add, 2), ("sub", np.subtract, 2), ("mul", np.multiply, 2),
            ("fma.rn", _fma32, 3), ("max", np.fmax, 2), ("min", np.fmin, 2),
            ("neg", np.negative, 1), ("abs", np.abs, 1), ("ex2.approx", np.exp2, 1),
        ):  # fmt: skip
            packed = _pairs(pair_function, bf16)
            table[f"{name}.{kind}"] = same(packed, kind, count)
            if name in ("add", "sub", "mul"):
                table[f"{name}.rn.{kind}"] = same(packed, kind, count)
    table["ex2.approx.ftz.bf16x2"] = table["ex2.approx.bf16x2"]
    for kind, convert in (("bf16", to_bf16), ("f16", _to_f16)):
        table[f"cvt.rn.{kind}x2.f32"] = Signature(_pack(convert, False), "b32", ("f32", "f32"))
        table[f"cvt.rn.relu.{kind}x2.f32"] = Signature(_pack(convert, True), "b32", ("f32", "f32"))
        table[f"cvt.rn.{kind}.f32"] = Signature(_convert16(convert), kind, ("f32",))
    table["cvt.f32.f16"] = Signature(_float_of_f16, "f32", ("f16",))
    table["cvt.f32.bf16"] = Signature(_float_of_bf16, "f32", ("bf16",))
    # Three-operand forms share the opcode: the decoder picks them by the number of operands.
    for name, choose, nan in (("max", np.fmax, np.maximum), ("min", np.fmin, np.minimum)):
        table[f"{name}.f32/3"] = same(_max3(choose), "f32", 3)
        table[f"{name}.ftz.f32/3"] = same(_with_flush(_max3(choose)), "f32", 3)
        table[f"{name}.NaN.f32/3"] = same(_max3(nan), "f32", 3)
    return table


TABLE = _table()
