"""A sweep is of one server: one that was started again, another kernel, no threshold in force."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.errors import InputError, ServerError
from blasst.evals.progress import Progress
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.store import ResultStore, read_results
from blasst.evals.sweep import Plan, run_sweep
from blasst.evals.thresholds import parse_points

Connect = Callable[..., Runner]
POINTS = parse_points(["dense", "1000"], [], [])


def sweep(connect: Connect, path: Path, plan: Plan, **options: Any) -> int:
    with ResultStore(path) as store:
        return run_sweep(connect(store, **options), plan, Progress(0, quiet=True))


def test_a_sweep_in_which_no_threshold_is_in_force_is_refused(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    with pytest.raises(InputError, match="below min_context 2000 and run dense"):
        sweep(connect, tmp_path / "r.jsonl", Plan(POINTS, samples), min_context=2000)
    assert not fake.prompts
    assert not (tmp_path / "r.jsonl").exists()
    sweep(connect, tmp_path / "r.jsonl", Plan(POINTS[:1], samples[:1]), min_context=2000)


def test_the_min_context_that_a_server_was_started_with_is_known(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.min_context, fake.own_min_context = None, 600
    sweep(connect, tmp_path / "r.jsonl", Plan(POINTS, samples[:1]))
    found = read_results(tmp_path / "r.jsonl")
    assert found[0]["server"]["min_context"] == 600
    assert {body.get("min_context") for body in fake.puts} == {None}
    fake.own_min_context = 2000
    with pytest.raises(InputError, match="below min_context 2000 and run dense"):
        sweep(connect, tmp_path / "s.jsonl", Plan(POINTS, samples[:1]))
    fake.own_min_context = None  # of an older release: vLLM's front end has the usual one
    with pytest.raises(InputError, match="below min_context 8192 and run dense"):
        sweep(connect, tmp_path / "s.jsonl", Plan(POINTS, samples[:1]))


def test_samples_of_two_tokenizers_are_refused(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    """The first alone is read back by the server."""
    other = [samples[0], replace(samples[1], tokenizer_sha256="0" * 64)]
    with pytest.raises(InputError, match="2 tokenizers or prompt formats"):
        sweep(connect, tmp_path / "r.jsonl", Plan(POINTS, other))
    assert not fake.prompts


def test_a_server_that_was_started_again_is_an_error(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    class Restart(Progress):
        def step(self, what: str) -> None:
            super().step(what)
            fake.vote, fake.dense, fake.visited = 0, 0, [0, 0]

    with ResultStore(tmp_path / "r.jsonl") as store:
        fake.vote = 10_000
        plan = Plan(POINTS[1:2], samples)
        with pytest.raises(ServerError, match="the server was started again meanwhile"):
            run_sweep(connect(store), plan, Restart(0, quiet=True))
    assert sum(r["kind"] == "sample" for r in read_results(tmp_path / "r.jsonl")) == 1


@pytest.mark.parametrize("left", ["half", "all"])
def test_what_a_killed_sweep_left_is_not_what_is_put_back(
    left: str, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path, plan = tmp_path / "r.jsonl", Plan(POINTS, samples[:2])
    fake.threshold, fake.min_context = {"unit": "mag", "value": 9000.0}, 600
    with ResultStore(path) as store:
        runner = connect(store, min_context=500)
        runner.restore = lambda: None  # as after kill -9
        run_sweep(runner, plan, Progress(0, quiet=True))
    assert fake.threshold != {"unit": "mag", "value": 9000.0}
    if left == "half":
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]))
    said = io.StringIO()
    with ResultStore(path) as store:
        assert run_sweep(connect(store, min_context=500), plan, Progress(0, said)) == (
            left == "half"
        )
    assert "a sweep that was killed left" in said.getvalue()
    assert (fake.threshold, fake.min_context) == ({"unit": "mag", "value": 9000.0}, 600)


@pytest.mark.parametrize("min_context", [None, 500])
def test_a_sweep_that_ended_by_itself_is_not_taken_for_one_that_was_killed(
    min_context: int | None, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.min_context, said = None, io.StringIO()
    fake.own_min_context = 500
    for name in ("one", "other"):
        with ResultStore(tmp_path / name) as store:
            # Dense comes last, and is what was there before.
            plan = Plan([*POINTS[1:], None], samples[:1])
            run_sweep(connect(store, min_context=min_context), plan, Progress(0, said))
    assert (fake.threshold, fake.min_context) == (None, None)
    assert "killed" not in said.getvalue()


def test_what_a_killed_sweep_of_other_results_left_is_said(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.threshold, fake.puts = {"unit": "mag", "value": 50.0}, [{"reason": "RULER sweep, MAG 50"}]
    said = io.StringIO()
    with ResultStore(tmp_path / "r.jsonl") as store:
        run_sweep(connect(store), Plan(POINTS[:1], samples[:1]), Progress(0, said))
    assert "left MAG 50 at http" in said.getvalue()
    assert "do not say what was before: see `blasst threshold`" in said.getvalue()
