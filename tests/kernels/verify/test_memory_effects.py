"""Loads, stores, atomics and cp.async, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blasst.kernels.verify.errors import UnknownOpcodeError, VerifyError

LANE = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_size_through_shared_memory(size: int, kernel: Callable[..., Any]) -> None:
    given = np.arange(32).astype(f"u{size}") * 3
    out = np.zeros_like(given)
    register = {1: "%h1", 2: "%h1", 4: "%r5", 8: "%q6"}[size]
    body = f"""
 mov.u32 %r0, %laneid; mov.b32 %r9, smem; mad.lo.u32 %r8, %r0, {size}, %r9;
 mad.wide.u32 %q5, %r0, {size}, %q0; ld.global.b{8 * size} {register}, [%q5];
 st.shared.b{8 * size} [%r8+64], {register}; bar.warp.sync -1;
 xor.b32 %r7, %r8, {size}; ld.shared.b{8 * size} {register}, [%r7+64];
 mad.wide.u32 %q5, %r0, {size}, %q1; st.global.b{8 * size} [%q5], {register};"""
    done = kernel(body, {"given": given, "out": out}).run()
    assert done.clean, done.describe()
    assert out.tolist() == given[LANE ^ 1].tolist()


def test_signed_bytes_are_widened(kernel: Callable[..., Any]) -> None:
    given, out = np.full(32, 0xFE, np.uint8), np.zeros(32, np.uint16)
    body = """ mov.u32 %r0, %laneid; mad.wide.u32 %q5, %r0, 1, %q0; ld.global.s8 %h1, [%q5];
 mad.wide.u32 %q5, %r0, 2, %q1; st.global.b16 [%q5], %h1;"""
    assert kernel(body, {"given": given, "out": out}).run().clean
    assert set(out.tolist()) == {0xFFFE}


@pytest.mark.parametrize(
    ("name", "start", "want"),
    [
        ("add.u32", 10, 10 + 496), ("max.u32", 7, 31), ("min.s32", 7, 0), ("or.b32", 32, 63),
        ("and.b32", 31, 0), ("xor.b32", 1, 1), ("inc.u32", 0, 5), ("exch.b32", 9, 31),
    ],
)  # fmt: skip
def test_atomics(name: str, start: int, want: int, kernel: Callable[..., Any]) -> None:
    cell = np.array([start], np.uint32)
    operand = "%r0" if not name.startswith("inc") else "%r1"
    body = f" mov.u32 %r0, %laneid; mov.u32 %r1, 8; atom.global.{name} %r2, [%q0], {operand};"
    done = kernel(body, {"cell": cell}).run()
    assert done.clean, done.describe()
    assert int(cell[0]) == want


def test_float_and_64_bit_and_compare(kernel: Callable[..., Any]) -> None:
    number, wide, cell = np.zeros(1, np.float32), np.zeros(1, np.int64), np.zeros(1, np.uint32)
    body = """ mov.u32 %r0, %laneid; cvt.rn.f32.u32 %r1, %r0; red.global.add.f32 [%q0], %r1;
 cvt.u64.u32 %q5, %r0; red.global.add.u64 [%q1], %q5;
 atom.global.cas.b32 %r2, [%q2], %r0, 77;"""
    done = kernel(body, {"number": number, "wide": wide, "cell": cell}).run()
    assert done.clean, done.describe()
    assert (float(number[0]), int(wide[0]), int(cell[0])) == (496.0, 496, 77)


@pytest.mark.parametrize("seed", range(4))
def test_lane_copies_arrive_with_their_group(seed: int, kernel: Callable[..., Any]) -> None:
    """The second copy brings 8 of 16 bytes: zeros behind them."""
    given, out = np.arange(128, dtype=np.uint32) + 1, np.zeros(128, np.uint32)
    body = """
 mov.u32 %r0, %laneid; mov.b32 %r9, smem; mad.lo.u32 %r8, %r0, 16, %r9;
 mad.wide.u32 %q5, %r0, 16, %q0;
 setp.lt.u32 %p1, %r0, 16; selp.b32 %r7, 16, 8, %p1;
 cp.async.cg.shared.global [%r8], [%q5], 16, %r7;
 cp.async.commit_group; cp.async.wait_group 0;
 ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r8];
 mad.wide.u32 %q5, %r0, 16, %q1; st.global.v4.b32 [%q5], {%r1, %r2, %r3, %r4};"""
    done = kernel(body, {"given": given, "out": out}).run(seed)
    assert done.clean, done.describe()
    want = given.reshape(32, 4).copy()
    want[16:, 2:] = 0
    assert np.array_equal(out.reshape(32, 4), want)


def test_reading_beyond_a_buffer_names_it(kernel: Callable[..., Any]) -> None:
    body = " mov.u32 %r0, %laneid; mad.wide.u32 %q5, %r0, 4, %q0; ld.global.b32 %r1, [%q5+4];"
    done = kernel(body, {"given": np.zeros(32, np.uint32)}).run()
    assert "into buffer given of 128 bytes" in (done.error or "")


def test_writing_to_an_input_is_an_error(kernel: Callable[..., Any]) -> None:
    body = " st.global.b32 [%q0], 0;"
    done = kernel(body, {"given": np.zeros(1, np.uint32)}, read_only=("given",)).run()
    assert "writes to the input given" in (done.error or "")


def test_misaligned_access_is_an_error(kernel: Callable[..., Any]) -> None:
    done = kernel(" ld.global.b32 %r1, [%q0+2];", {"given": np.zeros(4, np.uint32)}).run()
    assert "not a multiple of 4" in (done.error or "")


def test_shared_memory_ends(kernel: Callable[..., Any]) -> None:
    done = kernel(" mov.b32 %r9, smem; st.shared.b32 [%r9+4096], %r9;", {}).run()
    assert "outside the block's" in (done.error or "")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (" frobnicate.u32 %r1, %r2;", "frobnicate.u32"),
        (" ld.acquire.gpu.global.b32 %r1, [%q0];", "acquire"),
        (" mbarrier.arrive.shared::cluster.b64 _, [%r1];", "shared::cluster"),
        (" barrier.cluster.arrive;", "clusters are not supported"),
        (" mapa.u32 %r1, %r2, 0;", "clusters are not supported"),
        (" tcgen05.mma.cta_group::2.kind::f16 [%r1], %q1, %q2, %r2, %p1;", "cta_group::2"),
        (" add.frob.f32 %r1, %r2, %r3;", "add.frob.f32"),
        (" mov.u32 %r1, %globaltimer_lo;", "%globaltimer_lo"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(
    line: str, named: str, kernel: Callable[..., Any]
) -> None:
    with pytest.raises(UnknownOpcodeError, match=named):
        kernel(line, {"given": np.zeros(1, np.uint32)}).run()


def test_undeclared_names_are_errors(kernel: Callable[..., Any]) -> None:
    with pytest.raises(VerifyError, match="neither declared nor a literal"):
        kernel(" add.u32 %r1, %r2, bogus;", {}).run()
