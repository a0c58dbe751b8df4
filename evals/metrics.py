"""RULER's metrics as published, the NLL of the gold answer, and agreement with dense answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from blasst.evals.errors import MALFORMED, ServerError

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """As RULER does before scoring: strip, control characters to newlines, strip."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """0..1: the share of answers that occur in the prediction, ignoring case."""
    text = clean(prediction).lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if any of the answers occurs in the prediction, ignoring case, else 0.0."""
    text = clean(prediction).lower()
    return float(any(answer.lower() in text for answer in answers))


def match(metric: str, prediction: str, answers: Sequence[str]) -> float:
    """0..1 by RULER's metric of a task: "all" or "part"."""
    score = string_match_part if metric == "part" else string_match_all
    return score(prediction, answers)


def token_agreement(tokens: Sequence[int | str], dense: Sequence[int | str]) -> float:
    """0..1: the share of the dense answer's tokens that come before the first difference.

    Greedy decoding goes its own way after one other token: what follows is not compared.
    """
    if not dense:
        return float(not tokens)
    same = next(
        (i for i, (a, b) in enumerate(zip(tokens, dense, strict=False)) if a != b),
        min(len(tokens), len(dense)),
    )
    return same / len(dense)


def task_score(matches: Sequence[float]) -> float:
    """RULER's score of a task, 0..100 with two decimals; NaN without samples."""
    return round(100.0 * sum(matches) / len(matches), 2) if matches else math.nan


_ABOVE_ONE = 1e-3
"""What rounding may make of a logprob of 0."""


def gold_nll(
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None,
    prompt_tokens: int,
    gold: Sequence[int],
) -> float:
    """Mean of -ln p over the gold tokens, in nats a token, out of a server's `prompt_logprobs`.

    Entry i is {token id: {"logprob": ln p}} of token i given those before. Raises ServerError when
    the list does not cover prompt + gold, or an entry lacks its own token or is not finite.
    """
    expected = prompt_tokens + len(gold)
    if prompt_logprobs is None or len(prompt_logprobs) != expected:
        got = "none" if prompt_logprobs is None else f"{len(prompt_logprobs)}"
        raise ServerError(
            f"the server returned prompt_logprobs for {got} of {expected} tokens: it truncates "
            "prompts or does not support prompt_logprobs (vLLM does)"
        )
    total = 0.0
    for token, entry in zip(gold, prompt_logprobs[prompt_tokens:], strict=True):
        try:
            logprob = float((entry or {})[str(token)]["logprob"])
        except MALFORMED:
            raise ServerError(
                f"prompt_logprobs has no logprob of gold token {token}: another tokenizer?"
            ) from None
        if not math.isfinite(logprob) or logprob > _ABOVE_ONE:
            raise ServerError(
                f"the server's logprob of gold token {token} is {logprob}: its computation went "
                "wrong, see its log"
            )
        total -= logprob
    return total / len(gold)
