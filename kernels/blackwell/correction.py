"""Correction warpgroup: rescales O when a maximum rose, and hands the tiles to the epilogue."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from blasst.kernels.blackwell.config import TILES, Config
from blasst.kernels.blackwell.edges import Edges
from blasst.kernels.cute import tmem

CHUNK = 32  # columns of O in registers at a time


@dataclass(frozen=True)
class Correction:
    """scale: [tiles, 2 slots, rows] in shared memory; out: this warp's lanes."""

    config: Config
    edges: Edges
    visits: Int32
    row: Int32
    scale: cute.Tensor
    out: tuple[Int32, Int32]

    @cute.jit
    def correct(self) -> None:
        for i in cutlass.range(self.visits, unroll=1):
            for tile in cutlass.range_constexpr(TILES):
                message = self.edges.edge("scale", tile)
                message.wait(i)
                scale = self.scale[tile, message.slot(i), self.row]
                # Most visits raise no maximum, and skipped ones none at all.
                if cute.arch.vote_any_sync(scale != 1.0):
                    # Complete before S(i) was: all products up to P @ V of i - 2.
                    self.edges.edge("o_full", tile).wait(i - 1)
                    self.rescale(tile, scale)
                self.edges.edge("o_ready", tile).arrive(i)

    @cute.jit
    def await_output(self, tile: int) -> None:
        """Also of a tile without rows: no product may complete in a block that has ended."""
        if cutlass.const_expr(self.config.grid > 0):
            self.edges.edge("o_done", tile).wait(0)
        else:
            if self.visits > 0:
                self.edges.edge("o_done", tile).wait(0)

    @cute.jit
    def rescale(self, tile: int, scale: Float32) -> None:
        """O *= scale, row by row."""
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for c in cutlass.range_constexpr(0, self.config.head_dim, CHUNK):
            tmem.load(values, self.out[tile] + c)
            tmem.wait_loads()
            scale_values(values, scale)
            tmem.store(self.out[tile] + c, values)
        tmem.wait_stores()


@cute.jit
def scale_values(values: cute.Tensor, scale: Float32) -> None:
    for c in cutlass.range_constexpr(0, cute.size(values), 2):
        values[c], values[c + 1] = cute.arch.mul_packed_f32x2(
            (values[c], values[c + 1]), (scale, scale)
        )
