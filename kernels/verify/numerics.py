"""How products of a warpgroup round, and how a Hopper GPU rounds, as recordings show it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from blasst.kernels.verify.float_ops import SMALLEST, TABLE, flush
from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.signature import same

FRACTION_BITS = 25  # kept below the largest exponent of 16 products and the old sum
LOWEST = -400  # exponent of 0
MANTISSA = 1 << 23
Sum = Callable[[Array, Array, Array | None], Array]


def float32_sum(a: Array, b: Array, before: Array | None) -> Array:
    """before + a [m, 16] @ b [n, 16].T in float32."""
    result = a @ b.T
    return result if before is None else result + before


def aligned_sum(a: Array, b: Array, before: Array | None) -> Array:
    """As Hopper's tensor core: terms are cut at FRACTION_BITS below the largest exponent, where
    that of a product is the sum of its factors' exponents; the sum is cut to float32.
    """
    terms = a[:, None, :].astype(np.float64) * b[None, :, :]
    exponents = _exponent(a)[:, None, :] + _exponent(b)[None, :, :]
    exponents = np.where(terms == 0, LOWEST, exponents)
    if before is not None:
        terms = np.concatenate([terms, before[:, :, None]], -1)
        exponents = np.concatenate([exponents, _exponent(before)[:, :, None]], -1)
    unit = np.ldexp(1.0, exponents.max(-1, keepdims=True) - FRACTION_BITS)
    return _cut((np.trunc(terms / unit) * unit).sum(-1))


def _exponent(values: Array) -> Array:
    return np.where(values == 0, LOWEST, np.frexp(values)[1] - 1)


def _cut(wide: Array) -> Array:
    """float64 to float32, toward zero."""
    near = wide.astype(np.float32)
    return np.where(np.abs(near) > np.abs(wide), np.nextafter(near, np.float32(0)), near)


product: Sum = float32_sum
"""What wgmma uses."""


def contracted(ptx: str) -> str:
    """As ptxas does: a product that only a difference uses, both without a rounding, is fused."""
    made = {d: (a, b) for d, a, b in re.findall(r"\bmul\.f32\s+(\S+), (\S+), (\S+);", ptx)}
    uses = Counter(re.findall(r"%\w+", ptx))

    def fuse(found: re.Match[str]) -> str:
        target, first, second = found.groups()
        if first not in made or uses[first] != 2:
            return found[0]
        a, b = made[first]
        return f"neg.f32 {first}, {second};\n fma.rn.f32 {target}, {a}, {b}, {first};"

    return re.sub(r"\bsub\.f32\s+(\S+), (\S+), (\S+);", fuse, ptx)


@contextlib.contextmanager
def hopper(exp2: Array, reciprocal: Array) -> Iterator[None]:
    """Rounds as a Hopper GPU until it ends. exp2: its results for -(1 + m / MANTISSA), reciprocal:
    those for 1 + m / MANTISSA, float32, m = 0 .. MANTISSA - 1.
    """
    global product
    of_fraction = np.empty(MANTISSA, np.float64)
    m = np.arange(MANTISSA)
    of_fraction[-m % MANTISSA] = exp2 * np.where(m > 0, 4.0, 2.0)

    def ex2(a: Array, out: Array) -> None:
        # The argument is cut to MANTISSA steps of a fraction, toward zero.
        steps = np.trunc(np.clip(a, -200.0, 200.0).astype(np.float64) * MANTISSA)
        whole = np.floor(steps / MANTISSA)
        at = np.nan_to_num(steps - whole * MANTISSA).astype(np.int64)
        out[:] = np.where(np.isnan(a), np.nan, of_fraction[at] * np.exp2(whole))
        out[np.abs(out) < SMALLEST] = 0.0

    def rcp(a: Array, out: Array) -> None:
        fraction, exponent = np.frexp(np.abs(a).astype(np.float64))
        ordinary = np.isfinite(a) & (np.abs(a) >= SMALLEST)
        at = np.where(ordinary, (fraction * 2 - 1) * MANTISSA, 0).astype(np.int64)
        value = np.copysign(np.ldexp(reciprocal[at].astype(np.float64), 1 - exponent), a)
        np.divide(np.float32(1), flush(a), out)
        out[ordinary] = flush(value[ordinary].astype(np.float32))

    names = {"ex2.approx.ftz.f32": ex2, "rcp.approx.ftz.f32": rcp}
    kept = {name: TABLE[name] for name in names}
    TABLE.update({name: same(function, "f32", 1) for name, function in names.items()})
    product = aligned_sum
    try:
        yield
    finally:
        TABLE.update(kept)
        product = float32_sum
