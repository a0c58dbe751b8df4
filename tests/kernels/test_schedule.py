"""Thresholds by prompt length: which one holds where, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.exchange.schedule import (
    MOST_STEPS,
    Schedule,
    Step,
    dump_threshold,
    load_threshold,
    threshold_at,
)
from blasst.kernels.threshold import SkipThreshold, ThresholdError

MAG_7000 = SkipThreshold("mag", 7000)
MAG_4500 = SkipThreshold("mag", 4500)


def test_a_step_takes_prompts_up_to_its_length_and_the_last_one_the_rest() -> None:
    schedule = Schedule.parse("16k=off, 64k=mag:7000, rest=mag:4500")
    found = [schedule.at(n) for n in (1, 16384, 16385, 65536, 65537, 1 << 30)]
    assert found == [None, None, MAG_7000, MAG_7000, MAG_4500, MAG_4500]
    assert str(schedule) == "dense to 16384 tokens, mag 7000 to 65536 tokens, mag 4500 above"
    assert not schedule.all_dense
    assert Schedule.parse("5=off,rest=off").all_dense


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not TOKENS=THRESHOLD"),
        ("16k", "is not TOKENS=THRESHOLD"),
        ("16k=off", "longer prompts would have none"),
        ("rest=off,16k=off", "longer prompts"),
        ("rest=off,rest=off", "only the last step"),
        ("16k=off,16k=off,rest=off", "must be above the one before"),
        ("0=off,rest=off", "must be above the one before"),
        ("999999999=off,rest=off", "at most 16777216"),
        ("16m=off,rest=off", "is not TOKENS"),
        ("-1=off,rest=off", "is not TOKENS"),
        ("16k=7000,rest=off", "needs off or UNIT:VALUE"),
        ("16k=mag:-1,rest=off", "outside 0 < MAG"),
        ("16k=volt:1,rest=off", "unit 'volt' is unknown"),
        (",".join(f"{i}=off" for i in range(1, MOST_STEPS + 1)) + ",rest=off", "1 to 12 steps"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ThresholdError, match=message):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        "text",
        [5],
        [{"up_to": True, "threshold": None}],
        [{"up_to": 1.5, "threshold": None}],
        [{"up_to": None, "threshold": 5}],
        [{"up_to": None, "threshold": {"unit": "mag", "value": True}}],
    ],
)
def test_other_json_is_refused(raw: object) -> None:
    with pytest.raises(ThresholdError):
        Schedule.load(raw)


_THRESHOLDS = st.none() | st.floats(0, 0.99).map(lambda x: SkipThreshold("lambda", x))


@given(
    st.sets(st.integers(1, 1 << 24), max_size=MOST_STEPS - 1).map(sorted),
    st.lists(_THRESHOLDS, min_size=MOST_STEPS, max_size=MOST_STEPS),
    st.integers(1, 1 << 25),
)
@settings(max_examples=100, deadline=None)
def test_json_round_trip_and_the_first_step_that_is_long_enough_holds(
    lengths: list[int], thresholds: list[SkipThreshold | None], tokens: int
) -> None:
    steps = [Step(n, t) for n, t in zip([*lengths, None], thresholds, strict=False)]
    schedule = Schedule(tuple(steps))
    assert load_threshold(json.loads(json.dumps(dump_threshold(schedule)))) == schedule
    wanted = next(s.threshold for s in steps if s.up_to is None or tokens <= s.up_to)
    assert threshold_at(schedule, tokens) == wanted


def test_one_threshold_holds_for_every_length() -> None:
    assert threshold_at(MAG_7000, 5) == MAG_7000
    assert threshold_at(None, 5) is None
    assert load_threshold(dump_threshold(MAG_4500)) == MAG_4500
