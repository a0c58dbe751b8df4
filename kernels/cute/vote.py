"""The unanimous vote of a group of threads, in one barrier."""

from cutlass import Boolean, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def any_thread(veto: Boolean, barrier_id, threads: int, *, loc=None, ip=None) -> Boolean:
    """Whether any of `threads` threads vetoes; all of them meet at the named barrier."""
    result = Int32(
        nvvm.barrier_cta_red(
            Boolean(veto).ir_value(loc=loc, ip=ip),
            Int32(barrier_id).ir_value(loc=loc, ip=ip),
            nvvm.BarrierReduxKind.OR,
            thread_count=Int32(threads).ir_value(loc=loc, ip=ip),
            aligned=True,
            results=[T.i32()],
            loc=loc,
            ip=ip,
        )
    )
    return result != 0
