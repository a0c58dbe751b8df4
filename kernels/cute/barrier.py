"""An mbarrier: a wait that keeps the compiler from moving work in front of it, a look."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_WAIT = """{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared.b64 done, [$1], $2, 10000000;
@!done bra.uni again;
selp.f32 $0, $3, 0f7FC00000, done;
}"""


@dsl_user_op
def wait_with(
    barrier: cute.Pointer, parity: Int32, value: Float32, *, loc=None, ip=None
) -> Float32:
    """Waits for the phase; returns `value`, in a way that seems to depend on the wait."""
    operands = [
        barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(parity).ir_value(loc=loc, ip=ip),
        Float32(value).ir_value(loc=loc, ip=ip),
    ]
    result = llvm.inline_asm(
        Float32.mlir_type,
        operands,
        _WAIT,
        "=f,r,r,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Float32(result)


_LOOK = """{
.reg .pred done;
mbarrier.test_wait.parity.shared.b64 done, [$1], $2;
selp.s32 $0, 1, 0, done;
}"""


@dsl_user_op
def is_complete(barrier: cute.Pointer, parity: Int32, *, loc=None, ip=None) -> Boolean:
    """Whether the phase of this parity is over; does not wait."""
    result = llvm.inline_asm(
        Int32.mlir_type,
        [
            barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Int32(parity).ir_value(loc=loc, ip=ip),
        ],
        _LOOK,
        "=r,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(result) != 0
