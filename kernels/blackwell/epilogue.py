"""Output of a tile: tensor memory to shared memory, then one row-clipped bulk store."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from blasst.kernels.blackwell.config import ROWS, WARP, WARPGROUP
from blasst.kernels.blackwell.correction import CHUNK, Correction, scale_values
from blasst.kernels.cute import tmem
from blasst.kernels.cute.load import Source
from blasst.kernels.cute.tile import Tile
from blasst.kernels.cute.windows import copy_window, window

VECTOR = 8  # 16-bit elements of one 16-byte store


@cute.jit
def await_normaliser(correction: Correction, index: cutlass.Constexpr[int]) -> Int32:
    """Until it is there; returns its slot."""
    edge = correction.edges.edge("scale", index)
    edge.wait(correction.visits)
    return edge.slot(correction.visits)


@cute.jit
def store_output(
    correction: Correction,
    index: cutlass.Constexpr[int],
    tile: Tile,
    target: Source,
    smem: cute.Tensor,
    head: Int32,
) -> None:
    """smem: the tile's own queries, (rows, head_dim), free once the tile's products are done."""
    config, row = correction.config, correction.row
    slot = await_normaliser(correction, index)
    scale = correction.scale[index, slot, row]
    values = cute.make_rmem_tensor(CHUNK, Float32)
    packed = cute.make_rmem_tensor(CHUNK, smem.element_type)
    store = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), smem.element_type, num_bits_per_copy=128
    )
    own = cute.flat_divide(smem[row, None], (VECTOR,))
    for c in cutlass.range_constexpr(0, config.head_dim, CHUNK):
        values.fill(0.0)
        if tile.n_blocks > 0:
            tmem.load(values, correction.out[index] + c)
            tmem.wait_loads()
            scale_values(values, scale)
        packed.store(values.load().to(smem.element_type))
        parts = cute.flat_divide(packed, (VECTOR,))
        for v in cutlass.range_constexpr(CHUNK // VECTOR):
            cute.copy(store, parts[None, v], own[None, c // VECTOR + v])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=config.correction_barrier, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(row // WARP) == 0:
        rows = cutlass.min(tile.rows, ROWS)
        copy_window(
            target.atom,
            window(target.coordinates, tile.q_start + tile.row, rows, (head,)),
            smem,
            None,
        )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
