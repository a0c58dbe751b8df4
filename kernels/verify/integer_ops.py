"""Integer arithmetic, logic, shifts and bit fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.signature import Signature, same

WIDTH = {"16": 16, "32": 32, "64": 64}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def _mad_lo(a: Array, b: Array, c: Array, out: Array) -> None:
    np.add(a * b, c, out)


def _mul_wide(a: Array, b: Array, out: Array) -> None:
    np.multiply(a.astype(out.dtype), b.astype(out.dtype), out)


def _mad_wide(a: Array, b: Array, c: Array, out: Array) -> None:
    np.add(a.astype(out.dtype) * b.astype(out.dtype), c, out)


def _mul_hi(a: Array, b: Array, out: Array) -> None:
    if out.dtype.itemsize < 8:
        wide = np.dtype(f"{out.dtype.kind}{2 * out.dtype.itemsize}")
        out[:] = (a.astype(wide) * b.astype(wide)) >> wide.type(8 * out.dtype.itemsize)
    else:
        mask, sign = (1 << 64) - 1, 1 << 63
        products = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
        if out.dtype.kind == "i":
            products = [((p & mask) ^ sign) - sign for p in products]
        out[:] = np.array(products, out.dtype)


def _mad_hi(a: Array, b: Array, c: Array, out: Array) -> None:
    product = np.empty_like(out)
    _mul_hi(a, b, product)
    np.add(product, c, out)


def _divide(a: Array, b: Array, out: Array) -> None:
    """Towards zero; by zero: all bits set, what the hardware gives."""
    safe = np.where(b == 0, 1, b).astype(out.dtype)
    quotient = np.floor_divide(a, safe)
    if out.dtype.kind == "i":
        inexact = (quotient * safe != a) & ((a < 0) != (safe < 0))
        quotient = quotient + inexact.astype(out.dtype)
    out[:] = np.where(b == 0, np.array(-1).astype(out.dtype), quotient)


def _remainder(a: Array, b: Array, out: Array) -> None:
    quotient = np.empty_like(out)
    _divide(a, b, quotient)
    out[:] = np.where(b == 0, a, a - quotient * b)


def _shift_left(a: Array, b: Array, out: Array) -> None:
    bits = 8 * out.dtype.itemsize
    shifted = a << np.minimum(b, bits - 1).astype(out.dtype)
    out[:] = np.where(b >= bits, 0, shifted)


def _shift_right(a: Array, b: Array, out: Array) -> None:
    bits = 8 * out.dtype.itemsize
    shifted = a >> np.minimum(b, bits - 1).astype(out.dtype)
    out[:] = shifted if out.dtype.kind == "i" else np.where(b >= bits, 0, shifted)


def _min_relu(a: Array, b: Array, out: Array) -> None:
    np.maximum(np.minimum(a, b), 0, out)


def _max_relu(a: Array, b: Array, out: Array) -> None:
    np.maximum(np.maximum(a, b), 0, out)


def _population(a: Array, out: Array) -> None:
    out[:] = np.bitwise_count(a)


def _leading_zeros(a: Array, out: Array) -> None:
    bits = 8 * a.dtype.itemsize
    out[:] = [bits - int(x).bit_length() for x in a]


def _reverse(a: Array, out: Array) -> None:
    bits = 8 * a.dtype.itemsize
    out[:] = [int(f"{int(x):0{bits}b}"[::-1], 2) for x in a]


def _find_leading_one(a: Array, out: Array) -> None:
    value = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    out[:] = [(int(x).bit_length() - 1) & 0xFFFFFFFF for x in value]


def _extract(a: Array, b: Array, c: Array, out: Array) -> None:
    """Bit field of `c` bits from bit b (mod 256 both), sign-extended for signed types."""
    bits = 8 * out.dtype.itemsize
    for lane in range(len(out)):
        value = int(a[lane]) & ((1 << bits) - 1)
        start, count = int(b[lane]) & 255, int(c[lane]) & 255
        field = (value >> start) & ((1 << count) - 1) if count else 0
        sign = (value >> min(start + count - 1, bits - 1)) & 1
        if out.dtype.kind == "i" and count and sign:
            field |= -1 << min(count, max(bits - start, 0))
        out[lane] = np.array(field & ((1 << bits) - 1), np.uint64).astype(out.dtype)


def _insert(a: Array, b: Array, c: Array, d: Array, out: Array) -> None:
    """Low bits of a over bits [c, c + d) of b."""
    bits = 8 * out.dtype.itemsize
    for lane in range(len(out)):
        start, count = int(c[lane]) & 255, int(d[lane]) & 255
        mask = (((1 << count) - 1) << start) & ((1 << bits) - 1)
        value = (int(b[lane]) & ~mask) | ((int(a[lane]) << start) & mask)
        out[lane] = value


def _logic3(a: Array, b: Array, c: Array, table: Array, out: Array) -> None:
    result = np.zeros_like(a)
    for case in range(8):
        if int(table[0]) >> case & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    out[:] = result


def _permute(a: Array, b: Array, selector: Array, out: Array) -> None:
    """Each nibble of the selector picks one of 8 bytes, its top bit the byte's sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(out)
    for byte in range(4):
        nibble = (selector >> np.uint32(4 * byte)) & np.uint32(15)
        shift = ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
        value = ((both >> shift) & np.uint64(255)).astype(np.uint32)
        sign = np.where(value & 128, 255, 0).astype(np.uint32)
        result |= np.where(nibble & 8, sign, value).astype(np.uint32) << np.uint32(8 * byte)
    out[:] = result


def _funnel(left: bool, clamp: bool) -> Any:
    def shift(a: Array, b: Array, c: Array, out: Array) -> None:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        by = (np.minimum(c, 32) if clamp else c & np.uint32(31)).astype(np.uint64)
        out[:] = (both << by) >> np.uint64(32) if left else both >> by

    return shift


def _table() -> dict[str, Signature]:
    table: dict[str, Signature] = {}
    for kind in INTEGERS:
        table[f"add.{kind}"] = same(np.add, kind)
        table[f"sub.{kind}"] = same(np.subtract, kind)
        table[f"mul.lo.{kind}"] = same(np.multiply, kind)
        table[f"mul.hi.{kind}"] = same(_mul_hi, kind)
        table[f"mad.lo.{kind}"] = same(_mad_lo, kind, 3)
        table[f"mad.hi.{kind}"] = same(_mad_hi, kind, 3)
        table[f"div.{kind}"] = same(_divide, kind)
        table[f"rem.{kind}"] = same(_remainder, kind)
        table[f"min.{kind}"] = same(np.minimum, kind)
        table[f"max.{kind}"] = same(np.maximum, kind)
        if kind in WIDE:
            table[f"mul.wide.{kind}"] = Signature(_mul_wide, WIDE[kind], (kind, kind))
            table[f"mad.wide.{kind}"] = Signature(_mad_wide, WIDE[kind], (kind, kind, WIDE[kind]))
        if kind[0] == "s":
            table[f"neg.{kind}"] = same(np.negative, kind, 1)
            table[f"abs.{kind}"] = same(np.abs, kind, 1)
            table[f"min.relu.{kind}"] = same(_min_relu, kind)
            table[f"max.relu.{kind}"] = same(_max_relu, kind)
        table[f"shr.{kind}"] = Signature(_shift_right, kind, (kind, "u32"))
    for width in WIDTH:
        kind = f"b{width}"
        table[f"shl.{kind}"] = Signature(_shift_left, kind, (kind, "u32"))
        table[f"shr.{kind}"] = Signature(_shift_right, kind, (kind, "u32"))
    for kind in ("pred", "b16", "b32", "b64"):
        for name, function in (
            ("and", np.bitwise_and),
            ("or", np.bitwise_or),
            ("xor", np.bitwise_xor),
        ):
            table[f"{name}.{kind}"] = same(function, kind)
        table[f"not.{kind}"] = same(np.invert, kind, 1)
    for kind in ("b32", "b64"):
        table[f"popc.{kind}"] = Signature(_population, "u32", (kind,))
        table[f"clz.{kind}"] = Signature(_leading_zeros, "u32", (kind,))
        table[f"brev.{kind}"] = same(_reverse, kind, 1)
        table[f"bfi.{kind}"] = Signature(_insert, kind, (kind, kind, "u32", "u32"))
    for kind in ("u32", "s32", "u64", "s64"):
        table[f"bfe.{kind}"] = Signature(_extract, kind, (kind, "u32", "u32"))
        table[f"bfind.{kind}"] = Signature(_find_leading_one, "u32", (kind,))
    table["lop3.b32"] = same(_logic3, "b32", 4)
    table["prmt.b32"] = same(_permute, "b32", 3)
    for left in (True, False):
        for clamp in (True, False):
            name = f"shf.{'l' if left else 'r'}.{'clamp' if clamp else 'wrap'}.b32"
            table[name] = same(_funnel(left, clamp), "b32", 3)
    return table


TABLE = _table()
