"""The fidelity doctor against a server that reads prompts right, and one for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.client import Completions
from blasst.evals.fidelity import Finding, Probe, examine, probe_of
from blasst.evals.prompts import PromptEncoder
from blasst.evals.tasks import Draw, Haystack, tasks
from blasst.server.cli import main


@pytest.fixture
def probe(encoder: PromptEncoder, haystack: Haystack, fake: Any) -> Probe:
    draft = tasks()["niah_single_1"].draw(Draw("niah_single_1", 1024, 1, 0, haystack))
    text = draft.render(12)
    fake.prefix_tokens = encoder.count(text.prefix)
    fake.start_id = encoder.start_id
    return probe_of(encoder, text.user, text.prefix, 4096)


def findings(url: str, encoder: PromptEncoder, probe: Probe) -> dict[str, Finding]:
    client = Completions(url, timeout_s=20)
    try:
        found = examine(client, client.model(), encoder, probe)
    finally:
        client.close()
    return {f.check: f for f in found}


def test_a_faithful_server_has_no_fault(
    fake_url: str, encoder: PromptEncoder, probe: Probe
) -> None:
    found = findings(fake_url, encoder, probe)
    own = ("max_model_len", "answer prefix", "start token", "truncation", "template extras")
    assert [found[name].grade for name in (*own, "prefix cache")] == ["ok"] * 6
    assert [found[name].grade for name in ("text prompts", "chat messages")] == ["note"] * 2


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("drops-prefix", "answer prefix", "does not end with the answer prefix"),
        ("two-starts", "start token", "3 start tokens instead of 2"),
        ("no-start", "start token", "1 start tokens instead of 2"),
        ("cuts-the-front", "truncation", "tokens are missing, from token 0 on"),
        ("system-header", "template extras", "the server put in"),
        ("ignores-salts", "prefix cache", "came from the cache"),
    ],
)
def test_each_fault_is_found(
    fault: str,
    check: str,
    words: str,
    fake: Any,
    fake_url: str,
    encoder: PromptEncoder,
    probe: Probe,
) -> None:
    fake.faults = {fault}
    found = findings(fake_url, encoder, probe)
    assert found[check].grade == "fault"
    assert words in found[check].words


def test_too_small_a_server_is_found(
    fake: Any, fake_url: str, encoder: PromptEncoder, probe: Probe
) -> None:
    fake.max_model_len = 4095
    found = findings(fake_url, encoder, probe)
    assert found["max_model_len"].grade == "fault"
    assert "--max-model-len 4096" in found["max_model_len"].words


def test_the_verb_asks_a_server_that_is_too_small_what_it_can_take(
    fake: Any, fake_url: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.max_model_len = 1024
    argv = ["ruler", "doctor", "--url", fake_url, "--model", str(tiny_model), "--json"]
    assert main([*argv, "--lengths", "65536"]) == 1
    grades = {f["check"]: f["grade"] for f in json.loads(capsys.readouterr().out)}
    assert [check for check, grade in grades.items() if grade == "fault"] == ["max_model_len"]


def test_without_cache_metrics_the_time_tells(
    fake: Any, fake_url: str, encoder: PromptEncoder, probe: Probe
) -> None:
    fake.faults = {"no-cache-metrics"}
    assert findings(fake_url, encoder, probe)["prefix cache"].grade == "ok"


@pytest.mark.parametrize(("faults", "code"), [(set(), 0), ({"drops-prefix"}, 1)])
def test_the_verb_says_so_with_its_exit_code(
    faults: set[str],
    code: int,
    fake: Any,
    fake_url: str,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.faults, fake.prefix_tokens = faults, 5
    argv = ["ruler", "doctor", "--url", fake_url, "--model", str(tiny_model), "--json"]
    assert main([*argv, "--lengths", "2048"]) == code
    grades = {f["check"]: f["grade"] for f in json.loads(capsys.readouterr().out)}
    assert grades["answer prefix"] == ("fault" if code else "ok")
