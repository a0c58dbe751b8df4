"""Runs hand-written PTX on the current GPU, through the driver: the other side of a comparison."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from blasst.kernels.verify.errors import ToolError

THREADS = 256
UNARY = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 source, .param .u64 target, .param .u32 count)
{{
 .reg .pred %p<2>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %q<8>;
 ld.param.u64 %q0, [source];
 ld.param.u64 %q1, [target];
 ld.param.u32 %r0, [count];
 mov.u32 %r1, %ctaid.x;
 mov.u32 %r2, %tid.x;
 mad.lo.u32 %r3, %r1, {threads}, %r2;
 setp.ge.u32 %p0, %r3, %r0;
 @%p0 ret;
 mul.wide.u32 %q2, %r3, 4;
 add.u64 %q3, %q0, %q2;
 add.u64 %q4, %q1, %q2;
 ld.global.f32 %f0, [%q3];
 {opcode} %f1, %f0;
 st.global.f32 [%q4], %f1;
 ret;
}}
"""


def unary(opcode: str, values: torch.Tensor) -> torch.Tensor:
    """A float32 instruction of one source on every value; both on the CPU. Raises ToolError."""
    source = values.float().cuda().contiguous()
    target = torch.empty_like(source)
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    text = UNARY.format(threads=THREADS, opcode=opcode).encode() + b"\0"
    _do(driver.cuModuleLoadData(ctypes.byref(module), text), f"loading PTX with {opcode}")
    _do(driver.cuModuleGetFunction(ctypes.byref(function), module, b"kernel"), "the kernel")
    arguments: list[Any] = [
        ctypes.c_uint64(source.data_ptr()),
        ctypes.c_uint64(target.data_ptr()),
        ctypes.c_uint32(source.numel()),
    ]
    pointers = (ctypes.c_void_p * len(arguments))(
        *(ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in arguments)
    )
    blocks = (source.numel() + THREADS - 1) // THREADS
    torch.cuda.synchronize()
    sizes = [ctypes.c_uint(n) for n in (blocks, 1, 1, THREADS, 1, 1, 0)]
    _do(driver.cuLaunchKernel(function, *sizes, None, pointers, None), f"launching {opcode}")
    torch.cuda.synchronize()
    return target.cpu()


def _do(status: int, what: str) -> None:
    if status:
        raise ToolError(f"{what}: the CUDA driver answers {status}")
