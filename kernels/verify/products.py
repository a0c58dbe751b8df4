"""Operands of tensor core products in shared memory, and their instruction descriptors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.float_ops import from_bf16
from blasst.kernels.verify.memory import Storage
from blasst.kernels.verify.registers import SHARED_BASE, Array
from blasst.kernels.verify.tensor_map import swizzled

DEPTH = 16  # elements of 16 bits along k in one instruction
SWIZZLE_128B = {"tcgen05": 2, "wgmma": 1}


@dataclass(frozen=True)
class Product:
    """d[m, n] (float32) = a[m, 16] @ b[n, 16].T of 16-bit numbers."""

    m: int
    n: int
    bf16: bool
    a_transposed: bool
    b_transposed: bool

    @classmethod
    @functools.cache
    def decode(cls, bits: int) -> Product:
        """From a tcgen05 instruction descriptor of kind::f16."""
        formats = {"d": bits >> 4 & 3, "a": bits >> 7 & 7, "b": bits >> 10 & 7}
        m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
        if formats["d"] != 1 or formats["a"] != formats["b"] or formats["a"] > 1 or m != 128:
            raise ExecutionError(
                f"instruction descriptor {bits:#x} (m {m}, formats {formats}): only 128 rows of "
                "float16 or bfloat16 with float32 results are modelled"
            )
        if bits >> 13 & 3:
            raise ExecutionError(f"instruction descriptor {bits:#x} negates an operand")
        return cls(m, n, formats["a"] == 1, bool(bits >> 15 & 1), bool(bits >> 16 & 1))

    def numbers(self, halves: Array) -> Array:
        return numbers(halves, self.bf16)


def numbers(halves: Array, bf16: bool) -> Array:
    """float32 from uint16."""
    return from_bf16(halves) if bf16 else halves.view(np.float16).astype(np.float32)


@dataclass(frozen=True)
class Tile:
    """Where an operand lies. index: elements of 16 bits in shared memory, [rows, 16].

    words: sorted byte addresses of the 4-byte words that hold them.
    """

    index: Array
    words: Array

    def load(self, shared: Storage, bf16: bool) -> Array:
        """float32 [rows, 16]"""
        if int(self.words[-1]) + 4 > shared.end:
            raise ExecutionError("a matrix descriptor leaves shared memory")
        return numbers(shared.views[2][self.index], bf16)


@functools.lru_cache(8192)
def smem_tile(
    descriptor: int,
    rows: int,
    transposed: bool,
    generation: str,
    part: tuple[int, int] | None = None,
) -> Tile:
    """The operand behind a matrix descriptor. part: (first row, rows) of interest."""
    layout = descriptor >> 61 if generation == "tcgen05" else descriptor >> 62
    if layout != SWIZZLE_128B[generation]:
        raise ExecutionError(
            f"matrix descriptor {descriptor:#x}: only 128-byte swizzles are modelled"
        )
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise ExecutionError(f"matrix descriptor {descriptor:#x}: a base offset is not modelled")
    row, k = np.arange(rows)[:, None], np.arange(DEPTH)[None, :]
    if part is not None:
        row = row[part[0] : sum(part)]
    if transposed:
        # Columns of 64 elements lie together; 8 rows of k make a swizzle atom.
        at = start + row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
    else:
        at = start + row // 8 * stride + row % 8 * 128 + k * 2
    at = swizzled(at, 3)
    if int(at.min()) < SHARED_BASE:
        raise ExecutionError(f"matrix descriptor {descriptor:#x} is below shared memory")
    return Tile((at - SHARED_BASE) // 2, np.unique(at & ~3))
