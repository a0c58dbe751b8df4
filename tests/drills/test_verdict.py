"""The judgement of a drill sees each way in which an answer can be wrong."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from blasst.deploy.drills.control import lambda_of
from blasst.deploy.drills.history import Seen, Write
from blasst.deploy.drills.load import Answer, Ask
from blasst.deploy.drills.processes import Outage
from blasst.deploy.drills.recorder import Line
from blasst.deploy.drills.verdict import Evidence, Result, judge
from blasst.kernels.exchange.desired import DesiredState, write_desired
from blasst.kernels.threshold import SkipThreshold

MAG = 2000.001
LOOKS = {None: {0: {"a": -1.0, "b": -2.0}}, lambda_of(2000.0): {0: {"a": -1.5, "b": -1.7}}}


@pytest.fixture
def evidence(tmp_path):
    """One change, one request before it, one after it, one with a threshold of its own."""
    write_desired(tmp_path, DesiredState(1, SkipThreshold("mag", MAG)))
    record = {"result": "applied", "generation": 1}
    record["new"] = {"threshold": {"unit": "mag", "value": MAG}}
    (tmp_path / "audit.jsonl").write_text(json.dumps(record) + "\n")
    dense, skipping = LOOKS.values()
    asks = [Ask(1, 0), Ask(2, 0, wish="off"), Ask(3, 0)]
    looks = [dense[0], dense[0], skipping[0]]
    answers = [
        Answer(ask, 10.0 * i, 10.0 * i + 5, 200, look)
        for i, (ask, look) in enumerate(zip(asks, looks, strict=True))
    ]
    value = lambda_of(MAG)
    lines = [
        Line("front", 7, 0.1, 0.2, 1, 0, None, 640),
        Line("rank", 8, 1.1, 1.2, 1, 0, None, 640),
        Line("front", 7, 10.1, 10.2, 2, 1, None, 640),
        Line("rank", 8, 11.1, 11.2, 2, 0, None, 640),
        Line("front", 7, 20.1, 20.2, 3, 1, value, 640),
        Line("rank", 8, 21.1, 21.2, 3, 0, value, 512),
        Line("rank", 8, 21.3, 21.4, 3, 0, value, 128),
    ]
    watchers = SimpleNamespace(seen=[], shrunk=[], file_errors=0, tiles=(10, 5))
    return Evidence(
        state=tmp_path,
        writes=[Write(value, 6.0, 7.0, 1)],
        watchers=watchers,
        answers=answers,
        references=LOOKS,
        engine=[Outage("worker", 100.0, 101.0, 110.0)],
        sidecar=[],
        lines=lines,
    )


def faults(evidence):
    result = Result()
    judge(evidence, result)
    return result.faults


def test_a_good_run_has_no_fault(evidence):
    assert faults(evidence) == []


def replaced(evidence, number, **changes):
    lines = list(evidence.lines)
    lines[number] = dataclasses.replace(lines[number], **changes)
    return dataclasses.replace(evidence, lines=lines)


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        (6, {"skip_lambda": None}, "was computed as"),
        (6, {"tokens": 64}, "only 576 tokens"),
        (4, {"generation": 0}, "has lambda None"),
        (2, {"request": 1}, "was stamped 2 times"),
        (2, {"skip_lambda": lambda_of(2000.0)}, "wanted None and"),
        (0, {"generation": 1, "skip_lambda": lambda_of(MAG)}, "before it was asked for"),
    ],
)
def test_a_wrong_record_is_seen(evidence, line, changes, words):
    found = faults(replaced(evidence, line, **changes))
    assert any(words in line for line in found), found


def changed(evidence, number, **changes):
    answers = list(evidence.answers)
    answers[number] = dataclasses.replace(answers[number], **changes)
    return dataclasses.replace(evidence, answers=answers)


def test_an_answer_that_looks_like_another_threshold_is_seen(evidence):
    wrong = changed(evidence, 0, fingerprint={"a": -1.5, "b": -1.7})
    assert any("looks like" in line for line in faults(wrong))


def test_a_run_without_an_answer_to_compare_proves_nothing(evidence):
    for number, answer in enumerate(evidence.answers):
        evidence = changed(evidence, number, ask=dataclasses.replace(answer.ask, salt=False))
    (fault,) = faults(evidence)
    assert "no answer was compared" in fault


@pytest.mark.parametrize("status", [0, 500, 503])
def test_a_failure_is_excused_by_an_outage_and_by_nothing_else(evidence, status):
    assert any("while all ran" in line for line in faults(changed(evidence, 0, status=status)))
    later = changed(evidence, 0, status=status, began=99.0, ended=100.5)
    assert faults(later) == []
    assert any("while all ran" in line for line in faults(changed(later, 0, status=400)))


def test_lost_changes_counters_and_processes_are_seen(evidence):
    other = [Write(lambda_of(500.0), 6.0, 7.0, 1)]
    assert any("was lost" in x for x in faults(dataclasses.replace(evidence, writes=other)))
    (evidence.state / "audit.jsonl").write_text("")
    assert any("not in the audit log" in x for x in faults(evidence))
    down = [Outage("worker", 100.0, 101.0)]
    assert any("never ended" in x for x in faults(dataclasses.replace(evidence, engine=down)))
    evidence.watchers.seen.append(Seen("api", time.monotonic(), time.monotonic(), 1, 0.9))
    assert any("has lambda" in x for x in faults(evidence))
