"""Timelines: totals, the Chrome trace and the picture, on spans made up here."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest

from blasst.kernels.instruments.timeline import (
    COLOURS,
    Mark,
    Span,
    Timeline,
    chrome_trace,
    early_share,
    step_colours,
    step_totals,
    svg,
    ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def example() -> Timeline:
    spans = []
    for warp, late in (("warp 4", 0.0), ("warp 5", 3.0)):
        for visit in range(4):
            at = 100.0 * visit + late
            spans += [
                Span(warp, "wait scores", at, at + 40 - 10 * visit, visit),
                Span(warp, "exp2", at + 40, at + 90, visit),
            ]
    marks = [Mark("warp 5", "P.V left out", 250.0, 2)]
    return Timeline("a <test>", "cycles", ("warp 4", "warp 5"), spans, marks, ns_per_unit=2.0)


def test_totals_are_of_the_chosen_lanes() -> None:
    totals = step_totals(example())
    assert totals["wait scores"].count == 8
    assert totals["wait scores"].total == 2 * (40 + 30 + 20 + 10)
    assert totals["wait scores"].median == 25
    assert totals["exp2"].share == pytest.approx(400 / 780)
    one = step_totals(example(), ["warp 5"])
    assert one["exp2"].count == 4
    assert one["exp2"].share == pytest.approx(200 / 390)
    assert step_totals(Timeline("empty", "ns", (), ())) == {}


def test_how_often_scores_are_early() -> None:
    assert early_share(example(), "wait scores", 20) == (4, 8)
    assert early_share(example(), "wait scores", 5) == (0, 8)
    assert early_share(example(), "no such step", 5) == (0, 0)


def test_chrome_trace_has_one_thread_a_lane_and_microseconds() -> None:
    trace = json.loads(json.dumps(chrome_trace(example())))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "warp 4", 1: "warp 5"}
    whole = [e for e in events if e["ph"] == "X"]
    assert len(whole) == 16
    assert whole[1] == {
        "ph": "X", "name": "exp2", "pid": 0, "tid": 0, "ts": 0.08, "dur": 0.1, "args": {"visit": 0}
    }  # fmt: skip
    (mark,) = (e for e in events if e["ph"] == "i")
    assert (mark["tid"], mark["ts"], mark["args"]) == (1, 0.5, {"visit": 2})


def boxes(picture: str, step: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(picture)
    return [
        box
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None and str(title.text).startswith(step)
    ]


def test_picture_has_one_row_a_lane_and_one_colour_a_step() -> None:
    picture = svg(example())
    waits, exps = boxes(picture, "wait scores"), boxes(picture, "exp2")
    assert {b.get("fill") for b in waits} == {COLOURS["wait scores"]}
    assert {b.get("fill") for b in exps} == {COLOURS["exp2"]}
    assert len({b.get("y") for b in waits}) == 2
    # 50 of 393 cycles over the width between the labels and the margin.
    assert float(exps[0].get("width") or 0) == pytest.approx(50 / 393 * (1400 - 150), abs=0.01)
    assert len(boxes(picture, "P.V left out")) == 1
    assert "a &lt;test&gt;" in picture


def test_picture_of_a_window_clips() -> None:
    picture = svg(example(), window=(60.0, 110.0), width=650)
    first, second = boxes(picture, "exp2")
    assert float(first.get("width") or 0) == pytest.approx(300)
    assert float(second.get("width") or 0) == pytest.approx(330)
    assert boxes(picture, "P.V left out") == []
    with pytest.raises(ValueError, match="window 5 to 5 is empty"):
        svg(example(), window=(5, 5))


def test_empty_timeline_is_a_picture_too() -> None:
    ElementTree.fromstring(svg(Timeline("nothing", "ns", ("warp 0",), ())))


def test_steps_without_a_shared_colour_get_different_ones() -> None:
    colours = step_colours(["exp2", "one", "two", "vote", "three"])
    assert colours["exp2"] == COLOURS["exp2"]
    assert len(set(colours.values())) == 5
    assert len(step_colours([str(i) for i in range(30)])) == 30


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1000) == [0, 200, 400, 600, 800, 1000]
    assert ticks(13, 47) == [15, 20, 25, 30, 35, 40, 45]
    assert ticks(5, 5) == [5]


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (0.0, math.nan), (-math.inf, 0.0)])
def test_a_span_out_of_order_is_refused(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="must be finite and in order"):
        Span("warp 0", "exp2", start, end)


def test_a_span_of_no_lane_is_refused() -> None:
    with pytest.raises(ValueError, match="lane 'warp 9' is not one of warp 0"):
        Timeline("t", "ns", ("warp 0",), (Span("warp 9", "exp2", 0, 1),))
