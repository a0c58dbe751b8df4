"""Clock reads of warps, kept by visit and step; a Trace without a buffer compiles to nothing."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from blasst.kernels.instruments.steps import STEPS as STEPS
from blasst.kernels.instruments.steps import Step as Step


@dataclass(frozen=True)
class Trace:
    """base: address of the warp's part of the buffer, int64 [visits, STEPS]; None = no trace.

    visits: how many there is room for. writes: this thread is the one that writes.
    """

    base: Int64 | None = None
    visits: Int32 | None = None
    writes: Boolean | None = None

    @cute.jit
    def mark(self, step: cutlass.Constexpr[Step], visit: Int32) -> None:
        """`step` of `visit` ends here."""
        if cutlass.const_expr(self.base is not None):
            address = self.base + 8 * Int64(visit * STEPS + int(step))
            store_clock(Int32(self.writes & (visit < self.visits)), address)


NO_TRACE = Trace()


@cute.jit
def start_trace(buffer: Any, warp: Int32) -> Trace:
    """buffer: int64 [1 + warps, visits, STEPS], its first row names the thread block to record;
    None = no trace."""
    if cutlass.const_expr(buffer is None):
        return NO_TRACE
    here = Boolean(True)
    for axis, index in enumerate(cute.arch.block_idx()):
        here = here & (buffer[0, 0, axis] == Int64(index))
    place = cute.domain_offset((1 + warp, 0, 0), buffer)
    trace = Trace(place.iterator.toint(), buffer.shape[1], here & (cute.arch.lane_idx() == 0))
    trace.mark(Step.START, Int32(0))
    return trace


@dsl_user_op
def store_clock(writes: Int32, address: Int64, *, loc=None, ip=None) -> None:
    """Predicated, without a branch: one between two matrix products would serialise them."""
    llvm.inline_asm(
        None,
        [Int32(writes).ir_value(loc=loc, ip=ip), Int64(address).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred p; .reg .u64 t; setp.ne.b32 p, $0, 0; mov.u64 t, %clock64; "
        "@p st.global.u64 [$1], t; }",
        "r,l,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
