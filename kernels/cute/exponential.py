"""exp2 on the multiply-add units, for a part of the numbers: the special units are few."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

MANTISSA_BITS = 23
SHIFT = 1.5 * 2.0**MANTISSA_BITS  # added, it leaves the whole part in the lowest bits
SMALLEST = -127.0  # its result has the bits of 0
# 2**f for 0 <= f < 1 within 2.9e-6 of its value, 1 at 0: least maximum of the relative error.
POLYNOMIAL = (1.0, 0.6930448412895203, 0.2412802129983902, 0.0522424466907978, 0.0134267006069422)


@cute.jit
def exp2_pair(x: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
    """exp2 of two numbers below 128; 0 below -127, and a NaN leads to no ordinary result."""
    x = (cute.arch.fmax(x[0], SMALLEST, nan=True), cute.arch.fmax(x[1], SMALLEST, nan=True))
    shift = (Float32(SHIFT), Float32(SHIFT))
    whole = cute.arch.add_packed_f32x2(x, shift, rnd="rm")
    fraction = cute.arch.sub_packed_f32x2(x, cute.arch.sub_packed_f32x2(whole, shift))
    value = (Float32(POLYNOMIAL[-1]), Float32(POLYNOMIAL[-1]))
    for c in POLYNOMIAL[-2::-1]:
        value = cute.arch.fma_packed_f32x2(value, fraction, (Float32(c), Float32(c)))
    return _raised(value[0], whole[0]), _raised(value[1], whole[1])


@dsl_user_op
def _raised(value: Float32, whole: Float32, *, loc=None, ip=None) -> Float32:
    """value * 2**(whole - SHIFT), by adding to the bits of the exponent."""
    bits, power = (
        Int32(llvm.bitcast(Int32.mlir_type, v.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
        for v in (value, whole)
    )
    total = bits + (power << MANTISSA_BITS)
    raw = total.ir_value(loc=loc, ip=ip)
    return Float32(llvm.bitcast(Float32.mlir_type, raw, loc=loc, ip=ip))
