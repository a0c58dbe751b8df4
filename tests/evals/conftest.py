"""A tiny tokenizer, a made-up essay, and the fake server of fake_server.py."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blasst.evals.client import Completions
from blasst.evals.prompts import PromptEncoder
from blasst.evals.runner import Runner, RunOptions
from blasst.evals.samples import Sample, generate
from blasst.evals.sidecar import Sidecar
from blasst.evals.store import ResultStore
from blasst.evals.tasks import Draw, Haystack, tasks


@pytest.fixture(scope="session")
def fake_module() -> ModuleType:
    path = Path(__file__).with_name("fake_server.py")
    spec = importlib.util.spec_from_file_location("blasst_tests_fake_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake(fake_module: ModuleType) -> Any:
    """State and faults of the server at `fake_url`."""
    return fake_module.Fake()


@pytest.fixture
def fake_url(fake_module: ModuleType, fake: Any) -> Iterator[str]:
    with fake_module.serving(fake) as url:
        yield url


@pytest.fixture(scope="session")
def essay() -> tuple[str, ...]:
    """3,000 words in sentences of 4 to 20."""
    rng = random.Random(1)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(300)]
    words: list[str] = []
    while len(words) < 3000:
        sentence = rng.choices(vocabulary, k=rng.randint(4, 20))
        words += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return tuple(words)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, essay: tuple[str, ...]) -> Path:
    """A folder with a byte-level BPE of 900 tokens and ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[
            AddedToken(t, special=True) for t in ("<pad>", "<|im_start|>", "<|im_end|>")
        ],
    )
    named = [tasks()[name] for name in ("niah_single_2", "niah_multivalue", "vt", "cwe", "fwe")]
    drafts = (t.draw(Draw(t.name, 1024, 0, 0, Haystack(essay))).render(20) for t in named)
    texts = [text for draft in drafts for text in (draft.user, draft.prefix)]
    tokenizer.train_from_iterator([" ".join(essay), *texts * 20], trainer)
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def encoder(tiny_model: Path) -> PromptEncoder:
    return PromptEncoder(tiny_model)


@pytest.fixture(scope="session")
def haystack(essay: tuple[str, ...]) -> Haystack:
    return Haystack(essay)


@pytest.fixture(scope="session")
def samples(encoder: PromptEncoder, haystack: Haystack) -> list[Sample]:
    """Two samples of two tasks at 1024 tokens."""
    return [
        sample
        for task in ("niah_single_2", "vt")
        for sample in generate(task, 1024, 2, seed=3, encoder=encoder, haystack=haystack)
    ]


@pytest.fixture
def connect(fake: Any, fake_url: str) -> Iterator[Any]:
    """connect(store, **options) -> Runner on the fake server; its clients are closed."""
    closing: list[Any] = []

    def make(store: ResultStore, **options: Any) -> Runner:
        client, sidecar = Completions(fake_url, timeout_s=20), Sidecar(fake_url)
        closing.extend((client, sidecar))
        return Runner(client, sidecar, store, RunOptions(**({"settle_s": 0.3} | options)))

    yield make
    for client in closing:
        client.close()
