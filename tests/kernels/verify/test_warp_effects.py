"""Lanes that work together, and lanes that part and meet again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

LANE = np.arange(32, dtype=np.uint32)
STORE = " mad.wide.u32 %q5, %r0, 4, %q0; st.global.u32 [%q5], %r1;"


@pytest.fixture
def lanes(kernel: Callable[..., Any]) -> Callable[[str], list[int]]:
    """Runs PTX that turns %r0 (the lane) into %r1."""

    def run(body: str) -> list[int]:
        out = np.zeros(32, np.uint32)
        done = kernel(f" mov.u32 %r0, %laneid;\n{body}\n{STORE}", {"out": out}).run(seed=5)
        assert done.clean, done.describe()
        return [int(v) for v in out]

    return run


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "want"),
    [
        ("idx", 7, 31, np.full(32, 7)),
        ("bfly", 2, 31, LANE ^ 2),
        ("down", 3, 31, np.where(LANE + 3 < 32, LANE + 3, LANE)),
        ("up", 3, 0, np.where(LANE >= 3, LANE - 3, LANE)),
        ("idx", 1, (24 << 8) | 31, (LANE & 24) | 1),
        ("bfly", 1, (28 << 8) | 31, LANE ^ 1),
    ],
)
def test_shuffle(
    mode: str, by: int, clamp: int, want: Any, lanes: Callable[[str], list[int]]
) -> None:
    assert lanes(f" shfl.sync.{mode}.b32 %r1, %r0, {by}, {clamp}, -1;") == want.tolist()


def test_vote_ballot_and_votes(lanes: Callable[[str], list[int]]) -> None:
    test = " setp.lt.u32 %p1, %r0, 5; "
    assert set(lanes(test + "vote.sync.ballot.b32 %r1, %p1, -1;")) == {31}
    for mode, want in (("any", 1), ("all", 0), ("uni", 0)):
        body = f"{test} vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;"
        assert set(lanes(body)) == {want}, mode


@pytest.mark.parametrize(
    ("name", "want"), [("add.u32", 496), ("max.s32", 31), ("min.u32", 0), ("or.b32", 31)]
)
def test_reduction(name: str, want: int, lanes: Callable[[str], list[int]]) -> None:
    assert set(lanes(f" redux.sync.{name} %r1, %r0, -1;")) == {want}


def test_elect_picks_one_lane(lanes: Callable[[str], list[int]]) -> None:
    got = lanes(" elect.sync %r2|%p1, -1; selp.b32 %r1, 1, 0, %p1;")
    assert sum(got) == 1


def test_match_and_active_mask(lanes: Callable[[str], list[int]]) -> None:
    got = lanes(" and.b32 %r2, %r0, 3; match.any.sync.b32 %r1, %r2, -1;")
    assert got[0] == int("0x11111111", 16)
    assert set(lanes(" activemask.b32 %r1;")) == {0xFFFFFFFF}


def test_branches_part_and_meet(lanes: Callable[[str], list[int]]) -> None:
    """A loop of different length in each lane, then a shuffle that needs all lanes."""
    body = """
 mov.u32 %r1, 0; mov.u32 %r2, 0;
LOOP:
 setp.ge.u32 %p1, %r2, %r0; @%p1 bra DONE;
 add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra LOOP;
DONE:
 shfl.sync.idx.b32 %r1, %r1, %r0, 31, -1;"""
    assert lanes(body) == [lane * (lane - 1) // 2 for lane in range(32)]


def test_lanes_that_leave_early(kernel: Callable[..., Any]) -> None:
    out = np.zeros(32, np.uint32)
    body = f""" mov.u32 %r0, %laneid; setp.ge.u32 %p1, %r0, 16; @%p1 ret;
 add.u32 %r1, %r0, 1; {STORE}"""
    assert kernel(body, {"out": out}).run().clean
    assert out.tolist() == [lane + 1 if lane < 16 else 0 for lane in range(32)]


def test_aligned_instruction_in_a_branch_is_an_error(kernel: Callable[..., Any]) -> None:
    body = """ mov.u32 %r0, %laneid; setp.ge.u32 %p1, %r0, 16; @%p1 bra OUT;
 bar.sync 0;
OUT:"""
    done = kernel(body, {}).run()
    assert "lanes of the warp are not all here" in (done.error or "")


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_through_shared_memory(transposed: bool, kernel: Callable[..., Any]) -> None:
    """stmatrix then plain loads: lane 4 * r + c of a matrix holds row r, columns 2c and 2c + 1."""
    words = np.arange(4 * 32, dtype=np.uint32) * 0x00010001 + 0x00010000
    out = np.zeros((4, 8, 8), np.uint16)
    form = ".trans" if transposed else ""
    body = f"""
 mov.u32 %r0, %laneid; mov.b32 %r9, smem; mad.lo.u32 %r8, %r0, 16, %r9;
 mad.wide.u32 %q5, %r0, 16, %q0; ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%q5];
 stmatrix.sync.aligned.m8n8.x4{form}.shared.b16 [%r8], {{%r1, %r2, %r3, %r4}};
 bar.warp.sync -1;
 ld.shared.v4.b32 {{%r11, %r12, %r13, %r14}}, [%r8];
 mad.wide.u32 %q5, %r0, 16, %q1; st.global.v4.b32 [%q5], {{%r11, %r12, %r13, %r14}};
 ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{%r21, %r22, %r23, %r24}}, [%r8];
 mad.wide.u32 %q5, %r0, 16, %q2; st.global.v4.b32 [%q5], {{%r21, %r22, %r23, %r24}};"""
    given = words.reshape(4, 32).T.copy()
    back = np.zeros_like(given)
    done = kernel(body, {"words": given, "out": out, "back": back}).run()
    assert done.clean, done.describe()
    matrices = words.reshape(4, 32).view(np.uint16).reshape(4, 8, 8)
    assert np.array_equal(out, matrices.transpose(0, 2, 1) if transposed else matrices)
    assert np.array_equal(back, given)


def test_register_counts_of_a_warpgroup_must_agree(kernel: Callable[..., Any]) -> None:
    body = """ mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; @%p1 bra SMALL;
 setmaxnreg.inc.sync.aligned.u32 232; bra OUT;
SMALL:
 setmaxnreg.dec.sync.aligned.u32 24;
OUT:"""
    done = kernel(body, {}, threads=128).run()
    assert any("differs in the warpgroup" in line for line in done.describe())
