"""Other programs on the same answers: NVIDIA's evaluation agrees, lm-eval's formula does not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from blasst.evals import models
from blasst.evals.cells import Results, collect
from blasst.evals.data import DataFiles
from blasst.evals.errors import EvalsError, InputError
from blasst.evals.interop import bench_prompts, nvidia_predictions, prompt_text
from blasst.evals.metrics import match, string_match_part
from blasst.evals.prompts import PromptEncoder
from blasst.evals.samples import Sample
from blasst.evals.tasks import tasks
from blasst.evals.thresholds import parse_points

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


def test_nvidias_program_gives_the_same_score_to_every_answer(tmp_path: Path) -> None:
    try:
        (wheel,) = models.ruler_package(quiet).glob("*.whl")
    except EvalsError as e:
        pytest.skip(f"NVIDIA's package is not here and cannot be fetched: {e}")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(tmp_path / "package")
    results, out = made_up(), tmp_path / "answers"
    assert len(nvidia_predictions(results, None, 4096, out)) == 13
    script = Path(__file__).with_name("nvidia_program.py")
    command = [sys.executable, str(script), str(tmp_path / "package"), "evaluate", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((out / "per_sample_scores.json").read_text())
    assert list(theirs) == list(tasks())
    seen = set()
    for task, scores in theirs.items():
        ours = [100 * r["match"] for r in results.accuracy if r["task"] == task]
        assert scores == pytest.approx(ours)
        assert results.cell(None, task, 4096).score == round(sum(scores) / 30, 2)
        seen |= {round(score) for score in scores}
    assert {0, 25, 33, 50, 67, 100} <= seen


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
