"""Registers of a warp: one numpy row of 32 lanes each, seen through the views ("banks") in use.

Constants, special registers and kernel parameters are rows too, so every operand is (bank, row).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blasst.kernels.verify.errors import UnknownOpcodeError, VerifyError
from blasst.kernels.verify.parse import Instruction, Module

Array = npt.NDArray[Any]
LANES = 32
POISON = 0x7FC0DEAD  # a NaN in float32, so that a value that nobody wrote spoils what uses it
SHARED_BASE = 1024  # of dynamic shared memory: the first KiB belongs to the system
SHARED_WINDOW = 1 << 46  # generic addresses of shared memory
PARAMETER_WINDOW = 1 << 45

BANKS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    # name: (class, how a view is taken of the class's [rows, 32] array)
    "p": (1, lambda a: a),
    "h": (16, lambda a: a),
    "k": (16, lambda a: a.view(np.int16)),
    "u": (32, lambda a: a),
    "i": (32, lambda a: a.view(np.int32)),
    "f": (32, lambda a: a.view(np.float32)),
    "hl": (32, lambda a: a.view(np.uint16)[:, 0::2]),
    "hh": (32, lambda a: a.view(np.uint16)[:, 1::2]),
    "q": (64, lambda a: a),
    "l": (64, lambda a: a.view(np.int64)),
    "d": (64, lambda a: a.view(np.float64)),
    "x": (64, lambda a: a.view(np.float32).reshape(len(a), LANES, 2)),
    "lo": (64, lambda a: a.view(np.uint32)[:, 0::2]),
    "hi": (64, lambda a: a.view(np.uint32)[:, 1::2]),
}
BANK_NAMES = tuple(BANKS)
HALF_BANKS = ("hl", "hh", "lo", "hi")
BANK_INDEX = {name: i for i, name in enumerate(BANK_NAMES)}
BANK_OF_TYPE = {
    "pred": "p", "b16": "h", "u16": "h", "s16": "k", "b32": "u", "u32": "u", "s32": "i",
    "f32": "f", "b64": "q", "u64": "q", "s64": "l", "f64": "d", "f32x2": "x", "f16x2": "u",
    "bf16x2": "u", "f16": "h", "bf16": "h", "b8": "h", "u8": "h", "s8": "k",
}  # fmt: skip
_DTYPE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Ref(NamedTuple):
    """A row of a warp's registers. bank: index into BANK_NAMES."""

    bank: int
    row: int

    @property
    def code(self) -> str:
        return f"{BANK_NAMES[self.bank]}[{self.row}]"

    @property
    def width(self) -> int:
        return BANKS[BANK_NAMES[self.bank]][0]


Banks = tuple[list[Array], ...]
Reader = Callable[[Any], Array]


@dataclass
class Layout:
    """Rows of every class, which views are needed, and the rows that are filled at launch.

    constants: (class, row) -> bits. specials: name -> row of 32 bits. parameters: row -> (class,
    offset in the parameter, parameter index).
    """

    module: Module
    rows: dict[int, int] = field(default_factory=lambda: {1: 1, 16: 1, 32: 1, 64: 1})
    used: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in BANKS})
    constants: dict[tuple[int, int], int] = field(default_factory=dict)
    specials: dict[str, int] = field(default_factory=dict)
    parameters: dict[tuple[int, int, int], int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    _slots: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (name, scope), kind in self.module.registers.items():
            width = _class_of(kind)
            self._slots[name, scope] = (width, self._new_row(width))
        at = SHARED_BASE
        for name, (alignment, size) in sorted(
            self.module.shared.items(), key=lambda s: not s[1][1]
        ):
            at = -(-at // max(alignment, 1)) * max(alignment, 1)
            self.shared[name] = at
            at += size
        self.static_bytes = at - SHARED_BASE

    def _new_row(self, width: int) -> int:
        self.rows[width] += 1
        return self.rows[width] - 1

    def register(self, name: str, ins: Instruction) -> tuple[int, int] | None:
        """(class, row) of a declared register, None when there is none of that name."""
        scope = ins.scope
        for depth in range(len(scope), 0, -1):
            slot = self._slots.get((name, scope[:depth]))
            if slot is not None:
                return slot
        return None

    def ref(self, bank: str, row: int) -> Ref:
        self.used[bank].add(row)
        return Ref(BANK_INDEX[bank], row)

    def constant(self, value: int, bank: str) -> Ref:
        """The row that holds these bits."""
        width = BANKS[bank][0]
        value &= (1 << width) - 1
        row = self.constants.get((width, value))
        if row is None:
            row = self.constants[width, value] = self._new_row(width)
        return self.ref(bank, row)

    def special(self, name: str, bank: str) -> Ref:
        if name not in self.specials:
            self.specials[name] = self._new_row(32)
        return self.ref(bank, self.specials[name])

    def parameter(self, index: int, offset: int, width: int, bank: str) -> Ref:
        """The row that holds `width` bits of a kernel parameter."""
        key = (index, offset, width)
        if key not in self.parameters:
            self.parameters[key] = self._new_row(max(width, 16))
        return self.ref(bank, self.parameters[key])

    @property
    def parameter_index(self) -> dict[str, int]:
        return {p.name: i for i, p in enumerate(self.module.parameters)}

    def source(self, ins: Instruction, token: str, kind: str) -> Ref:
        """What an instruction reads: a register, constant, special register or symbol address."""
        bank = BANK_OF_TYPE[kind]
        slot = self.register(token, ins)
        if slot is not None:
            return self._view(ins, token, slot, bank)
        if token in self.shared:
            return self.constant(self.shared[token], bank)
        if token in self.parameter_index:
            return self.constant(PARAMETER_WINDOW + (self.parameter_index[token] << 16), bank)
        if token.startswith("%") or token == "WARP_SZ":
            return self._special(ins, token, bank)
        return self.constant(literal(token, kind), bank)

    def target(self, ins: Instruction, token: str, kind: str) -> Ref:
        """What an instruction writes; row 0 of each class takes what is thrown away ("_")."""
        bank = BANK_OF_TYPE[kind]
        if token == "_":
            return self.ref(bank, 0)
        slot = self.register(token, ins)
        if slot is None:
            raise VerifyError(f"{ins}: register {token} is not declared ({ins.where})")
        return self._view(ins, token, slot, bank)

    def _view(self, ins: Instruction, token: str, slot: tuple[int, int], bank: str) -> Ref:
        width, row = slot
        if width != BANKS[bank][0]:
            raise VerifyError(
                f"{ins}: register {token} has {width} bits, the instruction needs "
                f"{BANKS[bank][0]} ({ins.where})"
            )
        return self.ref(bank, row)

    def _special(self, ins: Instruction, token: str, bank: str) -> Ref:
        if token == "WARP_SZ":
            return self.constant(LANES, bank)
        if token not in SPECIALS:
            raise UnknownOpcodeError(f"special register {token} is not modelled ({ins.where})")
        if BANKS[bank][0] != 32:
            raise UnknownOpcodeError(f"{ins}: {token} is read as 32 bits only ({ins.where})")
        return self.special(token, bank)


SPECIALS: dict[str, Callable[[Any, int], Any]] = {
    # name: value of (block, warp id)
    "%tid.x": lambda b, w: np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * w),
    "%tid.y": lambda b, w: 0,
    "%tid.z": lambda b, w: 0,
    "%laneid": lambda b, w: np.arange(LANES, dtype=np.uint32),
    "%warpid": lambda b, w: w,
    "%ntid.x": lambda b, w: b.launch.threads,
    "%ntid.y": lambda b, w: 1,
    "%ntid.z": lambda b, w: 1,
    "%nwarpid": lambda b, w: b.launch.threads // LANES,
    "%ctaid.x": lambda b, w: b.cta[0],
    "%ctaid.y": lambda b, w: b.cta[1],
    "%ctaid.z": lambda b, w: b.cta[2],
    "%nctaid.x": lambda b, w: b.launch.grid[0],
    "%nctaid.y": lambda b, w: b.launch.grid[1],
    "%nctaid.z": lambda b, w: b.launch.grid[2],
    "%cluster_ctarank": lambda b, w: 0,
    "%cluster_nctarank": lambda b, w: 1,
    "%cluster_ctaid.x": lambda b, w: 0,
    "%cluster_nctaid.x": lambda b, w: 1,
    "%is_explicit_cluster": lambda b, w: 0,
    "%smid": lambda b, w: 0,
    "%dynamic_smem_size": lambda b, w: b.launch.shared_bytes,
    "%total_smem_size": lambda b, w: b.launch.shared_bytes,
    "%lanemask_lt": lambda b, w: (1 << np.arange(LANES, dtype=np.uint64)) - 1,
    "%lanemask_eq": lambda b, w: 1 << np.arange(LANES, dtype=np.uint64),
}  # fmt: skip
"""A cluster is refused before the run, so every block is alone in its own."""


def _class_of(kind: str) -> int:
    bits = {"pred": 1, "b8": 16, "u8": 16, "s8": 16}.get(kind)
    if bits is None:
        m = re.fullmatch(r"[busf](16|32|64)", kind)
        if m is None:
            raise UnknownOpcodeError(f"registers of type .{kind} are not supported")
        bits = int(m[1])
    return bits


def literal(token: str, kind: str) -> int:
    """Bits of a literal operand."""
    if token[:2] in ("0f", "0F", "0d", "0D"):
        return int(token[2:], 16)
    try:
        value = int(token.rstrip("U"), 8 if re.fullmatch(r"-?0[0-7]+", token) else 0)
    except ValueError:
        raise VerifyError(f"operand {token!r} is neither declared nor a literal") from None
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value != 0) if kind == "pred" else value


class RegisterFile:
    """The registers of one warp; reused by one block after the other."""

    def __init__(self, layout: Layout) -> None:
        self.arrays: dict[int, Array] = {
            width: np.zeros((count, LANES), _DTYPE[width]) for width, count in layout.rows.items()
        }
        banks: list[list[Array]] = []
        for name, (width, take) in BANKS.items():
            views: list[Any] = [None] * layout.rows[width]
            if layout.used[name]:
                view = take(self.arrays[width])
                for row in layout.used[name]:
                    views[row] = view[row]
            banks.append(views)
        self.banks: Banks = tuple(banks)

    def reset(self, template: dict[int, Array]) -> None:
        for width, array in self.arrays.items():
            np.copyto(array, template[width])


def template(layout: Layout, blobs: list[bytes]) -> dict[int, Array]:
    """First contents of a warp's registers: poison, constants and launch parameters."""
    arrays: dict[int, Array] = {
        1: np.zeros((layout.rows[1], LANES), np.bool_),
        16: np.full((layout.rows[16], LANES), POISON & 0xFFFF, np.uint16),
        32: np.full((layout.rows[32], LANES), POISON, np.uint32),
        64: np.full((layout.rows[64], LANES), (POISON << 32) | POISON, np.uint64),
    }
    for (width, value), row in layout.constants.items():
        arrays[width][row] = value
    for (index, offset, width), row in layout.parameters.items():
        raw = blobs[index][offset : offset + width // 8]
        arrays[max(width, 16)][row] = int.from_bytes(raw, "little")
    return arrays
