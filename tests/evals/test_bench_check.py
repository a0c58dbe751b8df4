"""The comparison with `vllm bench serve`, with stand-ins for that program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.bench_check import compare
from blasst.evals.client import Completions
from blasst.evals.errors import InputError, ServerError
from blasst.evals.prompts import PromptEncoder
from blasst.evals.samples import Sample

PROGRAM = """
import json, sys
flat = sys.argv
value = lambda name: flat[flat.index(name) + 1]
if FAIL: sys.exit("no such model")
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(value("--tokenizer") + "/tokenizer.json")
lines = [json.loads(line) for line in open(value("--dataset-path"))]
assert "cache_salt" in json.loads(value("--extra-body"))
assert value("--max-concurrency") == "1" and value("--num-prompts") == str(len(lines))
lens = [len(tokenizer.encode(x["prompt"], add_special_tokens=False).ids) + EXTRA for x in lines]
body = {"ttfts": [SECONDS] * len(lines), "input_lens": lens}
json.dump(body, open(value("--result-dir") + "/" + value("--result-filename"), "w"))
"""


@pytest.fixture(autouse=True)
def fake_that_reads_text(fake: Any, encoder: PromptEncoder) -> Any:
    fake.encode = lambda text: encoder.tokenizer.encode(text, add_special_tokens=False).ids
    return fake


def run(
    tmp_path: Path, url: str, model: Path, encoder: PromptEncoder, samples: list[Sample], **v: Any
) -> Any:
    rounds = v.pop("rounds", 1)
    values = {"FAIL": False, "EXTRA": 0, "SECONDS": 0.04} | v
    text = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + PROGRAM
    script = tmp_path / "vllm.py"
    script.write_text(text)
    client = Completions(url, timeout_s=20)
    try:
        command = [sys.executable, str(script)]
        return compare(client, "fake-model", model, samples, encoder, command, rounds)
    finally:
        client.close()


def test_ratio_is_taken_prompt_by_prompt(
    tmp_path: Path, fake_url: str, tiny_model: Path, encoder: PromptEncoder, samples: list[Sample]
) -> None:
    found = run(tmp_path, fake_url, tiny_model, encoder, samples)
    assert len(found.ours) == len(found.theirs) == 4
    assert all(0.03 <= seconds < 1 for seconds in found.ours)
    with pytest.raises(InputError, match="--rounds 0"):
        run(tmp_path, fake_url, tiny_model, encoder, samples, rounds=0)
    two = run(tmp_path, fake_url, tiny_model, encoder, samples, rounds=2)
    assert two.theirs == (0.04,) * 4
    same = run(tmp_path, fake_url, tiny_model, encoder, samples, SECONDS=found.ours[0])
    assert 0.3 < same.ratio < 3
    assert not run(tmp_path, fake_url, tiny_model, encoder, samples, SECONDS=9.0).agrees


def test_ours_sends_what_theirs_sends(
    tmp_path: Path,
    fake: Any,
    fake_url: str,
    tiny_model: Path,
    encoder: PromptEncoder,
    samples: list[Sample],
) -> None:
    """Text without special tokens, each time with a salt of its own."""
    run(tmp_path, fake_url, tiny_model, encoder, samples)
    sent = [body for body in fake.prompts if "add_special_tokens" in body]
    assert [tuple(body["prompt"]) for body in sent] == [s.prompt for s in samples] * 2
    assert not any(body["add_special_tokens"] for body in sent)
    assert len({body["cache_salt"] for body in sent}) == 8


@pytest.mark.parametrize(
    ("change", "words"), [({"EXTRA": 1}, "not the same prompts"), ({"FAIL": True}, "no such model")]
)
def test_another_prompt_or_a_failure_is_an_error(
    change: dict[str, Any],
    words: str,
    tmp_path: Path,
    fake_url: str,
    tiny_model: Path,
    encoder: PromptEncoder,
    samples: list[Sample],
) -> None:
    with pytest.raises(ServerError, match=words):
        run(tmp_path, fake_url, tiny_model, encoder, samples, **change)
