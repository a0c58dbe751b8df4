"""Recordings: from a buffer as a kernel would write it to spans, marks and a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from blasst.kernels.instruments.record import LEFT_OUT, Recording, reads_of
from blasst.kernels.instruments.steps import NAMES, STEPS, Step
from blasst.kernels.instruments.timeline import step_totals

VISITS = 3
# Clock of the end of each step, one dictionary a visit; visit 1 is skipped.
KEPT = (Step.WAIT_SCORES, Step.MAX, Step.VOTE, Step.EXP2, Step.STORE_P)
SKIPPED = (Step.WAIT_SCORES, Step.MAX, Step.VOTE, Step.WAIT_PV)


def buffer(warps: int = 2) -> list[list[list[int]]]:
    """Warp w starts at 1000 + w; every step takes 10 cycles, but scores are waited for 40."""
    rows = [[[0] * STEPS for _ in range(VISITS)] for _ in range(1 + warps)]
    for warp in range(warps):
        clock = 1000 + warp
        rows[1 + warp][0][Step.START] = clock
        for visit in range(VISITS):
            for step in SKIPPED if visit == 1 else KEPT:
                clock += 40 if step is Step.WAIT_SCORES else 10
                rows[1 + warp][visit][step] = clock
    # The row that names the thread block is no warp.
    rows[0][0][0] = 77
    return rows


def recording() -> Recording:
    warps = {0: "group 0 warp 0", 1: "group 0 warp 1", 2: "never marked"}
    return Recording("a test", warps, reads_of(buffer()), {"tokens": 384})


def test_every_step_runs_from_the_mark_before_it() -> None:
    timeline = recording().timeline()
    assert timeline.lanes == ["group 0 warp 0", "group 0 warp 1"]
    first = [s for s in timeline.spans if s.lane == timeline.lanes[0] and s.visit == 0]
    assert [(s.step, s.start, s.end) for s in first] == [
        ("wait scores", 0, 40),
        ("max", 40, 50),
        ("vote", 50, 60),
        ("exp2", 60, 70),
        ("store P", 70, 80),
    ]
    assert timeline.extent == (0, 231)


def test_waits_before_scores_are_a_number() -> None:
    waits = step_totals(recording().timeline())["wait scores"]
    assert (waits.count, waits.total, waits.median) == (6, 240, 40)
    assert waits.share == pytest.approx(120 / 230)


def test_a_vote_without_exponentials_is_a_skip() -> None:
    marks = recording().timeline().marks
    assert [(m.lane, m.step, m.at, m.visit) for m in marks] == [
        ("group 0 warp 0", LEFT_OUT, 140, 1),
        ("group 0 warp 1", LEFT_OUT, 141, 1),
    ]


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    recording().save(path)
    assert Recording.load(path) == recording()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9}', '{"version": 1, "title": "x"}'])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"r\.json is no recording of `blasst trace`"):
        Recording.load(path)


def test_every_step_has_a_name_and_a_place() -> None:
    assert set(NAMES) == set(Step) - {Step.START}
    assert max(Step) < STEPS


def test_nothing_recorded_is_an_empty_timeline() -> None:
    timeline = Recording("t", {0: "w"}, (), {}).timeline()
    assert (timeline.spans, timeline.lanes) == ([], [])
