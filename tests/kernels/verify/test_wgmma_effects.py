"""wgmma against numpy: both sources of A, and its rules about registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from blasst.kernels.verify.tensor_map import swizzled

N = 32
BEGIN = """
 mov.u32 %r1, %tid.x; mov.u32 %r0, %laneid; mov.b32 %r9, smem; mov.u32 %r20, %r1;
FILL: mad.wide.u32 %q5, %r20, 16, %q0; ld.global.v4.b32 {%r21, %r22, %r23, %r24}, [%q5];
 mad.lo.u32 %r25, %r20, 16, %r9; st.shared.v4.b32 [%r25], {%r21, %r22, %r23, %r24};
 add.u32 %r20, %r20, 128; setp.lt.u32 %p4, %r20, 1024; @%p4 bra FILL;
 fence.proxy.async.shared::cta; bar.sync 0;
"""
ISSUE = """
 setp.ne.b32 %p6, {accumulate}, 0; mov.b64 %q3, {a}; mov.b64 %q4, {b};
 wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {d}, {operand}, %q4, %p6, 1, 1, {flags};
"""
FINISH = " wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;\n"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def descriptor(offset: int) -> int:
    return (1024 + offset) >> 4 | 1 << 16 | 1024 >> 4 << 32 | 1 << 62


def tile(matrix: torch.Tensor) -> np.ndarray[Any, Any]:
    raw = matrix.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    out = np.zeros_like(raw)
    out[swizzled(np.arange(0, raw.size * 2, 2), 3) // 2] = raw
    return out


def dump() -> str:
    lines = [" mad.wide.u32 %q5, %r1, 64, %q1;"]
    lines += [f" st.global.b32 [%q5+{4 * i}], %r{100 + i};" for i in range(N // 2)]
    return "\n".join(lines)


def as_matrix(out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[64, N] from the registers of 128 threads, as fragment.py of the kernels states it."""
    matrix = np.zeros((64, N), np.float32)
    for thread in range(128):
        for i in range(N // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            matrix[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = out[thread, i]
    return matrix


def inputs() -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 64, generator=generator).bfloat16()
    b = torch.randn(N, 64, generator=generator).bfloat16()
    stored = np.zeros(8192, np.uint16)
    stored[:4096], stored[4096 : 4096 + 2048] = tile(a), tile(b)
    return a, b, stored


def from_shared() -> str:
    steps = [
        ISSUE.format(
            accumulate=k, a=descriptor(32 * k), b=descriptor(8192 + 32 * k),
            d=registers(100, N // 2), operand="%q3", flags="0, 0",
        )
        for k in range(4)
    ]  # fmt: skip
    return " wgmma.fence.sync.aligned;\n" + "".join(steps)


@pytest.mark.parametrize("seed", range(3))
def test_a_in_shared_memory(seed: int, kernel: Callable[..., Any]) -> None:
    a, b, stored = inputs()
    out = np.zeros((128, N // 2), np.float32)
    body = BEGIN + from_shared() + FINISH + dump()
    k = kernel(body, {"in": stored, "out": out}, threads=128, shared_bytes=16384, target="sm_90a")
    done = k.run(seed)
    assert done.clean, done.describe()
    want = (a.double() @ b.double().T).numpy()
    np.testing.assert_allclose(as_matrix(out), want, rtol=1e-5, atol=1e-4)


def test_a_in_registers(kernel: Callable[..., Any]) -> None:
    """The accumulator's layout, converted to 16 bits, is the operand's layout."""
    a, b, stored = inputs()
    fragments = np.zeros((128, 16), np.uint32)
    raw = a.view(torch.int16).numpy().view(np.uint16)
    for thread in range(128):
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in range(16):
            pair = raw[row + 8 * (i % 2), i // 2 * 8 + column :][:2]
            fragments[thread, i] = int(pair[0]) | int(pair[1]) << 16
    out = np.zeros((128, N // 2), np.float32)
    load = " mad.wide.u32 %q5, %r1, 64, %q2;\n" + "\n".join(
        f" ld.global.b32 %r{200 + i}, [%q5+{4 * i}];" for i in range(16)
    )
    steps = [
        ISSUE.format(
            accumulate=k, a=0, b=descriptor(8192 + 32 * k), d=registers(100, N // 2),
            operand=registers(200 + 4 * k, 4), flags="0",
        )
        for k in range(4)
    ]  # fmt: skip
    body = BEGIN + load + "\n wgmma.fence.sync.aligned;\n" + "".join(steps) + FINISH + dump()
    buffers = {"in": stored, "out": out, "a": fragments}
    options = {"threads": 128, "shared_bytes": 16384, "target": "sm_90a"}
    done = kernel(body, buffers, **options).run()
    assert done.clean, done.describe()
    want = (a.double() @ b.double().T).numpy()
    np.testing.assert_allclose(as_matrix(out), want, rtol=1e-5, atol=1e-4)
    unfenced = body.replace("wgmma.fence.sync.aligned;", "")
    done = kernel(unfenced, buffers, **options).run()
    assert any("without wgmma.fence" in line for line in done.describe())


def test_register_of_an_unfinished_product(kernel: Callable[..., Any]) -> None:
    _, _, stored = inputs()
    out = np.zeros((128, N // 2), np.float32)
    use = " wgmma.commit_group.sync.aligned; add.f32 %r99, %r100, %r100;"
    body = BEGIN + from_shared() + use + " wgmma.wait_group.sync.aligned 0;" + dump()
    k = kernel(body, {"in": stored, "out": out}, threads=128, shared_bytes=16384, target="sm_90a")
    assert any("unfinished wgmma" in line for line in k.run().describe())


def test_overwriting_operands_of_a_product_is_a_race(kernel: Callable[..., Any]) -> None:
    _, _, stored = inputs()
    out = np.zeros((128, N // 2), np.float32)
    spoil = """ wgmma.commit_group.sync.aligned;
 mad.lo.u32 %r25, %r1, 16, %r9; st.shared.b32 [%r25], %r0;"""
    body = BEGIN + from_shared() + spoil + " wgmma.wait_group.sync.aligned 0;" + dump()
    k = kernel(body, {"in": stored, "out": out}, threads=128, shared_bytes=16384, target="sm_90a")
    found = " ".join(k.run(seed=1).describe())
    assert "WAR" in found or "RAW" in found or "PROXY" in found
