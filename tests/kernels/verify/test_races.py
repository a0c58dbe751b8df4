"""The race detector on hand-made races, and that order removes each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

HEAD = """ mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r9, smem; setp.eq.u32 %p1, %r2, 0;
 @!%p1 bra SECOND;
"""
WRITE, READ = " st.shared.b32 [%r9], %r2;", " ld.shared.b32 %r3, [%r9];"
SYNC = " bar.sync 1, 64;"


def two_warps(kernel: Callable[..., Any], first: str, second: str, seed: int = 0) -> Any:
    body = f"{HEAD}{first} bra OUT;\nSECOND:\n{second}\nOUT:"
    return kernel(body, {}, threads=64).run(seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("first", "second"), [(WRITE, READ), (READ, WRITE), (WRITE, WRITE)])
def test_unordered_accesses_race_in_every_schedule(
    first: str, second: str, seed: int, kernel: Callable[..., Any]
) -> None:
    found = two_warps(kernel, first, second, seed).describe()
    assert any(line.startswith("race: warp") for line in found), found


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_between_them_orders_them(seed: int, kernel: Callable[..., Any]) -> None:
    assert two_warps(kernel, WRITE + SYNC, SYNC + READ, seed).clean


def test_a_barrier_after_them_does_not(kernel: Callable[..., Any]) -> None:
    assert not two_warps(kernel, WRITE + SYNC, READ + SYNC).clean


def test_bytes_next_to_each_other_do_not_race(kernel: Callable[..., Any]) -> None:
    first, second = " st.shared.b8 [%r9], %h1;", " st.shared.b8 [%r9+1], %h1;"
    assert two_warps(kernel, first, second).clean
    assert not two_warps(kernel, first, first).clean
    assert not two_warps(kernel, first, READ).clean


def test_blocks_are_not_ordered(kernel: Callable[..., Any]) -> None:
    cell = np.zeros(4, np.uint32)
    plain = " st.global.b32 [%q0], 1;"
    found = kernel(plain, {"cell": cell}, grid=(2, 1, 1)).run().describe()
    assert any("block number" in line for line in found)
    atomic = " mov.u32 %r1, 1; red.global.add.u32 [%q0], %r1;"
    assert kernel(atomic, {"cell": cell}, grid=(2, 1, 1)).run().clean
    assert int(cell[0]) == 1 + 64
    own = " mov.u32 %r1, %ctaid.x; mad.wide.u32 %q5, %r1, 4, %q0; st.global.b32 [%q5], %r1;"
    assert kernel(own, {"cell": cell}, grid=(4, 1, 1)).run().clean
    assert cell.tolist() == [0, 1, 2, 3]


def test_barrier_used_before_its_initialisation_is_known(kernel: Callable[..., Any]) -> None:
    """Warp 1 uses it without a barrier in between: right in some schedules, an error in others."""
    body = """ mov.u32 %r1, %tid.x; mov.b32 %r9, smem; setp.eq.u32 %p1, %r1, 0;
 @%p1 mbarrier.init.shared.b64 [%r9], 64; mbarrier.arrive.shared.b64 _, [%r9];"""
    runs = [kernel(body, {}, threads=64).run(seed) for seed in range(8)]
    assert not any(run.clean for run in runs)
    found = " ".join(line for run in runs for line in run.describe())
    assert "used without an order after its initialisation" in found


def test_same_seed_same_run(kernel: Callable[..., Any]) -> None:
    runs = [two_warps(kernel, WRITE, READ, 3) for _ in range(2)]
    assert runs[0].describe() == runs[1].describe()
    assert runs[0].steps == runs[1].steps
