"""SQuAD 2.0 and HotpotQA as RULER reads them: questions with answers, and one list of documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.evals.errors import InputError


@dataclass(frozen=True)
class Question:
    """gold: documents that hold the answer. context: those that RULER puts in first (for SQuAD the
    gold one, for HotpotQA all ten). more: others of the same article. Indexes into `documents`."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    context: tuple[int, ...]
    more: tuple[int, ...]


@dataclass(frozen=True)
class QaSet:
    """documents: distinct, sorted."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def read_squad(path: Path) -> QaSet:
    """Only questions that have an answer, in file order. Raises InputError."""
    return _read(path, "SQuAD 2.0", _squad)


def read_hotpotqa(path: Path) -> QaSet:
    """The development set with distractors, in file order. Raises InputError."""
    return _read(path, "HotpotQA", _hotpotqa)


def _read(path: Path, name: str, parse: Callable[[Any], QaSet]) -> QaSet:
    try:
        found = parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path} is not a {name} file: {e!r}; see docs/ruler.md, Data") from e
    if not found.questions:
        raise InputError(f"{path} holds no question with an answer")
    return found


def _squad(data: Any) -> QaSet:
    articles = data["data"]
    documents = sorted({p["context"] for a in articles for p in a["paragraphs"]})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for article in articles:
        inside = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            more = tuple(i for i in inside if i != own)
            questions += [
                Question(
                    q["question"], tuple(a["text"] for a in q["answers"]), (own,), (own,), more
                )
                for q in paragraph["qas"]
                if not q["is_impossible"]
            ]
    return QaSet(tuple(questions), tuple(documents))


def _hotpotqa(data: Any) -> QaSet:
    def join(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = sorted({join(t, s) for entry in data for t, s in entry["context"]})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for entry in data:
        titles = {title for title, _ in entry["supporting_facts"]}
        context = tuple(number[join(t, s)] for t, s in entry["context"])
        gold = tuple(i for i, (t, _) in zip(context, entry["context"], strict=True) if t in titles)
        questions.append(
            Question(entry["question"], (entry["answer"],), gold or context[:1], context, ())
        )
    return QaSet(tuple(questions), tuple(documents))
