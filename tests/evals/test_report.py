"""Tables, plots and the page: with one point, with holes, with NaN."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.cells import collect
from blasst.evals.errors import InputError
from blasst.evals.figures import mean_score
from blasst.evals.plots import Chart, Series, heat_map, line_chart, nice_ticks
from blasst.evals.report import as_json, as_text, markdown, page, remarks, text_table, write_report


def plan(**changes: Any) -> dict[str, Any]:
    server = {
        "model": "m",
        "root": "m",
        "max_model_len": 4096,
        "vllm_version": "0.32",
        "blasst_version": "",
        "min_context": 512,
    }
    record: dict[str, Any] = {
        "kind": "plan",
        "fingerprint": "f",
        "server": server,
        "thresholds": ["mag:1500.0", "dense"],
        "lengths": [2048, 4096],
        "tasks": ["vt", "niah_single_2"],
        "seeds": [42],
        "samples": 4,
        "prompt_format": "chatml",
        "tokenizer_sha256": "0" * 64,
        "max_tokens": None,
        "blasst_version": "0",
        "python": "3",
        "machine": "x",
        "command": ["blasst", "<script>alert(1)</script>"],
        "at": 0.0,
    }
    return record | changes


NUMBERS = itertools.count()


def sample(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kind": "sample",
        "pass": "both",
        "prompt_sha256": str(next(NUMBERS)),
        "prediction": "an answer",
        "fingerprint": "f",
        "threshold": "dense",
        "task": "vt",
        "length": 2048,
        "prompt_tokens": 2000,
        "match": 0.5,
        "gold_nll": 0.25,
        "ttft_s": 1.0,
        "visited": 0,
        "skipped": 0,
        "layers": [],
    }
    return record | changes


VOTE = {
    "threshold": "mag:1500.0",
    "visited": 100,
    "skipped": 25,
    "layers": [[0, 50, 0], [1, 50, 25]],
}


def test_cells_hold_means_medians_and_ratios_of_sums() -> None:
    records = [
        plan(),
        sample(ttft_s=1.0),
        sample(ttft_s=9.0, match=1.0, gold_nll=0.75),
        sample(ttft_s=2.0),
        sample(**VOTE),
        sample(**(VOTE | {"visited": 300, "skipped": 15})),
        sample(fingerprint="other"),
    ]
    results = collect(records)
    dense = results.cell(None, "vt", 2048)
    assert (dense.samples, dense.ttft_s, dense.score) == (3, 2.0, 66.67)
    assert dense.gold_nll == pytest.approx(1.25 / 3)
    assert math.isnan(dense.skip_rate)
    vote = results.cell(results.points[1], "vt", 2048)
    assert vote.skip_rate == pytest.approx(0.1)
    assert vote.mag == pytest.approx(1500)
    assert results.layer_rates[("mag:1500.0", 2048)] == {0: 0.0, 1: 0.5}
    assert results.others == 1


def test_the_grid_is_complete_and_dense_comes_first() -> None:
    results = collect([plan(), sample()])
    assert len(results.cells) == 8
    assert results.points[0] is None
    assert sum(c.samples for c in results.cells) == 1
    words = text_table(results).splitlines()
    assert len(words) == 10
    assert words[0].split()[:5] == ["MAG", "lambda", "task", "length", "n"]
    assert words[2].split() == ["dense", "-", "vt", "2048", "1", "50.0", "0.2500", "1.000", "-"]
    assert words[3].split() == ["1500", "0.354", "vt", "2048", "0", "-", "-", "-", "-"]
    assert "7 of 8 cells are not measured yet" in markdown(results)
    assert "nan" not in markdown(results).lower().replace("finance", "")
    assert as_json(results)["cells"][1]["score"] is None


@pytest.mark.parametrize(
    "records",
    [
        [plan()],
        [plan(thresholds=["dense"], lengths=[2048], tasks=["vt"]), sample()],
        [plan(), sample(gold_nll=math.nan), sample(**VOTE)],
        [
            plan(thresholds=["lambda:0.0", "scale:100.0", "mag:500.0"]),
            sample(threshold="scale:100.0"),
        ],
    ],
    ids=["nothing", "one point", "NaN", "other units"],
)
def test_the_page_is_well_formed_and_shows_no_nan(records: list[dict[str, Any]]) -> None:
    html = page(collect(records))
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        root = ET.fromstring(svg)
        for element in root.iter():
            for value in element.attrib.values():
                assert "nan" not in value.replace("finance", "")
                assert "inf" not in value
    body = html.partition("<body>")[2]
    assert ">nan" not in body
    assert "<script" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html)


def test_the_report_goes_where_it_can_be_written(tmp_path: Path) -> None:
    results = collect([plan(), sample()])
    target = write_report(results, tmp_path / "a" / "b")
    assert target.read_text().startswith("<!doctype html>")
    assert (tmp_path / "a" / "b" / "report.md").read_text().startswith("# RULER")
    with pytest.raises(InputError, match="cannot be written"):
        write_report(results, target)


def test_results_without_a_plan_are_refused() -> None:
    with pytest.raises(InputError, match="no plan"):
        collect([sample()])


@pytest.mark.parametrize(
    ("low", "high", "floor"),
    [(0, 100, 0), (0.421, 0.44, None), (5, 5, None), (0, 0, 0), (1e-9, 3e-9, None), (-3, 7, None)],
)
def test_ticks_are_round_few_and_cover_the_values(
    low: float, high: float, floor: float | None
) -> None:
    ticks = nice_ticks(low, high, floor)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low
    assert ticks[-1] >= high
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps))


def test_gaps_break_the_line_and_single_values_are_dots() -> None:
    series = [
        Series("a", [1.0, math.nan, 2.0, 3.0]),
        Series("b", [math.nan, 5.0, math.nan, math.nan]),
    ]
    root = ET.fromstring(line_chart(Chart("t", "u", ["w", "x", "y", "z"], series)))
    lines = root.findall("polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2]
    assert len(root.findall("circle")) == 3
    assert len(root.findall("rect")) == 1


def test_nothing_measured_says_so() -> None:
    assert "not measured" in line_chart(Chart("t", "u", ["x"], [Series("a", [math.nan])]))


def test_heat_map_shades_by_rate_and_leaves_holes_white() -> None:
    root = ET.fromstring(heat_map("t", ["<a>"], [0, 1, 2], [[0.0, 1.0, math.nan]]))
    fills = [r.attrib["fill"] for r in root.findall("rect")]
    assert fills == ["#ffffff", "#08306b", "#fff"]
    assert [r.findtext("title") for r in root.findall("rect")] == [
        "<a>, layer 0: 0.0%",
        "<a>, layer 1: 100.0%",
        "<a>, layer 2: not measured",
    ]


@pytest.mark.parametrize("field", ["visited", "match", "ttft_s", "threshold", "layers"])
@pytest.mark.parametrize("change", ["missing", "of another type"])
def test_records_that_someone_edited_are_one_clear_error(field: str, change: str) -> None:
    broken = sample(**VOTE)
    if change == "missing":
        del broken[field]
    else:
        broken[field] = {"x": 1}
    with pytest.raises(InputError, match="was edited or is of another release"):
        collect([plan(), broken])


def test_names_from_a_server_stay_text_on_the_page() -> None:
    evil = "<script>alert(1)</script>\"'"
    server = {**plan()["server"], "model": evil, "root": evil, "vllm_version": evil}
    html = page(collect([plan(server=server, tasks=[evil], machine=evil, command=[evil])]))
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_a_mean_of_other_tasks_is_no_point_of_the_curve() -> None:
    both = [sample(), sample(task="niah_single_2", match=1.0)]
    results = collect([plan(tasks=["vt", "niah_single_2"]), *both, sample(**VOTE)])
    vote = next(point for point in results.points if point is not None)
    assert mean_score(results, None, 2048) == 75.0
    assert math.isnan(mean_score(results, vote, 2048))


def test_remarks_say_what_the_numbers_do_not_show() -> None:
    zero = [sample(match=0.0), sample(**VOTE), sample(match=0.0, length=4096)]
    single = [sample(task="niah_single_2"), sample(task="niah_single_2", match=0.0)]
    results = collect([plan(notes=["On a CPU it is slow."]), *zero, *single])
    assert remarks(results) == [
        "vt scores 0 without a threshold too: read its gold NLL.",
        "1 to 2 samples a cell: this shows that it works, not how accurate it is.",
        "On a CPU it is slow.",
    ]
    for text in (as_text(results), markdown(results), page(results)):
        for remark in remarks(results):
            assert remark in text
    some = collect([plan(), sample(match=0.0), *(sample(length=4096) for _ in range(20))])
    assert remarks(some)[0].startswith("vt at 2048 tokens scores 0")
    assert remarks(collect([plan(), *(sample() for _ in range(20))])) == []


def test_the_page_names_the_machine_and_fits_a_narrow_screen() -> None:
    html = page(collect([plan(machine="Fast CPU, 2 cores"), sample()]))
    assert "<br>Fast CPU, 2 cores</p>" in html
    assert '<td class="lambda">' in html
    assert "@media (max-width: 640px)" in html


@pytest.mark.parametrize("field", ["machine", "server", "seeds"])
def test_a_plan_of_another_release_is_one_clear_error(tmp_path: Path, field: str) -> None:
    results = collect([{k: v for k, v in plan().items() if k != field}, sample()])
    with pytest.raises(InputError, match=f"'{field}'.*another release"):
        write_report(results, tmp_path)
    assert not list(tmp_path.iterdir())
