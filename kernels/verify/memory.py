"""Byte-addressed memory: the block's shared memory, and buffers in global memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.registers import SHARED_BASE, SHARED_WINDOW, Array

TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(eq=False)
class Storage:
    """bytes [base, base + size). writable: the kernel may write it. touched: by whom, see races."""

    name: str
    base: int
    data: Array
    writable: bool = True
    shadow: Any = None
    views: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size, kind in TYPES.items():
            whole = len(self.data) // size * size
            self.views[size] = self.data[:whole].view(kind)

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def load(self, addresses: Array, size: int) -> Array:
        """Elements of `size` bytes; addresses: int64, inside and aligned."""
        result: Array = self.views[size][(addresses - self.base) // size]
        return result

    def store(self, addresses: Array, values: Array, size: int) -> None:
        self.views[size][(addresses - self.base) // size] = values


class Memory:
    """All that a block can address with loads and stores."""

    def __init__(self, buffers: list[Storage], shared_bytes: int) -> None:
        self.buffers = sorted(buffers, key=lambda b: b.base)
        self.shared = Storage("shared", SHARED_BASE, np.full(shared_bytes, 0xFF, np.uint8))

    def clear(self) -> None:
        """Shared memory of a new block: NaNs."""
        self.shared.data[:] = 0xFF

    def find(self, space: str, addresses: Array, size: int) -> tuple[Storage, Array]:
        """The one Storage that holds all addresses, and the addresses in it."""
        if not (addresses % size == 0).all():
            bad = int(addresses[addresses % size != 0][0])
            raise ExecutionError(f"address {bad:#x} is not a multiple of {size} bytes")
        if space == "generic":
            shared = bool(addresses[0] >= SHARED_WINDOW)
            addresses = addresses - SHARED_WINDOW if shared else addresses
            space = "shared" if shared else "global"
        low, high = int(addresses.min()), int(addresses.max()) + size
        if space == "shared":
            if self.shared.base <= low and high <= self.shared.end:
                return self.shared, addresses
            raise ExecutionError(
                f"shared addresses {low:#x} to {high:#x} are outside the block's "
                f"{self.shared.base:#x} to {self.shared.end:#x}"
            )
        for buffer in self.buffers:
            if buffer.base <= low and high <= buffer.end:
                return buffer, addresses
        raise ExecutionError(f"global addresses {low:#x} to {high:#x} {self._nearest(low)}")

    def _nearest(self, address: int) -> str:
        below = [b for b in self.buffers if b.base <= address]
        if not below:
            return "are below every buffer"
        b = below[-1]
        return f"are {address - b.base} bytes into buffer {b.name} of {len(b.data)} bytes"
