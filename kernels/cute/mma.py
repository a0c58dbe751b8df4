"""Asynchronous warpgroup matrix products: issue, one commit group each."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

K_MAJOR = cute.nvgpu.OperandMajorMode.K
MN_MAJOR = cute.nvgpu.OperandMajorMode.MN


def warpgroup_mma(dtype, columns: int, b_major, a_in_registers: bool) -> cute.TiledMma:
    """64 x columns, float32 accumulators."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, columns, 16), source, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: cutlass.Constexpr[bool],
    part: cutlass.Constexpr[tuple[int, int] | None] = None,
) -> None:
    """acc (+)= a @ b.T over all k steps of the fragments a and b, or a part: the first of them and
    how many; wait_group waits for it."""
    warpgroup.fence()
    # A new atom: its accumulate field changes below.
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    first, count = (0, cute.size(a, mode=[2])) if part is None else part
    for k in cutlass.range_constexpr(first, first + count):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
