"""How two answers are compared, and which plans of a canary are refused."""

from __future__ import annotations

import pytest

from blasst.server.canary_plan import Bounds, load_plan, load_prompts
from blasst.server.probe import (
    Answer,
    Endpoint,
    Position,
    ProbeError,
    Prompt,
    _read_answer,
    compare,
)
from blasst.server.settings import SettingsError


def positions(*tokens):
    return tuple(Position(t, -1.0, {t: -1.0, "other": -3.0}) for t in tokens)


def test_comparison():
    dense = Answer(positions("a", "b", "c", "d"), 7)
    shorter = compare(dense, Answer(positions("a", "b"), 7), positions("a"))
    assert (shorter.agreement, shorter.control, shorter.nll_increase) == (0.5, 0.25, 0.0)
    other = compare(dense, Answer(positions("x"), 7), dense.positions)
    assert other.agreement == 0.0
    assert other.nll_increase == pytest.approx(2.0), "at least as far as the least likely shown"
    with pytest.raises(ProbeError, match="empty"):
        compare(Answer((), 7), dense, ())


def test_what_vllm_answers_is_read_and_what_it_does_not_is_refused():
    def answer(top):
        found = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [top]}
        return {"choices": [{"logprobs": found}], "usage": {"prompt_tokens": 3}}

    assert _read_answer(answer({"a": -1.0})).positions == (Position("a", -1.0, {"a": -1.0}),)
    assert _read_answer(answer(None)).positions == (Position("a", -1.0, {}),)
    broken = answer({})
    broken["choices"][0]["logprobs"]["token_logprobs"] = [float("nan")]
    with pytest.raises(ValueError, match="ln p of a is nan"):
        _read_answer(broken)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("top_logprobs", [1]),
        ("top_logprobs", {"a": float("-inf")}),
        ("token_logprobs", 10**400),
        ("prompt_tokens", float("inf")),
        ("prompt_tokens", 0),
        ("prompt_tokens", True),
    ],
)
def test_whatever_the_endpoint_answers_is_a_failed_probe_at_worst(monkeypatch, where, value):
    found = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
    usage = {"prompt_tokens": 3}
    if where in found:
        found[where] = [value]
    else:
        usage[where] = value
    answer = {"choices": [{"logprobs": found}], "usage": usage}
    monkeypatch.setattr(Endpoint, "_call", lambda self, path, body: answer)
    with pytest.raises(ProbeError, match="lacks what vLLM answers"):
        Endpoint("http://127.0.0.1:1", "m").probe(Prompt("x"), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "is not TOML"),
        ("", "needs prompts"),
        ('prompts = "absent"', "cannot be read"),
        ('prompts = "p"\nwhat = 1', "'what' is unknown; it takes api_key_file"),
        ('prompts = "p"\ninterval_s = 0.1', "interval_s must be 1 to 86400 seconds, not 0.1"),
        ('prompts = "p"\nwindow = 2.5', "whole number of probes"),
        ('prompts = "p"\nmin_agreement = nan', "min_agreement must be 0 to 1"),
        ('prompts = "p"\nmin_probes = 50', "min_probes is above window"),
        ('prompts = "p"\nwatch_only = 1', "watch_only must be bool, not 1"),
        ('prompts = "p"\nat_ceiling = "up"', "at_ceiling must be dense or hold"),
        ('prompts = "p"\nurl = "file:///etc"', "must look like http"),
        ('prompts = "p"\napi_key_file = "open"', "others can read"),
        ('prompts = "bad"', "line 1 of"),
        ('prompts = "none"', "has 0 prompts"),
        ('prompts = "p\\u0000"', "prompts must be str"),
        ('prompts = "p"\nstep_mag = 1' + "0" * 400, "step_mag must be 1 to 10000 MAG"),
        ('prompts = "p"\nwhat = ' + "[" * 20_000, "is not TOML"),
        ('prompts = "p"\n#' + "x" * 65_536 + "\nwatch_only = true", "is larger than 65536 bytes"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_at_the_start(tmp_path, text, message):
    (tmp_path / "p").write_text('{"prompt": "x"}\n')
    (tmp_path / "bad").write_text('{"prompt": "x", "messages": []}\n')
    (tmp_path / "none").write_text("\n")
    (tmp_path / "open").write_text("key")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_plan(tmp_path / "plan.toml", "http://127.0.0.1:8000")


def test_a_plan_with_everything(tmp_path):
    (tmp_path / "p").write_text(
        '{"prompt": "x"}\n\n{"messages": [{"role": "user"}]}\n{"prompt": [1]}'
    )
    key = tmp_path / "key"
    key.write_text("k-1\n")
    key.chmod(0o600)
    (tmp_path / "plan.toml").write_text(
        'prompts = "p"\nurl = "http://h:1/"\nmodel = "m"\napi_key_file = "key"\ninterval_s = 5\n'
        "window = 9\nmin_probes = 2\nmax_tokens = 7\ncooldown_s = 1\nstep_mag = 100\n"
        'ceiling_mag = 5000\nat_ceiling = "hold"\nwatch_only = true\nmin_agreement = 0.5\n'
        "max_nll_increase = 0.5\nmargin = 0.1\ntimeout_s = 3\n"
    )
    plan = load_plan(tmp_path / "plan.toml", "http://127.0.0.1:8000")
    assert plan.endpoint == Endpoint("http://h:1", "m", "k-1", 3)
    assert plan.bounds == Bounds(0.5, 0.5, 0.1)
    assert (plan.interval_s, plan.window, plan.at_ceiling, plan.watch_only) == (5, 9, "hold", True)
    assert [p.prompt for p in plan.prompts] == ["x", None, [1]]
    assert len(load_prompts(tmp_path / "p")) == 3


def test_text_may_hold_what_unicode_calls_the_end_of_a_line(tmp_path):
    (tmp_path / "p").write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\n', "utf-8")
    assert [p.prompt for p in load_prompts(tmp_path / "p")] == ["a\u2028b\x85c", "d"]
