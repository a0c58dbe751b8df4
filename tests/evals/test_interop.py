"""Other programs on the same answers: NVIDIA's evaluation agrees, lm-eval's formula does not."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blasst.evals import models
from blasst.evals.cells import Results, collect
from blasst.evals.data import DataFiles
from blasst.evals.errors import EvalsError, InputError
from blasst.evals.interop import (
    bench_prompts,
    nvidia_predictions,
    nvidia_samples,
    prompt_text,
)
from blasst.evals.metrics import match, string_match_part
from blasst.evals.progress import Progress
from blasst.evals.prompts import PromptEncoder
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample, read_samples
from blasst.evals.store import ResultStore
from blasst.evals.sweep import Plan, run_sweep
from blasst.evals.tasks import tasks
from blasst.evals.thresholds import parse_points
from blasst.server.cli import main

ANSWERS = ["1234567", "Art", "the grey-cat", "No", "ABCDE"]
WORDS = [*ANSWERS, "party", "not found", "765", "\x07", "\n", "grey", "", "abcde,", "art."]


def quiet(text: str) -> None:
    """Nobody listens."""


def made_up() -> Results:
    """30 samples of every task, with answers that are right, wrong, partly right or odd."""
    rng = random.Random(4)
    plan: dict[str, Any] = {"kind": "plan", "fingerprint": "f", "server": {}, "at": 0.0}
    plan |= {"thresholds": ["dense"], "lengths": [4096], "tasks": list(tasks())}
    records = [plan]
    for task in tasks():
        for i in range(30):
            answers = rng.sample(ANSWERS, rng.randint(1, 4))
            prediction = rng.choice(["", " "]).join(rng.choices(WORDS, k=rng.randint(0, 6)))
            record = {"kind": "sample", "pass": "accuracy", "fingerprint": "f", "index": i}
            record |= {"threshold": "dense", "task": task, "length": 4096, "sample": f"{task}/{i}"}
            record |= {"prediction": prediction, "answers": answers, "prompt_sha256": f"{i}"}
            record |= {"match": match(tasks()[task].metric, prediction, answers)}
            record |= {"gold_nll": 0.0, "prompt_tokens": 1, "visited": 0, "skipped": 0}
            records.append(record | {"layers": []})
    return collect(records)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's package, unpacked."""
    try:
        (wheel,) = models.ruler_package(quiet).glob("*.whl")
    except EvalsError as e:
        pytest.skip(f"NVIDIA's package is not here and cannot be fetched: {e}")
    folder = tmp_path_factory.mktemp("nvidia")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder)
    return folder


def test_nvidias_program_gives_the_same_score_to_every_answer(
    tmp_path: Path, package: Path
) -> None:
    results, out = made_up(), tmp_path / "answers"
    assert len(nvidia_predictions(results, None, 4096, out)) == 13
    nvidia(package, "evaluate", str(out))
    theirs = json.loads((out / "per_sample_scores.json").read_text())
    assert list(theirs) == list(tasks())
    seen = set()
    for task, scores in theirs.items():
        ours = [100 * r["match"] for r in results.accuracy if r["task"] == task]
        assert scores == pytest.approx(ours)
        assert results.cell(None, task, 4096).score == round(sum(scores) / 30, 2)
        seen |= {round(score) for score in scores}
    assert {0, 25, 33, 50, 67, 100} <= seen


def nvidia(package: Path, *words: str) -> None:
    script = Path(__file__).with_name("nvidia_program.py")
    command = [sys.executable, str(script), str(package), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nvidias_client_gets_our_answers_to_our_samples(
    tmp_path: Path,
    fake: Any,
    fake_url: str,
    connect: Callable[..., Runner],
    samples: list[Sample],
    encoder: PromptEncoder,
    package: Path,
) -> None:
    """Its prompts are text: the server reads the same ids, so that the same answers come back."""
    fake.encode = lambda text: encoder.tokenizer.encode(text).ids
    fake.answers = {s.prompt: f"{i} {s.answers[0]} {'x' * i}" for i, s in enumerate(samples)}
    with ResultStore(tmp_path / "r.jsonl") as store:
        run_sweep(connect(store), Plan((None,), samples), Progress(0, quiet=True))
        ours = {(r["task"], r["index"]): r for r in store.records if r["kind"] == "sample"}
    data, out = tmp_path / "data", tmp_path / "out"
    names = [path.parent.name for path in nvidia_samples(samples, encoder, data)]
    nvidia(package, "predict", str(data), str(out), f"{fake_url}/v1/completions", "m", *names)
    nvidia(package, "evaluate", str(out))
    scores = json.loads((out / "per_sample_scores.json").read_text())
    for name in names:
        lines = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        mine = [ours[name, line["index"]] for line in lines]
        assert [line["pred"] for line in lines] == [r["prediction"] for r in mine]
        assert scores[name] == pytest.approx([100 * r["match"] for r in mine])
    assert {len(scores[name]) for name in names} == {2}


def test_generate_writes_the_samples_for_nvidias_client_too(
    tmp_path: Path, tiny_model: Path, essay: tuple[str, ...], encoder: PromptEncoder
) -> None:
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(essay)}))
    argv = ["ruler", "generate", "--model", str(tiny_model), "--out", str(tmp_path / "s")]
    argv += ["--tasks", "niah_single_2", "fwe", "--lengths", "1024", "--count", "2"]
    assert main([*argv, "--data", str(tmp_path), "--nvidia", str(tmp_path / "n")]) == 0
    for sample in read_samples(tmp_path / "s"):
        lines = (tmp_path / "n" / sample.task / "validation.jsonl").read_text().splitlines()
        line = json.loads(lines[sample.index])
        assert tuple(encoder.tokenizer.encode(line["input"]).ids) == sample.prompt
        assert (line["index"], line["outputs"]) == (sample.index, list(sample.answers))


def test_text_for_nvidias_client_has_one_start_token_or_is_refused(
    tmp_path: Path, samples: list[Sample], encoder: PromptEncoder
) -> None:
    from tokenizers.processors import TemplateProcessing

    own = copy.deepcopy(encoder)
    start = ("<|im_start|>", encoder.start_id)
    own.tokenizer.post_processor = TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    (path,) = nvidia_samples(samples[:1], own, tmp_path)
    text = json.loads(path.read_text())["input"]
    assert text == encoder.decode(samples[0].prompt[1:])
    assert tuple(own.tokenizer.encode(text).ids) == samples[0].prompt
    end = ("<|im_end|>", encoder.tokenizer.token_to_id("<|im_end|>"))
    own.tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    with pytest.raises(InputError, match="no text is read as its tokens"):
        nvidia_samples(samples[:1], own, tmp_path)
    longer = replace(samples[1], length=2048)
    with pytest.raises(InputError, match=r"one length at a time, not \[1024, 2048\]"):
        nvidia_samples([samples[0], longer], encoder, tmp_path)


def test_lm_evals_formula_for_qa_punishes_right_answers() -> None:
    """It takes the share of the references that were found, where RULER asks for any of them."""
    try:
        questions = DataFiles(None, quiet).qa("qa_1").questions[:500]
    except EvalsError as e:
        pytest.skip(f"SQuAD is not here and cannot be fetched: {e}")

    def share(prediction: str, answers: tuple[str, ...]) -> float:
        return sum(a.lower() in prediction.lower() for a in answers) / len(answers)

    first = [(q.answers[0], q.answers) for q in questions]
    assert sum(string_match_part(p, a) for p, a in first) / 5 == 100.0
    assert sum(share(p, a) for p, a in first) / 5 == pytest.approx(85.97, abs=0.01)


def test_nothing_to_export_is_an_error(tmp_path: Path) -> None:
    (point,) = parse_points(["1000"], [], [])
    with pytest.raises(InputError, match="no answer under MAG 1000"):
        nvidia_predictions(made_up(), point, 4096, tmp_path)


def test_prompts_for_a_benchmark_are_the_same_tokens(
    tmp_path: Path, samples: list[Sample], encoder: PromptEncoder
) -> None:
    texts = [prompt_text(sample, encoder) for sample in samples]
    path = bench_prompts(texts, tmp_path / "p.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, sample in zip(lines, samples, strict=True):
        ids = encoder.tokenizer.encode(line["prompt"], add_special_tokens=False).ids
        assert tuple(ids) == sample.prompt
