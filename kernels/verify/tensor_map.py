"""TMA descriptors: what the kernel's launcher wrote, and which bytes a copy moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.registers import Array

BYTES = 128
RANK = 5
# Fields of bits 0-31 of word 1, found by varying one property of a tensor after the other.
_RANK, _TYPE, _SWIZZLE = (4, 7), (7, 15), (13, 3)
_KNOWN = (0x040002, 0x240002)
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 10: 2}


@dataclass(frozen=True)
class TensorMap:
    """Five dimensions, the first contiguous. strides in bytes; box: extent that one copy moves.

    swizzle: how many address bits from 7 up are xor-ed onto those from 4 up.
    """

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    swizzle: int

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """raw: at least 64 bytes; raises ExecutionError for fields of unknown meaning."""
        w = [int(x) for x in np.frombuffer(raw[:64], np.uint64)]
        flags, low = w[1] & 0xFFFFFFFF, 0xFFFFFFFF
        fields = {name: flags >> at & bits for name, (at, bits) in
                  (("rank", _RANK), ("type", _TYPE), ("swizzle", _SWIZZLE))}  # fmt: skip
        rest = flags & ~sum(bits << at for at, bits in (_RANK, _TYPE, _SWIZZLE))
        if rest not in _KNOWN or fields["type"] not in ELEMENT_BYTES:
            raise ExecutionError(
                f"TMA descriptor with flags {flags:#x}: only plain tiled tensors with a standard "
                "swizzle are modelled"
            )
        element = ELEMENT_BYTES[fields["type"]]
        units = [w[1] >> 32, w[2] & low, w[2] >> 32, w[3] & low]
        return cls(
            base=w[0],
            shape=tuple(
                n + 1 for n in (w[4] & low, w[4] >> 32, w[5] & low, w[5] >> 32, w[6] & low)
            ),
            strides=(element, *(16 * n for n in units)),
            box=(
                *((w[6] >> 56 & 255) + 1,),
                *((w[7] >> shift & 255) + 1 for shift in (0, 8, 16, 24)),
            ),
            element=element,
            swizzle=fields["swizzle"],
        )

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element

    @cached_property
    def _grid(self) -> tuple[Array, ...]:
        """Index of every element of the box along each dimension, the first fastest."""
        return tuple(
            g.reshape(-1)
            for g in np.meshgrid(*(np.arange(n) for n in self.box[::-1]), indexing="ij")
        )[::-1]

    @cached_property
    def _offsets(self) -> tuple[Array, Array]:
        """Bytes of every element of the box from its first: in global, and (packed) in shared."""
        in_global = sum(g * s for g, s in zip(self._grid, self.strides, strict=True))
        return np.asarray(in_global), np.arange(len(self._grid[0])) * self.element

    def elements(self, coordinates: list[int], shared: int) -> tuple[Array, Array, Array]:
        """(global addresses, shared addresses, whether inside the tensor) of the box."""
        at = [*coordinates, *(0,) * (RANK - len(coordinates))]
        inside = np.ones(len(self._grid[0]), np.bool_)
        for g, c, n, b in zip(self._grid, at, self.shape, self.box, strict=True):
            if c < 0 or c + b > n:
                inside &= (g + c >= 0) & (g + c < n)
        in_global, packed = self._offsets
        start = self.base + sum(c * s for c, s in zip(at, self.strides, strict=True))
        return in_global + start, swizzled(packed + shared, self.swizzle), inside


def swizzled(addresses: Array, bits: int) -> Array:
    """Byte addresses with the bits from 7 up xor-ed onto those from 4 up."""
    result: Array = addresses ^ ((addresses >> 7 & (1 << bits) - 1) << 4)
    return result
