"""The training program in small: documents, learning, resume, export; and damage that shows."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blasst.evals.errors import InputError
from blasst.evals.retrieval_model.config import Shape, Stage, Training, curriculum, read, shape_of
from blasst.evals.retrieval_model.damage import BLOCK, Damage
from blasst.evals.retrieval_model.documents import EOS, EVALUATED, Documents
from blasst.evals.retrieval_model.experiment import experiment, measure
from blasst.evals.retrieval_model.model import RetrievalModel, dense, load
from blasst.evals.retrieval_model.optimizer import orthogonal
from blasst.evals.retrieval_model.tokenizer import build_tokenizer
from blasst.evals.retrieval_model.train import Trainer, export, score

TEXT = (
    "Once there was a small model. It read a long text, and it remembered a few words of it. " * 60
)
TINY = Shape(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, feed_forward=96, vocabulary=600)
STAGE = Stage(600.0, {128: 1.0}, 1024, 1, (0.7, 0.1, 0.1, 0.1))
COUNTS = {"multivalue": 4, "multiquery": 4, "vt": 5, "fwe": 3, "cwe": 20}
TRAINING = Training(TINY, (STAGE,), rate=3e-3, warmup_steps=5, workers=0, leg_s=600, evaluate=2)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(TEXT, TINY.vocabulary)


@pytest.fixture
def documents(tokenizer: Any) -> Documents:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    return Documents(tokenizer, np.array(ids, np.int32), 3)


@pytest.mark.parametrize("task", EVALUATED)
def test_documents_hold_their_answers(task: str, documents: Documents, tokenizer: Any) -> None:
    length = 3000 if task == "cwe" else 1024  # this small vocabulary needs many tokens a word
    ids, weights = documents.evaluation(task, 3, length)
    assert ids.shape == weights.shape == (3, length)
    for row, weight in zip(ids, weights, strict=True):
        assert row[0] == 1
        assert (weight > 0).any()
        if task == "copy":
            continue
        text = tokenizer.decode(row[: int(np.nonzero(weight)[0][0])].tolist())
        answer = tokenizer.decode(row[weight > 0].tolist())
        words = answer.replace(",", " ").replace(" and ", " ").strip(" .").split()
        assert len(words) == COUNTS.get(task, 1)
        assert all(word in text for word in words)


def test_pieces_are_the_tokens_of_the_text(documents: Documents, tokenizer: Any) -> None:
    for task in ("multikey", "uuids", "vt", "fwe", "cwe"):  # running text is cut anywhere
        (ids,), _ = documents.evaluation(task, 1, 3000)
        found = ids[1:][ids[1:] > EOS].tolist()
        assert tokenizer.encode(tokenizer.decode(found), add_special_tokens=False).ids == found


@pytest.mark.parametrize("kind", range(1, 4))
def test_every_answer_has_an_end(kind: int, documents: Documents) -> None:
    mix = [float(kind == i) for i in range(4)]
    for _ in range(4):
        (ids,), (weights,) = documents.batch(1, 900, mix)
        ends = np.nonzero(ids == EOS)[0]
        assert len(ends) > 0
        assert (weights[ends] > 0).all()
        assert (weights[ends - 1] > 0).all()
        assert set(ids[ends[-1] + 1 :]) <= {0}


def test_going_on_from_a_model_keeps_its_weights_and_words(tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = RetrievalModel(TINY)
    export(model, tokenizer, tmp_path / "model")
    other = replace(TRAINING, shape=Shape())  # the folder's own shape counts
    trainer = Trainer(other, TEXT + "Unheard of.", tmp_path, print, tmp_path / "model")
    assert trainer.model.shape == TINY
    assert trainer.tokenizer.get_vocab() == tokenizer.get_vocab()
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a.detach().bfloat16().float(), b)
    assert math.isfinite(trainer._step(STAGE, trainer._batches(STAGE))[0])


def test_a_given_tokenizer_is_used_with_weights_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    export(RetrievalModel(TINY), tokenizer, tmp_path / "model")
    given = Trainer(TRAINING, "Unheard of. " * 99, tmp_path, print, None, tmp_path / "model")
    assert given.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert given.model.shape == TINY
    built = Trainer(TRAINING, "Unheard of. " * 99, tmp_path, print)
    assert built.tokenizer.get_vocab() != tokenizer.get_vocab()


def test_time_that_a_gate_saves_goes_to_the_later_stages() -> None:
    plan = replace(TRAINING, stages=tuple(replace(STAGE, seconds=s) for s in (60.0, 10.0, 30.0)))
    assert [plan.stage_seconds(i, e) for i, e in enumerate((0, 60, 70))] == [60, 10, 30]
    assert plan.stage_seconds(1, 20) == 20  # a gate let the first one end after 20 s
    assert plan.stage_seconds(2, 40) == 60
    assert plan.stage_seconds(2, 120) == 0
    empty = replace(TRAINING, stages=(replace(STAGE, seconds=0.0),))
    assert empty.stage_seconds(0, 0) == 0


def test_a_passed_gate_ends_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blasst.evals.retrieval_model.train._GATE_S", 0.0)
    gated = replace(TRAINING, stages=(replace(STAGE, gate=0.0),))  # 0: always passed
    trainer = Trainer(gated, TEXT, tmp_path, lambda text: None)
    assert trainer.run() is True
    assert trainer.progress.step == 1


def test_the_batch_of_a_seed_is_always_the_same(documents: Documents, tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    again = Documents(tokenizer, np.array(ids, np.int32), 3)
    mix = (0.25, 0.25, 0.25, 0.25)
    assert np.array_equal(documents.batch(4, 512, mix)[0], again.batch(4, 512, mix)[0])


def test_a_few_steps_learn_and_a_second_leg_resumes(tmp_path: Path) -> None:
    said: list[str] = []
    trainer = Trainer(TRAINING, TEXT, tmp_path, said.append)
    batches = trainer._batches(STAGE)
    losses = [trainer._step(STAGE, batches)[0] for _ in range(30)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    trainer._training = replace(TRAINING, leg_s=0.0)
    assert trainer.run() is False
    resumed = Trainer(
        replace(TRAINING, stages=(replace(STAGE, seconds=0.0),)), TEXT, tmp_path, said.append
    )
    assert resumed.progress.step == 30
    assert said[-1] == "resumed at step 30"
    for a, b in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.run() is True
    assert set(resumed.evaluate(128, ("copy",))) == {"copy"}


def test_the_export_is_a_llama_with_the_same_logits(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = RetrievalModel(TINY)
    export(model, tokenizer, tmp_path)
    llama = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    again = load(tmp_path)
    assert shape_of(tmp_path) == TINY
    ids = torch.randint(3, 600, (1, 50))
    with torch.no_grad():
        ours = again.logits(again(ids))
        assert torch.allclose(ours, llama(ids).logits, atol=1e-4)
    assert max(p.stat().st_size for p in tmp_path.glob("*.safetensors")) <= 15_000_000


def test_the_default_model_is_that_of_the_measurements() -> None:
    with torch.device("meta"):
        model = RetrievalModel(Shape())
    assert sum(p.numel() for p in model.parameters()) == 25_698_816
    assert Training().total_s == 885
    assert [max(stage.lengths) for stage in curriculum()] == [256, 1024, 4096, 16384, 32768]


def test_orthogonal_updates_have_near_equal_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((2, 8, 24), (2, 24, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_a_configuration_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"shape": {"layers": 2}, "leg_s": 5}')
    found = read(path)
    assert (found.shape.layers, found.shape.hidden, found.leg_s) == (2, 512, 5)
    path.write_text('{"layer": 2}')
    with pytest.raises(InputError, match="not a training configuration"):
        read(path)


@pytest.fixture
def attention() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    heads = torch.randn(1, 2, 500, 32), torch.randn(1, 1, 500, 32), torch.randn(1, 1, 500, 32)
    return heads[0] * 2, heads[1], heads[2]


def test_no_damage_is_dense_and_lambda_zero_skips_nothing(attention: Any) -> None:
    for damage in (Damage(), Damage(skip_lambda=0.0)):
        assert torch.allclose(damage(*attention), dense(*attention), atol=1e-5)
        assert damage.skipped == 0
        assert damage.visited == 2 * 10


def test_skipped_tiles_are_those_of_the_rule_by_hand(attention: Any) -> None:
    q, k, v = attention
    k[..., 128:256, :] *= 0.01  # a block of flat scores
    damage = Damage(skip_lambda=0.5)
    damage(q, k, v)
    scores = (q[0] @ k[0].mT * 32**-0.5).masked_fill(
        ~torch.ones(500, 500, dtype=torch.bool).tril(), -math.inf
    )
    expected = 0
    for head in range(2):
        for m in range(4):
            rows = scores[head, m * BLOCK : (m + 1) * BLOCK]
            best = torch.full((len(rows),), -math.inf)
            for n in range(m, -1, -1):
                block = rows[:, n * BLOCK : (n + 1) * BLOCK].amax(1)
                expected += int(n < m and bool((block - best < math.log(0.5)).all()))
                best = torch.maximum(best, block)
    assert damage.skipped == expected > 0


def test_random_and_lost_tiles_leave_the_diagonal(attention: Any) -> None:
    everything = Damage(random_rate=1.0)
    out = everything(*attention)
    assert everything.skipped == 2 * 6
    assert out.isfinite().all()
    lost = Damage(lost=(130,))
    lost(*attention)
    assert lost.skipped == 2 * 2  # rows of blocks 2 and 3


def test_injected_damage_is_seen_in_nll(tmp_path: Path, tokenizer: Any) -> None:
    """A model that has learnt to copy loses it when tiles are taken away, and never at lambda 0."""
    trainer = Trainer(TRAINING, TEXT, tmp_path, lambda text: None)
    stage = replace(STAGE, lengths={256: 1.0}, micro=2048, mix=(1.0, 0.0, 0.0, 0.0))
    batches = trainer._batches(stage)
    for _ in range(40):
        trainer._step(stage, batches)
    docs = Documents(trainer.tokenizer, np.zeros(10, np.int32), 9)
    ids, weights = docs.evaluation("copy", 6, 512)
    pairs = list(zip(torch.from_numpy(ids).long(), torch.from_numpy(weights), strict=True))
    model = trainer.model.eval()
    good = measure(model, pairs, Damage())
    none = measure(model, pairs, Damage(skip_lambda=0.0))
    hurt = measure(model, pairs, Damage(random_rate=0.9))
    assert none["nll"] == pytest.approx(good["nll"], abs=1e-5)
    assert hurt["skip_rate"] > 0.3
    assert hurt["nll"] > good["nll"] + 0.01
    model.replace_attention(dense)
    found = score(model, torch.from_numpy(ids).long(), torch.from_numpy(weights))
    assert found.nll == pytest.approx(good["nll"], abs=1e-4)


def test_the_program_tells_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "blasst.evals.retrieval_model", "train"]
    command += ["--text", str(tmp_path / "none"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    with pytest.raises(InputError, match="give an exported folder"):
        list(experiment(tmp_path / "none", "multikey", 1, 256))
    with pytest.raises(InputError, match="choose one of copy, single"):
        list(experiment(tmp_path / "none", "nothing", 1, 256))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="not the config"):
        shape_of(tmp_path)
