"""Every integer opcode against Python's integers, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blasst.kernels.verify import integer_ops

KINDS = {"u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64,
         "s64": np.int64, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}  # fmt: skip
Compute = Callable[..., np.ndarray[Any, Any]]


def bits(kind: str) -> int:
    return 8 * np.dtype(KINDS[kind]).itemsize


def values(kind: str, seed: int) -> np.ndarray[Any, Any]:
    """Random numbers, extremes and small ones."""
    limits = np.iinfo(KINDS[kind])
    rng = np.random.default_rng(seed)
    edges = [limits.min, limits.max, 0, 1, 2, 3, 5, limits.max - 1, limits.min + 1]
    wide = rng.integers(limits.min, limits.max, 32 - len(edges), KINDS[kind], endpoint=True)
    small = rng.integers(0, 100, 32 - len(edges))
    picked = np.where(rng.random(32 - len(edges)) < 0.5, wide, small.astype(KINDS[kind]))
    return rng.permutation(np.concatenate([picked, np.array(edges, KINDS[kind])]))


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def divide(a: int, b: int) -> int:
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - divide(a, b) * b


def expected(opcode: str, kind: str, a: int, b: int, c: int) -> int:
    """Python's result, not yet cut to the register's width."""
    width = bits(kind)
    name = opcode.rsplit(".", 1)[0]
    return {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul.lo": lambda: a * b,
        "mul.hi": lambda: a * b >> width,
        "mul.wide": lambda: a * b,
        "mad.lo": lambda: a * b + c,
        "mad.hi": lambda: (a * b >> width) + c,
        "mad.wide": lambda: a * b + c,
        "div": lambda: divide(a, b),
        "rem": lambda: remainder(a, b),
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
        "min.relu": lambda: max(min(a, b), 0),
        "max.relu": lambda: max(a, b, 0),
        "neg": lambda: -a,
        "abs": lambda: abs(a),
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "not": lambda: ~a,
        "popc": lambda: bin(a).count("1"),
        "clz": lambda: width - a.bit_length(),
        "brev": lambda: int(f"{a:0{width}b}"[::-1], 2),
        "bfind": lambda: (~a if a < 0 else a).bit_length() - 1,
        "shl": lambda: a << b if b < width else 0,
        "shr": lambda: a >> min(b, width) if a >= 0 else a >> min(b, width - 1),
    }[name]()


SIMPLE = [
    op
    for op in integer_ops.TABLE
    if not op.startswith(("lop3", "prmt", "shf", "bfe", "bfi.")) and "pred" not in op
]


@pytest.mark.parametrize("opcode", SIMPLE)
def test_arithmetic(opcode: str, compute: Compute) -> None:
    signature = integer_ops.TABLE[opcode]
    kind = signature.sources[0]
    sources = [(k, values(k, i)) for i, k in enumerate(signature.sources)]
    if opcode.startswith("sh"):
        sources[1] = ("u32", np.arange(32, dtype=np.uint32) * 3)
    got = compute(opcode, signature.target, *sources)
    mask = (1 << 8 * got.dtype.itemsize) - 1
    for lane in range(32):
        a, b, c = ([int(v[lane]) for _, v in sources] + [0, 0])[:3]
        want = expected(opcode, kind, a, b, c) & mask
        assert int(got[lane]) == want, (opcode, a, b, c)


@pytest.mark.parametrize("name", ["and", "or", "xor", "not"])
def test_logic_of_predicates(name: str, compute: Compute) -> None:
    a, b = np.arange(32, dtype=np.uint32) & 1, np.arange(32, dtype=np.uint32) >> 1 & 1
    sources = [("pred", a), ("pred", b)][: 1 if name == "not" else 2]
    got = compute(f"{name}.pred", "pred", *sources)
    want = {"and": a & b, "or": a | b, "xor": a ^ b, "not": 1 - a}[name]
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind: str, compute: Compute) -> None:
    a = values(kind, 0)
    start, count = np.arange(32, dtype=np.uint32), np.arange(32, dtype=np.uint32)[::-1].copy()
    got = compute(f"bfe.{kind}", kind, (kind, a), ("u32", start), ("u32", count))
    width = bits(kind)
    for lane in range(32):
        s, n = int(start[lane]), int(count[lane])
        field = (int(a[lane]) & (1 << width) - 1) >> s & (1 << n) - 1 if n else 0
        if kind[0] == "s" and n:
            top = min(s + n - 1, width - 1)
            negative = int(a[lane]) >> top & 1
            field = field - (1 << min(n, width - s)) if negative else field
        assert int(got[lane]) == field & (1 << width) - 1, (lane, s, n)


def test_bit_field_insert(compute: Compute) -> None:
    a, b = values("u32", 0), values("u32", 1)
    start, count = np.arange(32, dtype=np.uint32), np.full(32, 5, np.uint32)
    got = compute("bfi.b32", "b32", ("b32", a), ("b32", b), ("u32", start), ("u32", count))
    for lane in range(32):
        text = list(f"{int(b[lane]):032b}"[::-1])
        for i in range(5):
            if lane + i < 32:
                text[lane + i] = str(int(a[lane]) >> i & 1)
        assert int(got[lane]) == int("".join(text)[::-1], 2)


def test_three_way_logic(compute: Compute) -> None:
    a, b, c = (values("u32", i) for i in range(3))
    table = np.full(32, 0xCA, np.uint32)  # a ? b : c
    got = compute("lop3.b32", "b32", ("b32", a), ("b32", b), ("b32", c), ("b32", table))
    assert got.tolist() == ((a & b) | (~a & c)).tolist()


def test_byte_permute(compute: Compute) -> None:
    a, b = np.full(32, 0x03020180, np.uint32), np.full(32, 0x07060504, np.uint32)
    selector = np.full(32, 0x8527, np.uint32)
    got = compute("prmt.b32", "b32", ("b32", a), ("b32", b), ("b32", selector))
    assert hex(int(got[0])) == "0xff050207"  # bytes 7, 2, 5 and the sign of byte 0


@pytest.mark.parametrize("name", ["l.wrap", "l.clamp", "r.wrap", "r.clamp"])
def test_funnel_shift(name: str, compute: Compute) -> None:
    low, high = values("u32", 0), values("u32", 1)
    by = np.arange(32, dtype=np.uint32) + 8
    got = compute(f"shf.{name}.b32", "b32", ("b32", low), ("b32", high), ("b32", by))
    for lane in range(32):
        n = min(int(by[lane]), 32) if "clamp" in name else int(by[lane]) % 32
        both = int(high[lane]) << 32 | int(low[lane])
        want = both << n >> 32 if name[0] == "l" else both >> n
        assert int(got[lane]) == want & 0xFFFFFFFF
