"""Damage injected into the real retrieval model is seen by the harness's own verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blasst.evals import models
from blasst.evals.cells import collect
from blasst.evals.errors import EvalsError
from blasst.evals.verdict import judge

LENGTH, COUNT = 640, 6


def quiet(text: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def setup() -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """retrieval-26m and one-needle documents; `blasst ruler fetch --retrieval` puts it there."""
    from tokenizers import Tokenizer

    from blasst.evals.retrieval_model.documents import Documents
    from blasst.evals.retrieval_model.model import load

    try:
        folder: Path = models.retrieval_folder(quiet)
    except EvalsError as e:
        pytest.skip(str(e))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = " ".join(f"word{i} of the text." for i in range(1000))
    essay = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    ids, weights = Documents(tokenizer, essay, 10**6).evaluation("multikey", COUNT, LENGTH)
    pairs = zip(torch.from_numpy(ids).long(), torch.from_numpy(weights), strict=True)
    return load(folder), list(pairs)


def outcome(dense: Sequence[float], damaged: Sequence[float]) -> str:
    """The verdict on these answers, as if a server had given them."""
    plan: dict[str, Any] = {"kind": "plan", "fingerprint": "f", "server": {}, "at": 0.0}
    plan |= {"thresholds": ["dense", "mag:1000.0"], "lengths": [LENGTH], "tasks": ["t"]}
    records = [plan]
    for key, matches in (("dense", dense), ("mag:1000.0", damaged)):
        for i, value in enumerate(matches):
            record = {"kind": "sample", "pass": "accuracy", "fingerprint": "f", "threshold": key}
            record |= {"task": "t", "length": LENGTH, "prompt_sha256": str(i), "match": value}
            record |= {"gold_nll": 0.0, "prediction": "", "prompt_tokens": LENGTH}
            records.append(record | {"visited": 0, "skipped": 0, "layers": []})
    (verdict,) = judge(collect(records))
    return verdict.outcome


@pytest.mark.slow
def test_a_lost_needle_is_no_go_and_the_rule_below_one_is_not(setup: Any) -> None:
    from blasst.evals.retrieval_model.damage import Damage
    from blasst.evals.retrieval_model.experiment import measure

    model, pairs = setup
    dense = measure(model, pairs, Damage())
    assert dense["exact"] == 1.0
    lost = measure(model, pairs, Damage(), lose_answers=True)
    assert lost["exact"] <= 0.2
    assert lost["nll"] > dense["nll"] + 1
    assert outcome(dense["matches"], lost["matches"]) == "NO-GO"
    voted = measure(model, pairs, Damage(skip_lambda=0.5))
    assert voted["skip_rate"] > 0.05
    assert outcome(dense["matches"], voted["matches"]) == "INCONCLUSIVE"  # six pairs prove nothing
    torn = measure(model, pairs, Damage(random_rate=0.9))
    assert torn["exact"] < 0.5
    assert outcome(dense["matches"], torn["matches"]) == "NO-GO"
