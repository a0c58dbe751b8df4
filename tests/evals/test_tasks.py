"""Balanced mode of all 13 tasks: what is asked can be answered, and positions are even."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from blasst.evals.errors import InputError
from blasst.evals.kinds import NIAH
from blasst.evals.metrics import match
from blasst.evals.prompts import PromptEncoder
from blasst.evals.qa_data import QaSet, Question
from blasst.evals.samples import Sample, generate
from blasst.evals.tasks import Draw, Haystack, tasks

DOCUMENTS = tuple(f"Title {i}\n" + f"Fact{i} tells of thing {i}. " * 6 for i in range(400))
QUESTIONS = tuple(
    Question(f"What is number {i}?", (f"thing {i}", f"the {i}"), (i, i + 1), (i, i + 1, i + 2), ())
    for i in range(90)
)


@pytest.fixture(scope="session")
def full(essay: tuple[str, ...]) -> Haystack:
    return Haystack(essay, lambda task: QaSet(QUESTIONS, DOCUMENTS))


@pytest.mark.parametrize("length", [2048, 5000])
@pytest.mark.parametrize("task", list(tasks()))
def test_prompt_and_answer_fit_and_the_gold_answer_scores(
    task: str, length: int, encoder: PromptEncoder, full: Haystack
) -> None:
    for sample in generate(task, length, 4, seed=1, encoder=encoder, haystack=full):
        assert sample.need <= length
        assert sample.need > length - 250
        text = encoder.decode(sample.prompt)
        gold = encoder.decode(sample.gold)
        assert match(tasks()[task].metric, gold, sample.answers) == 1.0
        assert match(tasks()[task].metric, "nothing", sample.answers) == 0.0
        if task in NIAH:
            assert all(text.count(f"is: {a}.") == 1 for a in sample.answers)
            assert len(sample.needles) == len(sample.answers)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_1", "niah_multikey_3"])
def test_depths_of_one_needle_are_evenly_spread(
    task: str, encoder: PromptEncoder, full: Haystack
) -> None:
    made = generate(task, 2048, 20, seed=1, encoder=encoder, haystack=full)
    depths = sorted(sample.depths[0] for sample in made)
    assert max(b - a for a, b in pairwise(depths)) < 0.13
    assert depths[0] < 0.12
    assert depths[-1] > 0.78  # the question takes the rest


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_every_coordinate_of_the_spread_is_even(count: int, full: Haystack) -> None:
    points = [Draw("vt", 4096, 3, i, full).spread(count) for i in range(100)]
    for axis in zip(*points, strict=True):
        tenths = Counter(int(value * 10) for value in axis)
        assert set(tenths) == set(range(10))
        assert max(tenths.values()) <= 14
        assert min(tenths.values()) >= 6


def places(samples: list[Sample], encoder: PromptEncoder) -> list[float]:
    found = []
    for sample in samples:
        text = encoder.decode(sample.prompt)
        documents = re.findall(r"Document \d+:\nTitle (\d+)", text)
        number = int(sample.answers[0].removeprefix("thing "))
        found.append(documents.index(str(number)) / len(documents))
        assert len(set(documents)) == len(documents)
    return found


def test_the_gold_document_stands_anywhere(encoder: PromptEncoder, full: Haystack) -> None:
    made = list(generate("qa_2", 4096, 40, seed=1, encoder=encoder, haystack=full))
    tenths = Counter(int(place * 10) for place in places(made, encoder))
    assert len(tenths) == 10
    assert max(tenths.values()) <= 8
    assert len({sample.answers for sample in made}) == 40


def test_documents_that_are_too_few_come_again_and_the_gold_ones_once(
    encoder: PromptEncoder, essay: tuple[str, ...]
) -> None:
    """SQuAD's end at some 200,000 tokens."""
    few = Haystack(essay, lambda task: QaSet(QUESTIONS[:5], DOCUMENTS[:12]))
    for sample in generate("qa_1", 8192, 2, seed=1, encoder=encoder, haystack=few):
        assert len(sample.prompt) + sample.max_tokens > 0.97 * 8192
        counts = Counter(re.findall(r"Title (\d+)\n", encoder.decode(sample.prompt)))
        question = next(q for q in QUESTIONS if q.answers == sample.answers)
        assert {counts[str(gold)] for gold in question.gold} == {1}
        assert max(counts.values()) > 2


def test_a_size_without_another_token_is_not_the_end_of_a_text(
    encoder: PromptEncoder, full: Haystack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fwe at 1,024 tokens with seed 78."""
    draft = tasks()["vt"].draw(Draw("vt", 4096, 1, 0, full))
    least = tasks()["vt"].min_size
    some: Any = SimpleNamespace(
        gold=draft.gold,
        answers=draft.answers,
        render=lambda size: draft.render(least if size < least + 3 else size),
    )
    task = replace(tasks()["vt"], draw=lambda draw: some, step=1e6)
    monkeypatch.setattr("blasst.evals.samples.task_named", lambda name: task)
    (sample,) = generate("vt", 4096, 1, seed=1, encoder=encoder, haystack=full)
    assert len(sample.prompt) + sample.max_tokens > 0.97 * 4096


def test_texts_that_end_are_a_clear_error(
    encoder: PromptEncoder, full: Haystack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a search without an end."""
    draft = tasks()["vt"].draw(Draw("vt", 4096, 1, 0, full))
    end: Any = SimpleNamespace(
        gold=draft.gold, answers=draft.answers, render=lambda size: draft.render(min(size, 9))
    )
    task = replace(tasks()["vt"], draw=lambda draw: end)
    monkeypatch.setattr("blasst.evals.samples.task_named", lambda name: task)
    with pytest.raises(InputError, match=r"vt has no text for 4096 tokens: it ends at \d+"):
        next(generate("vt", 4096, 1, seed=1, encoder=encoder, haystack=full))


def test_each_list_of_words_has_its_own_order(encoder: PromptEncoder, full: Haystack) -> None:
    orders = []
    for sample in generate("cwe", 5000, 3, seed=1, encoder=encoder, haystack=full):
        asked = encoder.decode(sample.prompt).rpartition("Below is a numbered list")[2]
        words = re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", asked)
        counts = Counter(words)
        assert {w for w, n in counts.items() if n == 30} == set(sample.answers)
        assert set(counts.values()) == {30, 3}
        assert all(a not in w for a in sample.answers for w in counts if w != a)
        orders.append([i for i, w in enumerate(words) if w == sample.answers[0]])
    assert len({tuple(order[:5]) for order in orders}) == 3


def test_more_words_than_the_list_has(full: Haystack) -> None:
    draft = tasks()["cwe"].draw(Draw("cwe", 1 << 20, 1, 0, full))
    words = re.findall(
        r"\d+\. (.+?)(?= \d+\. |\n|$)", draft.render(9000).user.rpartition("Below")[2]
    )
    counts = Counter(words)
    assert len(counts) == 9000
    assert sorted(set(counts.values())) == [3, 30]


def test_frequent_words_are_the_three_after_the_dots(
    encoder: PromptEncoder, full: Haystack
) -> None:
    for sample in generate("fwe", 5000, 3, seed=1, encoder=encoder, haystack=full):
        text = encoder.decode(sample.prompt).partition("coded words. ")[2].partition("\n")[0]
        ranked = [word for word, _ in Counter(text.split()).most_common(4)]
        assert ranked == ["...", *sample.answers]


def test_no_data_set_and_too_many_questions_are_clear_errors(
    encoder: PromptEncoder, haystack: Haystack, full: Haystack
) -> None:
    with pytest.raises(InputError, match="ruler fetch"):
        next(generate("qa_1", 2048, 1, seed=1, encoder=encoder, haystack=haystack))
    with pytest.raises(InputError, match="has 90 questions"):
        list(generate("qa_2", 1024, 91, seed=1, encoder=encoder, haystack=full))
