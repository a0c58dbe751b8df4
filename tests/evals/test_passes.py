"""The accuracy pass, many requests at once, and the TTFT pass after it; cuts at every byte."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.cells import collect
from blasst.evals.errors import InputError, ServerError
from blasst.evals.progress import Progress
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.store import ResultStore, read_results
from blasst.evals.sweep import Plan, run_sweep
from blasst.evals.thresholds import parse_points
from blasst.evals.verdict import judge

Connect = Callable[..., Runner]
POINTS = parse_points(["dense", "1000"], [], [])


def sweep(connect: Connect, path: Path, plan: Plan, **options: Any) -> int:
    with ResultStore(path) as store:
        runner = connect(store, **({"concurrency": 2} | options))
        return run_sweep(runner, plan, Progress(0, quiet=True))


def test_answers_come_first_and_then_times(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.answers = {s.prompt: "it is " + " ".join(s.answers) for s in samples}
    fake.delay_s = 0.05
    path = tmp_path / "r.jsonl"
    plan = Plan(POINTS, samples, chunk=2, timed=1)
    assert sweep(connect, path, plan) == 2 * (4 + 2)
    found = [r for r in read_results(path) if r["kind"] == "sample"]
    assert [r["pass"] for r in found] == ["accuracy"] * 8 + ["ttft"] * 4
    assert fake.most_at_once == 2
    assert all(r["match"] == 1.0 and r["tokens"] for r in found[:8])
    assert not any("ttft_s" in r for r in found[:8])
    assert all(r["ttft_s"] >= 0.03 and "match" not in r for r in found[8:])
    timed = [b for b in fake.prompts if b.get("stream") and b["max_tokens"] == 1]
    assert not any("logprobs" in b for b in timed)
    cells = collect(read_results(path)).cells
    assert [(c.samples, c.score) for c in cells] == [(2, 100.0)] * 4
    assert all(c.ttft_s >= 0.03 for c in cells)
    vote = [c for c in cells if c.point is not None]
    assert all(c.skip_rate == pytest.approx(0.375, abs=0.01) for c in vote)


def test_dense_and_threshold_take_turns_on_the_same_ids(
    tmp_path: Path, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r.jsonl"
    sweep(connect, path, Plan(POINTS, samples, chunk=1, timed=0))
    found = [r for r in read_results(path) if r["kind"] == "sample"]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(a["prompt_sha256"] == b["prompt_sha256"] for a, b in pairs)
    assert [a["threshold"] for a, _ in pairs] == ["dense", "mag:1000.0"] * 2


@pytest.mark.parametrize("concurrency", [1, 2])
def test_nll_of_some_samples_only_and_of_the_rest_later(
    concurrency: int, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r.jsonl"
    plan = Plan(POINTS, samples, timed=0 if concurrency > 1 else None)
    sweep(connect, path, plan, concurrency=concurrency, nll=1)
    found = [r for r in read_results(path) if r["kind"] == "sample"]
    assert {r["gold_nll"] is not None for r in found if r["index"] == 0} == {True}
    assert {r["gold_nll"] is not None for r in found if r["index"] > 0} == {False}
    results = collect(read_results(path))
    (one,) = judge(results)
    assert math.isfinite(one.nll)
    assert math.isfinite(results.cells[0].gold_nll)
    rest = sum(sample.index > 0 for sample in samples) * len(POINTS)
    assert sweep(connect, path, plan, concurrency=concurrency) == rest
    again = collect(read_results(path))
    assert [c.samples for c in again.cells] == [c.samples for c in results.cells]
    assert all(r["gold_nll"] is not None for r in again.accuracy)
    with pytest.raises(InputError, match="--nll -1"):
        sweep(connect, path, plan, nll=-1)


def test_what_was_sent_together_is_said_together(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    """One line after the first of them would take their time for that of one."""
    said = io.StringIO()
    with ResultStore(tmp_path / "r.jsonl") as store:
        plan = Plan(POINTS[:1], samples[:2], chunk=2, timed=0)
        run_sweep(connect(store, concurrency=2), plan, Progress(0, said))
    (line,) = said.getvalue().splitlines()
    assert line.startswith("2/2  dense")
    assert line.endswith("left about 0:00")


def test_an_accuracy_cell_whose_counters_do_not_move_is_an_error(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    class Late(Progress):
        def step(self, what: str) -> None:
            super().step(what)
            fake.faults = {"foreign-traffic"}

    plan = Plan(POINTS, samples, chunk=2, timed=0)
    with (
        ResultStore(tmp_path / "r.jsonl") as store,
        pytest.raises(ServerError, match="other traffic"),
    ):
        run_sweep(connect(store, concurrency=2), plan, Late(0, quiet=True))
    assert sum(r["kind"] == "sample" for r in read_results(tmp_path / "r.jsonl")) == 2


@pytest.mark.parametrize("concurrency", [1, 2])
def test_answers_under_somebody_elses_threshold_are_not_kept(
    concurrency: int, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    """Set in the middle of a cell: no counter tells, and a resumed run would trust what is kept."""
    path = tmp_path / "r.jsonl"
    plan = Plan(POINTS[1:], samples[:2], chunk=concurrency, timed=0 if concurrency > 1 else None)
    admit, answers = fake.admit, []

    def meddle(body: dict[str, Any]) -> float | None:
        answers.extend([body] if body["max_tokens"] > 2 else [])
        if len(answers) == 2:
            fake.admit = admit
            fake.threshold, fake.generation = {"unit": "mag", "value": 1.0}, fake.generation + 1
        return float(admit(body))

    fake.admit = meddle
    with pytest.raises(ServerError, match="changed during the cell MAG 1000"):
        sweep(connect, path, plan, concurrency=concurrency)
    kept = [r for r in read_results(path) if r["kind"] == "sample"]
    assert len(kept) == 2 - concurrency
    assert fake.threshold == {"unit": "mag", "value": 1.0}  # theirs is not overwritten
    assert sweep(connect, path, plan, concurrency=concurrency) == concurrency
    found = [r for r in read_results(path) if r["kind"] == "sample"]
    rates = [r["skipped"] / r["visited"] for r in found if r["visited"]]
    assert rates == pytest.approx([0.375] * len(rates), abs=0.01)


@pytest.mark.parametrize("fault", ["refuses", "breaks-off-late", "cuts-prompts", "adds-a-token"])
def test_a_fault_in_one_of_many_ends_all(
    fault: str, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.faults = {fault}
    with pytest.raises(ServerError):
        sweep(connect, tmp_path / "r.jsonl", Plan(POINTS[:1], samples, timed=0))
    assert not [r for r in read_results(tmp_path / "r.jsonl") if r["kind"] == "sample"]


def test_a_file_cut_at_every_byte_of_its_last_record_is_completed(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    """Opening the store is what a resumed run does first; a few cuts are measured again."""
    path = tmp_path / "r.jsonl"
    plan = Plan(POINTS, samples[:2], chunk=2, timed=0)
    sweep(connect, path, plan)
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    records = [r["key"] for r in read_results(path) if "key" in r]
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        with ResultStore(path) as store:
            assert [r["key"] for r in store.records if "key" in r] == records[:-1]
            assert records[-1] not in store
        assert path.read_bytes() == whole[:last]
    for cut in (last, last + 1, (last + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert sweep(connect, path, plan) == 1
        assert [r["key"] for r in read_results(path) if "key" in r] == records


def test_concurrency_below_one_is_refused(connect: Connect, tmp_path: Path) -> None:
    with ResultStore(tmp_path / "r") as store, pytest.raises(InputError, match="--concurrency 0"):
        connect(store, concurrency=0)
