"""mbarriers, named barriers, deadlocks: what completes, what is refused, what the report names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

INIT = """
 mov.u32 %r0, %laneid; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r9, smem;
 setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r9], {count};
 fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = """
{label}: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], {parity}; @%p9 bra {label}_DONE;
 bra {label};
{label}_DONE:
"""


@pytest.mark.parametrize("seed", range(6))
def test_message_through_shared_memory(seed: int, kernel: Callable[..., Any]) -> None:
    """Warp 0 writes and arrives with 32 lanes, warp 1 waits and reads."""
    out = np.zeros(32, np.uint32)
    body = (
        INIT.format(count=32)
        + """ setp.eq.u32 %p2, %r2, 0; @!%p2 bra READ;
 mad.lo.u32 %r8, %r0, 4, %r9; st.shared.b32 [%r8+64], %r0;
 mbarrier.arrive.shared.b64 _, [%r9]; bra OUT;
READ:
"""
        + WAIT.format(label="W", parity=0)
        + """ mad.lo.u32 %r8, %r0, 4, %r9; ld.shared.b32 %r5, [%r8+64];
 mad.wide.u32 %q5, %r0, 4, %q0; st.global.b32 [%q5], %r5;
OUT:"""
    )
    done = kernel(body, {"out": out}, threads=64).run(seed)
    assert done.clean, done.describe()
    assert out.tolist() == list(range(32))


def test_too_many_arrivals(kernel: Callable[..., Any]) -> None:
    body = INIT.format(count=5) + " @%p1 mbarrier.arrive.shared.b64 _, [%r9], 6;"
    done = kernel(body, {}).run()
    assert "got 1 arrivals more than its count 5" in (done.error or "")


def test_deadlock_names_warp_barrier_and_line(kernel: Callable[..., Any]) -> None:
    body = INIT.format(count=2) + " @%p1 mbarrier.arrive.shared.b64 _, [%r9];\n"
    done = kernel(body + WAIT.format(label="W", parity=0), {}, threads=64).run()
    error = done.error or ""
    assert "deadlock" in error
    assert "warp 1 (any) waits for shared+0 (phase 0, 1 of 2 arrivals missing" in error
    assert "at ptx:" in error


def test_expected_bytes_hold_a_phase(kernel: Callable[..., Any]) -> None:
    body = INIT.format(count=1) + " @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 128;\n"
    done = kernel(body + WAIT.format(label="W", parity=0), {}).run()
    assert "128 bytes missing" in (done.error or "")


def test_a_waiter_that_is_overtaken_is_reported(kernel: Callable[..., Any]) -> None:
    """Warp 1 waits for phase 0 but does not hold up phase 1: its parity comes and goes."""
    body = (
        INIT.format(count=1)
        + " setp.eq.u32 %p2, %r2, 0; @%p2 bra TWICE;\n"
        + WAIT.format(label="W", parity=0)
        + """ bra OUT;
TWICE:
 @%p1 mbarrier.arrive.shared.b64 _, [%r9]; @%p1 mbarrier.arrive.shared.b64 _, [%r9];
OUT:"""
    )
    errors = [kernel(body, {}, threads=64).run(seed).error or "" for seed in range(20)]
    assert any("came and went" in e for e in errors)


def test_unmade_barrier(kernel: Callable[..., Any]) -> None:
    body = " mov.b32 %r9, smem; mbarrier.arrive.shared.b64 _, [%r9];"
    assert "no mbarrier was initialised at shared+0" in (kernel(body, {}).run().error or "")


@pytest.mark.parametrize(
    ("name", "voters", "want"),
    [("or", 0, 0), ("or", 1, 1), ("and", 63, 0), ("and", 64, 1)],
)
@pytest.mark.parametrize("prefix", ["bar", "barrier.cta"])
def test_barrier_with_a_vote(
    prefix: str, name: str, voters: int, want: int, kernel: Callable[..., Any]
) -> None:
    out = np.full(64, 9, np.uint32)
    aligned = ".aligned" if prefix != "bar" else ""
    body = f""" mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, {voters};
 {prefix}.red.{name}{aligned}.pred %p2, 3, 64, %p1; selp.b32 %r2, 1, 0, %p2;
 mad.wide.u32 %q5, %r1, 4, %q0; st.global.b32 [%q5], %r2;"""
    for seed in range(3):
        done = kernel(body, {"out": out}, threads=64).run(seed)
        assert done.clean, done.describe()
        assert set(out.tolist()) == {want}


def test_barrier_that_counts(kernel: Callable[..., Any]) -> None:
    out = np.zeros(64, np.uint32)
    body = """ mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 37;
 barrier.cta.red.popc.aligned.u32 %r2, 3, 64, !%p1;
 mad.wide.u32 %q5, %r1, 4, %q0; st.global.b32 [%q5], %r2;"""
    assert kernel(body, {"out": out}, threads=64).run().clean
    assert set(out.tolist()) == {27}


def test_arrive_does_not_wait(kernel: Callable[..., Any]) -> None:
    """Warp 0 arrives and goes on; warp 1 waits for it."""
    out = np.zeros(32, np.uint32)
    body = """ mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r0, %laneid; mov.b32 %r9, smem;
 mad.lo.u32 %r8, %r0, 4, %r9; setp.eq.u32 %p1, %r2, 0; @!%p1 bra READ;
 st.shared.b32 [%r8], %r0; bar.arrive 2, 64; bra OUT;
READ:
 bar.sync 2, 64; ld.shared.b32 %r5, [%r8];
 mad.wide.u32 %q5, %r0, 4, %q0; st.global.b32 [%q5], %r5;
OUT:"""
    for seed in range(4):
        done = kernel(body, {"out": out}, threads=64).run(seed)
        assert done.clean, done.describe()
        assert out.tolist() == list(range(32))


def test_different_counts_at_one_barrier(kernel: Callable[..., Any]) -> None:
    body = """ mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; selp.b32 %r2, 64, 96, %p1;
 bar.sync 1, %r2;"""
    done = kernel(body, {}, threads=96).run()
    assert "is used with" in (done.error or "")


@pytest.mark.parametrize(("sync", "clean"), [("bar.warp.sync -1;", True), ("", False)])
def test_one_lane_arrives_for_its_warp_after_the_others_met(
    sync: str, clean: bool, kernel: Callable[..., Any]
) -> None:
    body = (
        INIT.format(count=1)
        + f""" setp.eq.u32 %p2, %r2, 0; @!%p2 bra OUT;
 mad.lo.u32 %r8, %r0, 4, %r9; st.shared.b32 [%r8+64], %r0; {sync}
 elect.sync %r7|%p3, -1; @%p3 mbarrier.arrive.shared.b64 _, [%r9];
OUT:"""
    )
    done = kernel(body, {}, threads=64).run()
    assert done.clean == clean, done.describe()
    assert clean or "since the last bar.warp.sync" in done.describe()[0]


@pytest.mark.parametrize("bytes_", [0, 128])
def test_bytes_are_expected_without_an_arrival(bytes_: int, kernel: Callable[..., Any]) -> None:
    body = INIT.format(count=1) + (
        f" @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], {bytes_};\n"
        " @%p1 mbarrier.arrive.shared.b64 _, [%r9];\n"
    )
    error = kernel(body + WAIT.format(label="W", parity=0), {}).run().error or ""
    assert ("128 bytes missing" in error) == bool(bytes_)


def test_a_test_of_a_phase_does_not_wait(kernel: Callable[..., Any]) -> None:
    """Before the arrival it is false, after it true; of the phase before, at once."""
    out = np.zeros(3, np.uint32)
    ask = " mbarrier.test_wait.parity.shared.b64 %p{n}, [%r9], {parity};\n"
    body = (
        INIT.format(count=1)
        + ask.format(n=3, parity=0)
        + ask.format(n=4, parity=1)
        + " bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 _, [%r9]; bar.warp.sync -1;\n"
        + ask.format(n=5, parity=0)
        + "".join(
            f" selp.b32 %r{10 + n}, 1, 0, %p{n}; @%p1 st.global.b32 [%q0+{4 * (n - 3)}], "
            f"%r{10 + n};\n"
            for n in (3, 4, 5)
        )
    )
    done = kernel(body, {"out": out}).run()
    assert done.clean, done.describe()
    assert out.tolist() == [0, 1, 1]


def test_an_invalidated_barrier_is_none(kernel: Callable[..., Any]) -> None:
    body = INIT.format(count=1) + " bar.sync 0; @%p1 mbarrier.inval.shared.b64 [%r9]; bar.sync 0;\n"
    assert kernel(body, {}).run().clean
    error = kernel(body + " @%p1 mbarrier.arrive.shared.b64 _, [%r9];", {}).run().error or ""
    assert "shared+0" in error
