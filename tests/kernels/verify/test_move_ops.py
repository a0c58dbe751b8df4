"""Moves, comparisons, selection, conversion."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Compute = Callable[..., np.ndarray[Any, Any]]
LANE = np.arange(32)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64", "u16", "s16"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_integer_comparison(name: str, kind: str, compute: Compute) -> None:
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    a = (LANE - 16).astype(dtype)
    b = np.full(32, 3, dtype)
    got = compute(f"setp.{name}.{kind}", "pred", (kind, a), (kind, b))
    assert got.tolist() == getattr(operator, name)(a, b).astype(int).tolist()


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_float_comparison_with_nan(name: str, compute: Compute) -> None:
    a, b = (LANE - 16).astype(np.float32), np.zeros(32, np.float32)
    a[:3] = np.nan
    b[2:5] = np.nan
    nan = np.isnan(a) | np.isnan(b)
    plain = getattr(operator, name)(a, b)
    ordered = compute(f"setp.{name}.f32", "pred", ("f32", a), ("f32", b))
    unordered = compute(f"setp.{name}u.f32", "pred", ("f32", a), ("f32", b))
    assert ordered.tolist() == (plain & ~nan).astype(int).tolist()
    assert unordered.tolist() == (plain | nan).astype(int).tolist()
    assert compute("setp.nan.f32", "pred", ("f32", a), ("f32", b)).tolist() == nan.tolist()
    assert compute("setp.num.f32", "pred", ("f32", a), ("f32", b)).tolist() == (~nan).tolist()


@pytest.mark.parametrize("word", ["and", "or", "xor"])
def test_comparison_combined_with_a_predicate(word: str, compute: Compute) -> None:
    a, b = LANE.astype(np.uint32), np.full(32, 7, np.uint32)
    other = (LANE & 1).astype(np.uint32)
    combine = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[word]
    sources = [("u32", a), ("u32", b), ("pred", other)]
    got = compute(f"setp.lt.{word}.u32", "pred", *sources)
    assert got.tolist() == combine((a < b).astype(int), other).tolist()
    second = compute(f"setp.lt.{word}.u32", "pred", *sources, target="%p25|{d}")
    assert second.tolist() == combine((a >= b).astype(int), other).tolist()


def test_unsigned_names_of_comparisons(compute: Compute) -> None:
    a, b = LANE.astype(np.uint32) - np.uint32(16), np.full(32, 3, np.uint32)
    for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        got = compute(f"setp.{name}.u32", "pred", ("u32", a), ("u32", b))
        assert got.tolist() == getattr(operator, same)(a, b).astype(int).tolist()


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_select(kind: str, compute: Compute) -> None:
    dtype = f"u{int(kind[1:]) // 8}"
    a, b = LANE.astype(dtype), (LANE + 100).astype(dtype)
    choose = (LANE % 3 == 0).astype(np.uint32)
    got = compute(f"selp.{kind}", kind, (kind, a), (kind, b), ("pred", choose))
    assert got.tolist() == np.where(choose, a, b).tolist()


def test_pack_and_unpack(compute: Compute) -> None:
    words = np.arange(64, dtype=np.uint32) * 0x01010101
    pairs = words.reshape(32, 2).copy().view(np.uint64).reshape(32)
    low = compute("mov.b64", "b32", ("b64", pairs), target="{{{d}, _}}")
    high = compute("mov.b64", "b32", ("b64", pairs), target="{{_, {d}}}")
    assert low.tolist() == words[0::2].tolist()
    assert high.tolist() == words[1::2].tolist()
    half = compute("mov.b32", "b16", ("b32", words[:32].copy()), target="{{_, {d}}}")
    assert half.tolist() == (words[:32] >> 16).tolist()


@pytest.mark.parametrize(
    ("opcode", "to", "origin", "values"),
    [
        ("cvt.u32.u16", "u32", "u16", LANE.astype(np.uint16) - np.uint16(3)),
        ("cvt.s32.s16", "s32", "s16", (LANE - 16).astype(np.int16)),
        ("cvt.u64.u32", "u64", "u32", LANE.astype(np.uint32) - np.uint32(3)),
        ("cvt.s64.s32", "s64", "s32", (LANE - 16).astype(np.int32)),
        ("cvt.u16.u32", "u16", "u32", LANE.astype(np.uint32) + np.uint32(0x1FFF0)),
        ("cvt.u32.u64", "u32", "u64", LANE.astype(np.uint64) + np.uint64(0x1_FFFF_FFF0)),
    ],
)
def test_integer_conversion(
    opcode: str, to: str, origin: str, values: np.ndarray[Any, Any], compute: Compute
) -> None:
    got = compute(opcode, to, (origin, values))
    mask = (1 << 8 * got.dtype.itemsize) - 1
    assert got.tolist() == [int(v) & mask for v in values]


@pytest.mark.parametrize(("byte", "want"), [("u8", 0xF0), ("s8", 0xFFF0)])
def test_bytes_are_extended_by_their_type(byte: str, want: int, compute: Compute) -> None:
    wide = np.full(32, 0x123456F0, np.uint32)
    assert set(compute(f"cvt.{byte}.u32", "u16", ("u32", wide)).tolist()) == {want}
    half = np.full(32, 0x12F0, np.uint16)
    back = compute(f"cvt.s32.{byte}", "s32", ("u16", half)).view(np.int32)
    assert set(back.tolist()) == {0xF0 if byte == "u8" else -16}


def test_float_to_integer_saturates(compute: Compute) -> None:
    a = np.linspace(-3.5, 3.5, 32, dtype=np.float32)
    a[0], a[1], a[2] = np.nan, 1e20, -1e20
    for mode, how in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
        got = compute(f"cvt.{mode}.s32.f32", "s32", ("f32", a)).view(np.int32)
        assert got[:3].tolist() == [0, 2**31 - 1, -(2**31)]
        assert got[3:].tolist() == how(a[3:].astype(float)).astype(int).tolist()
    back = compute("cvt.rn.f32.s32", "f32", ("s32", (LANE - 9).astype(np.int32)))
    assert back.view(np.float32).tolist() == (LANE - 9).tolist()


def test_guarded_instruction_keeps_the_other_lanes(kernel: Callable[..., Any]) -> None:
    out = np.zeros(32, np.uint32)
    body = """
 mov.u32 %r0, %laneid; mov.u32 %r1, 5; setp.lt.u32 %p1, %r0, 10;
 @%p1 add.u32 %r1, %r0, 100; @!%p1 add.u32 %r1, %r1, 1;
 mad.wide.u32 %q5, %r0, 4, %q0; st.global.u32 [%q5], %r1;"""
    assert kernel(body, {"out": out}).run().clean
    assert out.tolist() == [lane + 100 if lane < 10 else 6 for lane in range(32)]
