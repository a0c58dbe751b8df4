"""Moves, packing, selection, comparison and integer conversion; loads of kernel parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from blasst.kernels.verify.errors import UnknownOpcodeError
from blasst.kernels.verify.float_ops import flush
from blasst.kernels.verify.parse import BYTES, Instruction
from blasst.kernels.verify.registers import BANK_OF_TYPE, SHARED_WINDOW, Array, Layout
from blasst.kernels.verify.segments import MicroOp
from blasst.kernels.verify.signature import Signature, same

MOVES = {f"mov.{k}" for k in ("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64",
                              "u64", "s64", "f64", "f16", "bf16")}  # fmt: skip
HALVES = {("b64", 2): ("lo", "hi", "b32"), ("b32", 2): ("hl", "hh", "b16")}
_LD_PARAM = re.compile(r"ld\.param(?:\.(v[24]))?\.([busf](?:8|16|32|64))$")
_PLACE = re.compile(r"\[([\w$]+)(?:\+(\d+))?\]$")


def decode(ins: Instruction, layout: Layout) -> list[MicroOp] | None:
    """Micro-operations of moves and parameter loads, None for other instructions."""
    if ins.opcode in MOVES:
        return _move(ins, layout)
    if ins.opcode.startswith("ld.param"):
        return _load_parameter(ins, layout)
    return None


def _move(ins: Instruction, layout: Layout) -> list[MicroOp]:
    kind = ins.opcode.split(".")[1]
    to, origin = ins.operands
    if to.startswith("{") or origin.startswith("{"):
        return _pack(ins, layout, "b" + kind[1:], to, origin)
    return [MicroOp(None, (layout.source(ins, origin, kind),), layout.target(ins, to, kind))]


def _pack(ins: Instruction, layout: Layout, kind: str, to: str, origin: str) -> list[MicroOp]:
    vector = to if to.startswith("{") else origin
    parts = [p.strip() for p in vector.strip("{}").split(",")]
    names = HALVES.get((kind, len(parts)))
    if names is None:
        raise UnknownOpcodeError(f"{ins}: packing {len(parts)} parts is not known ({ins.where})")
    *halves, part_kind = names
    ops = []
    for part, bank in zip(parts, halves, strict=True):
        if to.startswith("{"):
            whole = layout.source(ins, origin, kind)
            if part != "_":
                source = layout.ref(bank, whole.row)
                ops.append(MicroOp(None, (source,), layout.target(ins, part, part_kind)))
        else:
            whole = layout.target(ins, to, kind)
            source = layout.source(ins, part, part_kind)
            ops.append(MicroOp(None, (source,), layout.ref(bank, whole.row)))
    return ops


def _load_parameter(ins: Instruction, layout: Layout) -> list[MicroOp]:
    form, place = _LD_PARAM.match(ins.opcode), _PLACE.match(ins.operands[1])
    if form is None or place is None or place[1] not in layout.parameter_index:
        raise UnknownOpcodeError(f"{ins}: this form of ld.param is not known ({ins.where})")
    kind, offset = form[2], int(place[2] or 0)
    size = BYTES[kind[1:]]
    if kind == "s8":
        raise UnknownOpcodeError(f"{ins}: signed bytes are not known ({ins.where})")
    ops = []
    for i, token in enumerate(ins.operands[0].strip("{}").split(",")):
        target = layout.target(ins, token.strip(), kind)
        at = offset + i * size
        index = layout.parameter_index[place[1]]
        source = layout.parameter(index, at, 8 * size, BANK_OF_TYPE[kind])
        ops.append(MicroOp(None, (source,), target))
    return ops


def _select(a: Array, b: Array, choose: Array, out: Array) -> None:
    out[:] = np.where(choose, a, b)


def _ordered(compare: Callable[..., Array]) -> Callable[..., None]:
    """A comparison that is false when an operand is NaN."""

    def compute(a: Array, b: Array, out: Array) -> None:
        out[:] = compare(a, b) & ~(np.isnan(a) | np.isnan(b))

    return compute


def _unordered(compare: Callable[..., Array]) -> Callable[..., None]:
    def compute(a: Array, b: Array, out: Array) -> None:
        out[:] = compare(a, b) | np.isnan(a) | np.isnan(b)

    return compute


def _num(a: Array, b: Array, out: Array) -> None:
    out[:] = ~(np.isnan(a) | np.isnan(b))


def _nan(a: Array, b: Array, out: Array) -> None:
    out[:] = np.isnan(a) | np.isnan(b)


def _combined(compare: Callable[..., Any], combine: Any, invert: bool) -> Callable[..., None]:
    def compute(a: Array, b: Array, other: Array, out: Array) -> None:
        result = np.empty(len(out), np.bool_)
        compare(a, b, result)
        combine(~result if invert else result, other, out)

    return compute


def _flushed(compare: Callable[..., Any]) -> Callable[..., None]:
    def compute(a: Array, b: Array, out: Array) -> None:
        compare(flush(a), flush(b), out)

    return compute


def _inverse(compare: Callable[..., Any]) -> Callable[..., None]:
    def compute(a: Array, b: Array, out: Array) -> None:
        compare(a, b, out)
        np.logical_not(out, out)

    return compute


def _cast(a: Array, out: Array) -> None:
    out[:] = a.astype(out.dtype)


def _cast_byte(byte: Any) -> Callable[..., None]:
    """To or from the low 8 bits of a 16-bit register, which are extended by their type."""

    def compute(a: Array, out: Array) -> None:
        out[:] = a.astype(byte).astype(out.dtype)

    return compute


def _round_to(how: Callable[[Array], Array], ftz: bool) -> Callable[..., None]:
    """float32 to integer, saturated; NaN gives 0."""

    def compute(a: Array, out: Array) -> None:
        a = flush(a) if ftz else a
        limits = np.iinfo(out.dtype)
        value = np.nan_to_num(how(a.astype(np.float64)), nan=0.0)
        inside = np.clip(value, float(limits.min), float(limits.max))
        too_big = value >= float(limits.max)
        out[:] = np.where(too_big, limits.max, np.where(too_big, 0, inside).astype(out.dtype))

    return compute


def _to_generic(a: Array, out: Array) -> None:
    np.add(a, np.uint64(SHARED_WINDOW), out)


def _to_shared(a: Array, out: Array) -> None:
    np.subtract(a, np.uint64(SHARED_WINDOW), out)


COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparisons(table: dict[str, Signature], kind: str, names: dict[str, Any]) -> None:
    for name, plain in names.items():
        ending = ("", ".ftz") if kind == "f32" else ("",)
        for ftz in ending:
            compare = _flushed(plain) if ftz else plain
            sources = (kind, kind)
            table[f"setp.{name}{ftz}.{kind}"] = Signature(
                compare, "pred", sources, _inverse(compare)
            )
            for word, combine in COMBINE.items():
                table[f"setp.{name}.{word}{ftz}.{kind}"] = Signature(
                    _combined(compare, combine, False),
                    "pred",
                    (*sources, "pred"),
                    _combined(compare, combine, True),
                )


def _table() -> dict[str, Signature]:
    table: dict[str, Signature] = {}
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64"):
        table[f"selp.{kind}"] = Signature(_select, kind, (kind, kind, "pred"))
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        names = dict(COMPARE)
        if kind[0] == "u":
            names |= {name: COMPARE[same_as] for name, same_as in UNSIGNED.items()}
        _comparisons(table, kind, names)
    for kind in ("b16", "b32", "b64"):
        _comparisons(table, kind, {"eq": np.equal, "ne": np.not_equal})
    floats = {name: compare for name, compare in COMPARE.items() if name != "ne"}
    floats["ne"] = _ordered(np.not_equal)
    floats |= {f"{name}u": _unordered(compare) for name, compare in COMPARE.items()}
    floats |= {"num": _num, "nan": _nan}
    _comparisons(table, "f32", floats)
    integers = ("u16", "s16", "u32", "s32", "u64", "s64")
    for to in integers:
        for origin in integers:
            table[f"cvt.{to}.{origin}"] = Signature(_cast, to, (origin,))
    for byte, number in (("u8", np.uint8), ("s8", np.int8)):
        for kind in integers:
            table[f"cvt.{byte}.{kind}"] = Signature(_cast_byte(number), byte, (kind,))
            table[f"cvt.{kind}.{byte}"] = Signature(_cast_byte(number), kind, (byte,))
    for kind in ("u32", "s32", "u64", "s64"):
        table[f"cvt.rn.f32.{kind}"] = Signature(_cast, "f32", (kind,))
        for mode, how in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
            for ftz in ("", ".ftz"):
                rounded = _round_to(how, bool(ftz))
                table[f"cvt.{mode}{ftz}.{kind}.f32"] = Signature(rounded, kind, ("f32",))
    table["cvta.param.u64"] = table["cvta.to.global.u64"] = table["cvta.global.u64"] = same(
        _cast, "u64", 1
    )
    table["cvta.shared.u64"] = same(_to_generic, "u64", 1)
    table["cvta.to.shared.u64"] = same(_to_shared, "u64", 1)
    return table


TABLE = _table()
