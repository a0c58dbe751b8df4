"""Tensor memory, one row a thread: thread t of a warpgroup reads and writes lane t.

Addresses count 32-bit columns; the lane is in the upper half. Every function is called by a whole
warp, which reaches only the 32 lanes of its place in the warpgroup.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

COLUMNS = 512
LANE = 1 << 16
WARP = 32

wait_loads = cute.arch.fence_view_async_tmem_load
wait_stores = cute.arch.fence_view_async_tmem_store


def own_lanes(base: Int32) -> Int32:
    """The address of this warp's lanes in an allocation at `base`."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return base + warp % 4 * (WARP * LANE)


@dsl_user_op
def _pointer(address: Int32, *, loc=None, ip=None) -> ir.Value:
    space = llvm.PointerType.get(int(cute.AddressSpace.tmem))
    return llvm.inttoptr(space, Int32(address).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def load(target: cute.Tensor, address: Int32, *, loc=None, ip=None) -> None:
    """Starts to read a row of float32 into a register tensor; wait_loads() before its use."""
    columns = cute.size(target)
    values = nvvm.tcgen05_ld(
        ir.VectorType.get([columns], Int32.mlir_type),
        nvvm.Tcgen05LdStShape.SHAPE_32X32B,
        _pointer(address, loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )
    words = cute.recast_tensor(target, Int32)
    words.store(cute.TensorSSA(values, (columns,), Int32))


@dsl_user_op
def store(address: Int32, source: cute.Tensor, *, loc=None, ip=None) -> None:
    """Starts to write a register tensor of 32-bit words; wait_stores() before others read it."""
    words = cute.recast_tensor(source, Int32)
    nvvm.tcgen05_st(
        nvvm.Tcgen05LdStShape.SHAPE_32X32B,
        _pointer(address, loc=loc, ip=ip),
        words.load().ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fence_before_sync(*, loc=None, ip=None) -> None:
    """Orders finished reads and writes of this thread before the barrier it arrives at next."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_sync(*, loc=None, ip=None) -> None:
    """Orders the next reads, writes and products after the barrier that was waited for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def max3(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """The largest of three, in one instruction."""
    values = (Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c))
    a, b, c = values
    return Float32(nvvm.fmax(a, b, c=c, loc=loc, ip=ip))
