"""tcgen05: tensor memory, products against numpy, and what orders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from blasst.kernels.verify.tensor_map import swizzled

COLUMNS = 64
BEGIN = """
 mov.u32 %r0, %laneid; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r9, smem;
 add.u32 %r8, %r9, 40960; add.u32 %r7, %r9, 40976; setp.eq.u32 %p1, %r1, 0;
 @%p1 mbarrier.init.shared.b64 [%r8], 1; fence.mbarrier_init.release.cluster;
 setp.eq.u32 %p2, %r2, 0;
 @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 64;
 bar.sync 0; ld.shared.b32 %r6, [%r7]; shl.b32 %r5, %r2, 21; add.u32 %r5, %r5, %r6;
"""
END = """
 bar.sync 0; @%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
 @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 64;
"""
FILL = """
 mov.u32 %r20, %r1;
FILL: mad.wide.u32 %q5, %r20, 16, %q0; ld.global.v4.b32 {%r21, %r22, %r23, %r24}, [%q5];
 mad.lo.u32 %r25, %r20, 16, %r9; st.shared.v4.b32 [%r25], {%r21, %r22, %r23, %r24};
 add.u32 %r20, %r20, 128; setp.lt.u32 %p4, %r20, 2560; @%p4 bra FILL;
 fence.proxy.async.shared::cta; bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r8], 0; @%p9 bra D; bra W;\nD:\n"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def dump(columns: int) -> str:
    """Each thread writes its row of the first columns of tensor memory to buffer 1."""
    lines = [
        f" tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {registers(100, columns)}, [%r5];",
        " tcgen05.wait::ld.sync.aligned;",
        f" mad.wide.u32 %q5, %r1, {4 * columns}, %q1;",
    ]
    lines += [f" st.global.b32 [%q5+{4 * i}], %r{100 + i};" for i in range(columns)]
    return "\n".join(lines)


def tile(matrix: torch.Tensor) -> np.ndarray[Any, Any]:
    """uint16 of 128-byte rows of 64 columns, swizzled: K-major operands."""
    raw = matrix.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    place = swizzled(np.arange(0, raw.size * 2, 2), 3) // 2
    out = np.zeros_like(raw)
    out[place] = raw
    return out


def smem_descriptor(offset: int, leading: int, stride: int) -> int:
    start = 1024 + offset
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | 2 << 61


def instruction(n: int, bf16: bool, b_transposed: bool = False) -> int:
    kind = 1 if bf16 else 0
    return 1 << 4 | kind << 7 | kind << 10 | b_transposed << 16 | n // 8 << 17 | 128 // 16 << 24


def products(
    n: int, bf16: bool, b_transposed: bool, a_in_tensor: bool = False, extra: int = 0
) -> str:
    """4 steps of 16 over k = 64; b lies 16 KiB behind a."""
    lines = [" @!%p1 bra SKIP;"]
    for step in range(4):
        a = smem_descriptor(32 * step, 0, 1024)
        b = smem_descriptor(16384 + (2048 * step if b_transposed else 32 * step), 8192, 1024)
        operand = "%q3"
        lines.append(f" mov.b64 %q3, {a}; mov.b64 %q4, {b};")
        if a_in_tensor:
            lines.append(f" add.u32 %r30, %r6, {32 + 8 * step};")
            operand = "[%r30]"
        lines.append(f" setp.ne.b32 %p6, {step + extra}, 0;")
        code = instruction(n, bf16, b_transposed)
        lines.append(f" tcgen05.mma.cta_group::1.kind::f16 [%r6], {operand}, %q4, {code}, %p6;")
    lines.append(
        " tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];\nSKIP:\n"
    )
    return "\n".join(lines)


def operands(dtype: torch.dtype, n: int, b_transposed: bool) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(128, 64, generator=generator).to(dtype)
    b = torch.randn(n, 64, generator=generator).to(dtype)
    stored = np.zeros(20480, np.uint16)
    stored[:8192] = tile(a)
    given = tile(b.t().contiguous() if b_transposed else b)
    stored[8192 : 8192 + given.size] = given
    return a.double(), b.double(), stored


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("dtype", "n", "b_transposed"),
    [(torch.bfloat16, 32, False), (torch.float16, 32, False), (torch.bfloat16, 64, True)],
)
def test_product_of_shared_operands(
    dtype: torch.dtype, n: int, b_transposed: bool, seed: int, kernel: Callable[..., Any]
) -> None:
    a, b, stored = operands(dtype, n, b_transposed)
    out = np.zeros((128, 32), np.float32)
    body = BEGIN + FILL + products(n, dtype == torch.bfloat16, b_transposed) + WAIT + dump(32) + END
    k = kernel(body, {"in": stored, "out": out}, threads=128, shared_bytes=45056)
    done = k.run(seed)
    assert done.clean, done.describe()
    np.testing.assert_allclose(out, (a @ b.T).numpy()[:, :32], rtol=1e-5, atol=1e-4)


def test_product_with_a_in_tensor_memory(kernel: Callable[..., Any]) -> None:
    """A as P is: 16-bit pairs in columns 32 to 64, stored by the warps."""
    a, b, stored = operands(torch.bfloat16, 32, False)
    pairs = a.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32).reshape(128, 32).copy()
    out = np.zeros((128, 32), np.float32)
    load = " mad.wide.u32 %q5, %r1, 128, %q2;\n" + "\n".join(
        f" ld.global.b32 %r{100 + i}, [%q5+{4 * i}];" for i in range(32)
    )
    put = f"""
 add.u32 %r31, %r5, 32;
 tcgen05.st.sync.aligned.32x32b.x32.b32 [%r31], {registers(100, 32)};
 tcgen05.wait::st.sync.aligned; bar.sync 0;
"""
    body = BEGIN + FILL + load + put + products(32, True, False, a_in_tensor=True)
    body += WAIT + dump(32) + END
    buffers = {"in": stored, "out": out, "p": pairs}
    done = kernel(body, buffers, threads=128, shared_bytes=45056).run()
    assert done.clean, done.describe()
    np.testing.assert_allclose(out, (a @ b.T).numpy(), rtol=1e-5, atol=1e-4)
    forgotten = body.replace("tcgen05.wait::st.sync.aligned;", "")
    done = kernel(forgotten, buffers, threads=128, shared_bytes=45056).run()
    assert any("RAW" in line and "tcgen05.st" in line for line in done.describe())


def test_reading_before_the_commit_is_a_race(kernel: Callable[..., Any]) -> None:
    _, _, stored = operands(torch.bfloat16, 32, False)
    out = np.zeros((128, 32), np.float32)
    body = BEGIN + FILL + products(32, True, False) + dump(32) + WAIT + END
    done = kernel(body, {"in": stored, "out": out}, threads=128, shared_bytes=45056).run()
    found = " ".join(done.describe())
    assert "RAW: reads TMEM columns [0, 32)" in found or "WAR: writes TMEM" in found


def test_forgotten_dealloc(kernel: Callable[..., Any]) -> None:
    done = kernel(BEGIN, {}, threads=128, shared_bytes=45056).run()
    assert any("TMEM is still allocated" in line for line in done.describe())


def test_columns_that_are_not_allocated(kernel: Callable[..., Any]) -> None:
    body = BEGIN + " add.u32 %r5, %r5, 60;" + dump(8).replace("%q1", "%q0") + END
    out = np.zeros((128, 8), np.float32)
    done = kernel(body, {"out": out}, threads=128, shared_bytes=45056).run()
    assert "TMEM columns [60, 68) are not allocated" in (done.error or "")


def test_lanes_of_another_warp(kernel: Callable[..., Any]) -> None:
    body = BEGIN + " xor.b32 %r5, %r5, 0x400000;" + dump(8).replace("%q1", "%q0") + END
    out = np.zeros((128, 8), np.float32)
    done = kernel(body, {"out": out}, threads=128, shared_bytes=45056).run()
    assert "this warp reaches lanes" in (done.error or "")


COPIES = """
 mov.b64 %q6, {{%r100, %r101}}; mov.b64 {{%r120, %r121}}, %q6; {before}
 mov.b32 %r122, %r120; tcgen05.wait::ld.sync.aligned; {after}
"""
USE = "add.u32 %r123, %r122, 1;"


@pytest.mark.parametrize(
    ("before", "after", "scoreboard", "clean"),
    [
        ("", USE, False, True),
        (USE.replace("%r122", "%r121"), "", False, False),
        (USE.replace("%r122", "%r121"), "", True, True),
        ("mov.b32 %r121, 7; " + USE.replace("%r122", "%r121"), "", False, True),
    ],
    ids=["copied", "used", "used, as the scoreboard allows", "overwritten"],
)
def test_registers_of_a_load_are_there_after_its_wait(
    before: str, after: str, scoreboard: bool, clean: bool, kernel: Callable[..., Any]
) -> None:
    """Copies of copies too, through both halves of a 64-bit register."""
    load = f" tcgen05.ld.sync.aligned.32x32b.x2.b32 {registers(100, 2)}, [%r5];"
    body = BEGIN + load + COPIES.format(before=before, after=after) + END
    done = kernel(body, {}, threads=128, shared_bytes=45056, scoreboard=scoreboard).run()
    assert done.error is None
    assert done.clean == clean, done.describe()
    assert clean or "is used before tcgen05.wait::ld" in done.describe()[0]
