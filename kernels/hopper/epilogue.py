"""Output of one warpgroup: registers to shared memory, then one row-clipped bulk store; lse."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from blasst.kernels.cute.fragment import ROWS_PER_THREAD, first_row
from blasst.kernels.cute.load import Source
from blasst.kernels.cute.softmax import scale_rows
from blasst.kernels.cute.tile import position_of
from blasst.kernels.cute.windows import copy_window, window
from blasst.kernels.hopper.config import ROWS, WARP, WARPGROUP
from blasst.kernels.hopper.consume import Consumer


@cute.jit
def store_output(
    consumer: Consumer, target: Source, smem: cute.Tensor, lse: cute.Tensor, head: Int32
) -> None:
    """smem: the warpgroup's own query rows, (64, head_dim), free once its products are done. head:
    the bundle's number where heads are packed."""
    o, tile, thread = consumer.operands, consumer.tile, consumer.thread
    pack = consumer.config.pack
    scale, row_lse = consumer.softmax.finish()
    scale_rows(o.acc, scale)
    out = cute.make_rmem_tensor_like(o.acc, smem.element_type)
    out.store(o.acc.load().to(smem.element_type))
    barrier = consumer.config.group_barrier(consumer.group)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), smem.element_type)
    copy = cute.make_tiled_copy_C(atom, o.mma_pv).get_slice(thread)
    cute.copy(atom, copy.retile(out), copy.partition_D(smem))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(thread // WARP) == 0:
        positions = position_of(cutlass.min(tile.rows, ROWS), pack)
        first = tile.q_start + position_of(tile.row, pack)
        copy_window(
            target.atom,
            window(target.coordinates, first, positions, (head,)),
            smem,
            None,
        )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if thread % 4 == 0:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = first_row(thread) + 8 * r
            if row < tile.rows:
                if cutlass.const_expr(pack > 1):
                    position = position_of(tile.row + row, pack)
                    lse[head * pack + row % pack, tile.q_start + position] = row_lse[r]
                else:
                    lse[head, tile.q_start + tile.row + row] = row_lse[r]
