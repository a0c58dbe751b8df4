"""What a kernel is launched with, and names for people: roles of warps, regions of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blasst.kernels.verify.tensor_map import TensorMap


@dataclass(frozen=True)
class Region:
    """Bytes [start, start + size) of shared memory."""

    name: str
    start: int
    size: int


@dataclass
class Launch:
    """grid: blocks along x, y, z; parameters: the bytes of each kernel parameter.

    maps: TMA descriptors that were used, by address. scoreboard: the kernel uses registers of
    tcgen05.ld before tcgen05.wait::ld, which PTX does not allow and hardware makes wait.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    parameters: list[bytes]
    roles: Callable[[int], str] = lambda warp: "any"
    regions: tuple[Region, ...] = ()
    maps: dict[int, TensorMap] = field(default_factory=dict)
    scoreboard: bool = False

    def role(self, warp: int) -> str:
        return self.roles(warp)

    def region(self, offset: int) -> str:
        """Name of the place at a byte offset of shared memory."""
        for region in self.regions:
            if region.start <= offset < region.start + region.size:
                inside = offset - region.start
                return f"{region.name}+{inside}" if inside else region.name
        return f"shared+{offset}"

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Indices of all blocks, x fastest."""
        nx, ny, nz = self.grid
        return [(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)]
