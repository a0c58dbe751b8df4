"""Fault injection on an exported model: the same documents under each kind of damage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from blasst.evals.errors import InputError
from blasst.evals.retrieval_model.damage import Damage
from blasst.evals.retrieval_model.documents import EVALUATED, Documents
from blasst.evals.retrieval_model.model import RetrievalModel, load
from blasst.evals.retrieval_model.tokenizer import read_tokenizer

LAMBDAS = (0.0, 0.01, 0.177, 0.5, 0.9, 8.0, 64.0)
"""Above 1: deliberately wrong, a row may lose the block with its maximum."""
RATES = (0.02, 0.1, 0.3)
Row = dict[str, Any]


def experiment(folder: Path, task: str, count: int, length: int) -> Iterator[Row]:
    """A row a kind of damage: exact answers (share), NLL (nats a token), tiles skipped (share)."""
    if task not in EVALUATED:
        raise InputError(f"--task {task!r} is unknown; choose one of {', '.join(EVALUATED)}")
    tokenizer = read_tokenizer(folder)
    model = load(folder)
    filler = " ".join(f"word{i} of the text." for i in range(4000))
    essay = np.array(tokenizer.encode(filler, add_special_tokens=False).ids, np.int32)
    ids, weights = Documents(tokenizer, essay, 10**6).evaluation(task, count, length)
    documents = list(zip(torch.from_numpy(ids).long(), torch.from_numpy(weights), strict=True))
    kinds = [("dense", Damage())]
    kinds += [(f"lambda {value:g}", Damage(skip_lambda=value)) for value in LAMBDAS]
    kinds += [(f"random {rate:.0%}", Damage(random_rate=rate)) for rate in RATES]
    for name, damage in kinds:
        yield {"damage": name, "task": task, **measure(model, documents, damage)}
    row = measure(model, documents, Damage(), lose_answers=True)
    yield {"damage": "lost needle", "task": task, **row}


@torch.no_grad()
def measure(
    model: RetrievalModel,
    documents: list[tuple[torch.Tensor, torch.Tensor]],
    damage: Damage,
    *,
    lose_answers: bool = False,
) -> Row:
    """lose_answers: the block in which the answer's first occurrence stands is skipped too."""
    exact, nll, tokens, matches = 0, 0.0, 0, []
    visited = skipped = 0
    for ids, weights in documents:
        own = replace(damage, lost=_places(ids, weights)) if lose_answers else damage
        model.replace_attention(own)
        asked = weights[1:] > 0
        logits = model.logits(model(ids[None])[0, :-1][asked]).float()
        wanted = ids[1:][asked]
        matches.append(float((logits.argmax(-1) == wanted).all()))
        exact += int(matches[-1])
        nll += float(functional.cross_entropy(logits, wanted, reduction="sum"))
        tokens += len(wanted)
        if lose_answers:
            visited, skipped = visited + own.visited, skipped + own.skipped
    if not lose_answers:
        visited, skipped = damage.visited, damage.skipped
    return {
        "exact": exact / len(documents),
        "nll": nll / tokens,
        "skip_rate": skipped / visited,
        "matches": matches,
    }


def _places(ids: torch.Tensor, weights: torch.Tensor) -> tuple[int, ...]:
    """Every token of the answer's first occurrence before the question."""
    first = int((weights > 0).nonzero()[0])
    answer = ids[weights > 0][:7].tolist()
    text = ids[:first].tolist()
    at = next(i for i in range(first) if text[i : i + len(answer)] == answer)
    return tuple(range(at, at + len(answer)))
