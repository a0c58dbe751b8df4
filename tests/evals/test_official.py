"""Official mode against NVIDIA's own generators, run as a program of their own."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blasst.evals import models
from blasst.evals.data import DataFiles
from blasst.evals.errors import EvalsError, InputError
from blasst.evals.official.common import Count, Request
from blasst.evals.official.encode import generate_official, program_limit
from blasst.evals.official.samples import Materials, official_samples
from blasst.evals.official.sentences import cut
from blasst.evals.prompts import PromptEncoder
from blasst.evals.tasks import task_named, tasks
from blasst.evals.wordlists import KeyList, WordLists

SAMPLES = 3
SHORT = 400
"""Words of each list in most comparisons: 6.2 million keys take NVIDIA's program 8 s a task."""
CASES = [f"{task}:{length}" for length in (4096, 8192) for task in tasks()]
FULL = ["niah_multiquery:4096", "cwe:4096"]


def quiet(text: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's package, unpacked; `make test` fetches it before."""
    try:
        (wheel,) = models.ruler_package(quiet).glob("*.whl")
    except EvalsError as e:
        pytest.skip(f"NVIDIA's package is not here and cannot be fetched: {e}")
    folder = tmp_path_factory.mktemp("nvidia")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def materials() -> Materials:
    return DataFiles(None, quiet).materials()


@pytest.fixture(scope="module")
def count() -> Count:
    encoder = PromptEncoder(models.smollm2_folder(quiet))
    return encoder.count


@pytest.fixture(scope="module")
def program(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """program(cases, words) -> folder with LENGTH/TASK/validation.jsonl."""

    def run(cases: list[str], words: int) -> Path:
        out = tmp_path_factory.mktemp("out")
        script = Path(__file__).with_name("nvidia_program.py")
        command = [sys.executable, str(script), str(package), str(out)]
        command += [str(models.smollm2_folder(quiet)), str(SAMPLES), str(words), *cases]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        return out

    return run


@pytest.fixture(scope="module")
def short_lists(program: Callable[..., Path]) -> Path:
    return program(CASES, SHORT)


@pytest.fixture(scope="module")
def full_lists(program: Callable[..., Path]) -> Path:
    return program(FULL, 0)


def compare(case: str, folder: Path, materials: Materials, count: Count) -> None:
    task, length = case.split(":")
    lines = (folder / length / task / "validation.jsonl").read_text().splitlines()
    theirs = [json.loads(line) for line in lines]
    request = Request(int(length), task_named(task).max_tokens, SAMPLES, 42, count)
    ours = list(official_samples(task, request, materials))
    assert len(theirs) == len(ours) == SAMPLES
    for their, our in zip(theirs, ours, strict=True):
        assert our.text.encode() == their["input"].encode()
        assert list(our.answers) == their["outputs"]
        assert our.length == their["length"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_that_of_nvidias_program(
    case: str, short_lists: Path, materials: Materials, count: Count
) -> None:
    lists = materials.lists
    short = WordLists(lists.nouns[:SHORT], lists.adjectives[:SHORT], lists.verbs[:SHORT])
    keys = KeyList(short.adjectives, short.nouns)
    compare(case, short_lists, Materials(short, keys, materials.essay, materials.qa), count)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL)
def test_with_whole_word_lists_too(
    case: str, full_lists: Path, materials: Materials, count: Count
) -> None:
    compare(case, full_lists, materials, count)


def test_essays_are_cut_as_by_nltk(materials: Materials) -> None:
    """The digest is that of NLTK 3.10.4 with its own data (punkt_tab), made with that program."""
    words = materials.essay.words
    found = materials.essay.first(len(words))
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()
    assert len(found) == 31_395
    assert digest == "ad419a7bc7f114fa89c8c885aa6f25434b6a931d2f9480e0776e581c16993aa3"
    assert cut("A long word. ... I do. He left ... And none. ...") == [
        "A long word.",
        "...",
        "I do.",
        "He left ... And none.",
        "...",
    ]


@given(st.lists(st.text("ab-", max_size=4)), st.lists(st.text("ab-", max_size=4), min_size=1))
def test_the_key_list_is_the_sorted_set_of_all_pairs(
    adjectives: list[str], nouns: list[str]
) -> None:
    keys = KeyList(adjectives, nouns)
    assert list(keys) == sorted({f"{a}-{n}" for a in adjectives for n in nouns})


def test_the_whole_key_list_is_sorted_and_has_no_duplicates(materials: Materials) -> None:
    keys = materials.keys
    assert len(keys) == 910 * 6782
    near = [keys[i] for i in range(0, len(keys), 1009)]
    assert near == sorted(set(near))
    places = random.Random(1).sample(range(len(keys) - 1), 2000)
    assert all(keys[i] < keys[i + 1] for i in places)


@pytest.mark.parametrize("task", list(tasks()))
def test_official_samples_as_token_ids(
    task: str, materials: Materials, encoder: PromptEncoder
) -> None:
    """With the chat format, an answer prefix at the end, and never more tokens than said."""
    length = 8192
    make = functools.partial(generate_official, seed=42, encoder=encoder, materials=materials)
    made = list(make(task, length, 2))
    texts = official_samples(
        task,
        Request(
            program_limit(task, length, encoder), task_named(task).max_tokens, 2, 42, encoder.count
        ),
        materials,
    )
    for sample, official in zip(made, texts, strict=True):
        assert len(sample.prompt) + sample.max_tokens <= length
        text = encoder.decode(sample.prompt)
        assert text.count("<|im_start|>") == 2
        user, _, prefix = text.partition("<|im_end|>\n<|im_start|>assistant\n")
        assert user.removeprefix("<|im_start|>user\n") + prefix == official.text
        assert prefix.startswith((" Answer:", " The special magic"))
        assert sample.answers == official.answers
        assert sample.id == f"official/{task}/{length}/42/{sample.index}"
    assert next(iter(make(task, length, 1))) == made[0]


def test_too_short_a_length_ends_with_an_error(
    materials: Materials, encoder: PromptEncoder
) -> None:
    """Where NVIDIA's program would try for ever."""
    with pytest.raises(InputError, match=r"official qa_1 at 600: .*too few"):
        list(generate_official("qa_1", 600, 1, seed=1, encoder=encoder, materials=materials))
