"""Verdicts on made-up results, and damage that is injected into a server's answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.cells import Results, collect
from blasst.evals.errors import InputError
from blasst.evals.metrics import string_match_part, token_agreement
from blasst.evals.thresholds import parse_points
from blasst.evals.verdict import EXIT_CODES, as_json, as_words, judge, overall
from blasst.server.cli import main

TASKS = ("niah_single_2", "niah_multivalue", "vt", "fwe")


def results(
    count: int,
    worse: float,
    better: float = 0.0,
    *,
    dense: float = 0.9,
    tasks: Sequence[str] = TASKS,
    last: int | None = None,
    min_context: int = 512,
) -> Results:
    """`count` samples a task (`last` of the last one); under MAG 1000 each becomes worse or better
    so often."""
    rng = random.Random(11)
    server: dict[str, Any] = {"model": "m", "min_context": min_context}
    plan = {
        "kind": "plan",
        "fingerprint": "f",
        "server": server,
        "thresholds": ["dense", "mag:1000.0"],
        "lengths": [4096],
        "tasks": list(TASKS),
        "at": 0.0,
    }
    records: list[dict[str, Any]] = [plan]
    for task in tasks:
        for index in range(count if last is None or task != tasks[-1] else last):
            before = float(rng.random() < dense)
            draw = rng.random()
            after = 0.0 if draw < worse else 1.0 if draw > 1 - better else before
            for threshold, value in (("dense", before), ("mag:1000.0", after)):
                records.append(
                    {
                        "kind": "sample",
                        "pass": "accuracy",
                        "fingerprint": "f",
                        "threshold": threshold,
                        "task": task,
                        "length": 4096,
                        "prompt_sha256": f"{task}{index}",
                        "prompt_tokens": 4000,
                        "match": value,
                        "gold_nll": 0.1 + 0.05 * (value != before),
                        "prediction": "a b c d" if value == before else "a b x d",
                        "tokens": [],
                        "visited": 10,
                        "skipped": 3,
                        "layers": [],
                    }
                )
    return collect(records)


@pytest.mark.parametrize(
    ("count", "worse", "better", "outcome", "why"),
    [
        (500, 0.0, 0.0, "GO", "at most"),
        (500, 0.002, 0.002, "GO", "at most"),
        (100, 0.10, 0.0, "NO-GO", "worse by more than 1"),
        (15, 0.9, 0.0, "NO-GO", "worse by more than 1"),
        (5, 0.9, 0.0, "NO-GO", "worse by more than 1"),
        (4, 0.9, 0.0, "INCONCLUSIVE", "under 5 a task's scatter is not known"),
        (15, 0.0, 0.0, "INCONCLUSIVE", "60 pairs; under 299"),
        (100, 0.03, 0.03, "INCONCLUSIVE", "neither excluded nor shown"),
    ],
)
def test_outcomes(count: int, worse: float, better: float, outcome: str, why: str) -> None:
    (verdict,) = judge(results(count, worse, better))
    assert verdict.outcome == outcome
    assert why in verdict.reason
    assert verdict.pairs == 4 * count
    assert verdict.low <= verdict.difference <= verdict.high
    body = json.loads(json.dumps(as_json([verdict]), allow_nan=False))
    assert body["exit_code"] == EXIT_CODES[verdict.outcome] == {"G": 0, "N": 1, "I": 2}[outcome[0]]
    assert as_words([verdict]).endswith(f"overall: {outcome}")


def test_a_model_that_can_do_nothing_is_no_evidence() -> None:
    (verdict,) = judge(results(500, 0.0, dense=0.0))
    assert verdict.outcome == "INCONCLUSIVE"
    assert "nothing can be lost" in verdict.reason


def test_a_missing_task_prevents_go_but_not_no_go() -> None:
    (verdict,) = judge(results(500, 0.0, tasks=TASKS[:3]))
    assert (verdict.outcome, verdict.reason) == ("INCONCLUSIVE", "not measured: fwe")
    (verdict,) = judge(results(500, 0.5, tasks=TASKS[:3]))
    assert verdict.outcome == "NO-GO"


def test_a_loss_in_some_tasks_is_no_loss_of_their_mean_with_the_missing_ones() -> None:
    """2.5 points in one of four tasks may be 0.6 points of RULER's mean."""
    (verdict,) = judge(results(3000, 0.028, tasks=TASKS[:1]))
    assert verdict.high < -1.0
    assert (verdict.outcome, verdict.reason[:12]) == ("INCONCLUSIVE", "not measured")
    (verdict,) = judge(results(3000, 0.1, tasks=TASKS[:1]))
    assert verdict.outcome == "NO-GO"


def test_a_task_that_was_hardly_measured_prevents_go() -> None:
    (verdict,) = judge(results(500, 0.0, last=8))
    assert verdict.outcome == "INCONCLUSIVE"
    assert verdict.reason.startswith("1508 pairs, but 8 of fwe; under 299")
    assert judge(results(500, 0.0, last=75))[0].outcome == "GO"
    assert judge(results(500, 0.5, last=8))[0].outcome == "NO-GO"


def test_a_threshold_that_was_not_in_force_is_no_go() -> None:
    (verdict,) = judge(results(500, 0.0, min_context=4001))
    assert verdict.outcome == "INCONCLUSIVE"
    assert "2000 of 2000 prompts are below min_context 4001 and ran dense" in verdict.reason
    assert judge(results(500, 0.0, min_context=4000))[0].outcome == "GO"
    (dense,) = judge(results(500, 0.0, min_context=4001), [None])
    assert dense.outcome == "GO"


def test_a_prompt_that_two_passes_answered_is_one_pair() -> None:
    once = results(100, 0.03, 0.03)
    other = [{**r, "pass": "both", "ttft_s": 0.1} for r in once.accuracy]
    twice = collect([once.plan, *once.accuracy, *other])
    assert judge(twice) == judge(once)
    assert [c.samples for c in twice.cells] == [c.samples for c in once.cells]
    dense = [{**r, "tokens": [1, 2]} for r in other if r["threshold"] == "dense"]
    mixed = collect([once.plan, *once.accuracy, *dense])
    assert judge(mixed)[0].agreement == judge(once)[0].agreement > 0.9


def test_answers_of_different_length_are_no_pair() -> None:
    found = results(500, 0.0)
    short = [{**r, "budget": 10 if r["threshold"] == "dense" else 128} for r in found.accuracy]
    (verdict,) = judge(collect([found.plan, *short]))
    assert verdict.reason.startswith("no sample is measured both")
    old = [{**r, "budget": 10} if r["threshold"] == "dense" else r for r in found.accuracy]
    assert judge(collect([found.plan, *old])) == judge(found)


def test_two_sweeps_into_one_file_are_both_named() -> None:
    found = results(5, 0.0)
    other = {**found.plan, "seeds": [7], "mode": "official", "data": {"b.json": "there"}}
    mine = {**found.plan, "seeds": [42], "data": {"a.json": "here"}}
    plan = collect([other, mine, *found.accuracy]).plan
    assert (plan["seeds"], plan["mode"]) == ([7, 42], "official, balanced")
    assert plan["data"] == {"b.json": "there", "a.json": "here"}


def test_samples_of_another_server_are_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results(100, 0.0)
    records = [{**r, "fingerprint": "other"} for r in found.accuracy] + [*found.accuracy[:60]]
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in (found.plan, *records)))
    for verb in ("verdict", "recommend"):
        assert main(["ruler", verb, str(file)]) == 2
        assert "800 samples in the file are of another server" in capsys.readouterr().err


def test_nothing_measured_is_inconclusive_and_has_no_nan_in_json() -> None:
    found = judge(results(0, 0.0))
    assert found[0].reason.startswith("no sample is measured")
    assert json.dumps(as_json(found), allow_nan=False)
    assert overall([]) == "INCONCLUSIVE"


def test_margin_and_thresholds_are_checked() -> None:
    found = results(20, 0.0)
    with pytest.raises(InputError, match="margin 0"):
        judge(found, margin=0.0)
    with pytest.raises(InputError, match="hold no MAG 7000"):
        judge(found, parse_points(["7000"], [], []))
    (wide,) = judge(found, margin=5.0)
    assert (wide.needed, wide.outcome) == (59, "GO")


def test_nll_and_agreement_move_before_the_score_does() -> None:
    (verdict,) = judge(results(100, 0.2))
    task = verdict.tasks[0]
    assert task.worse == round(-task.difference)
    assert task.p < 0.001
    assert task.nll == pytest.approx(0.05 * task.worse / 100)
    assert task.agreement == pytest.approx(1 - task.worse / 100 / 2)


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert token_agreement([1, 2, 3], [1, 2, 3]) == 1.0
    assert token_agreement([1, 9, 3], [1, 2, 3]) == pytest.approx(1 / 3)
    assert token_agreement([1, 2], [1, 2, 3, 4]) == 0.5
    assert token_agreement([], []) == 1.0
    assert token_agreement([5], []) == 0.0


def test_any_reference_is_enough_in_qa() -> None:
    assert string_match_part("It was Paris.", ["paris", "the city of Paris"]) == 1.0
    assert string_match_part("London", ["Paris"]) == 0.0
