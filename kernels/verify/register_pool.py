"""Registers that warps hold after setmaxnreg."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blasst.kernels.verify.operands import DONE, Operands

if TYPE_CHECKING:
    from blasst.kernels.verify.warp import Warp

REGISTERS = 65536
WARPGROUP = 4


class RegisterPool:
    """counts: registers per thread that each warp asked for last, 0 for none."""

    def __init__(self, warps: int) -> None:
        self.counts = [0] * warps

    def resize(self, ops: Operands, warp: Warp, count: int, grows: bool) -> int:
        before = self.counts[warp.id]
        if before and (count < before) is grows:
            raise ops.error(warp, f"goes from {before} to {count} registers")
        self.counts[warp.id] = count
        return DONE

    def problems(self) -> list[str]:
        """What is wrong with the final counts."""
        found = []
        for first in range(0, len(self.counts), WARPGROUP):
            group = self.counts[first : first + WARPGROUP]
            if len(set(group)) > 1:
                found.append(f"setmaxnreg differs in the warpgroup of warp {first}: {group}")
        total = 32 * sum(self.counts)
        if total > REGISTERS:
            found.append(f"warps hold {total} registers of {REGISTERS}")
        return found
