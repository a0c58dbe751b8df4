"""The metrics as RULER publishes them, and the NLL of the gold answer."""

from __future__ import annotations

import math

import pytest

from blasst.evals.errors import ServerError
from blasst.evals.metrics import clean, gold_nll, string_match_all, task_score


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (" 123, 456 and 789.", 1.0),
        ("123 only", 1 / 3),
        ("", 0.0),
        ("7890 45612", 2 / 3),
        ("\x00123\x1f456\x07789\n", 1.0),
    ],
)
def test_match_all_is_the_share_of_answers_found(prediction: str, expected: float) -> None:
    assert string_match_all(prediction, ["123", "456", "789"]) == pytest.approx(expected)


def test_match_ignores_case_and_looks_at_substrings_only() -> None:
    assert string_match_all("the abcde", ["ABCDE"]) == 1.0
    assert string_match_all("abc de", ["ABCDE"]) == 0.0
    assert clean(" \x01a\tb\x00 ") == "a\nb"


def test_task_score_has_two_decimals_and_none_without_samples() -> None:
    assert task_score([1.0, 1 / 3, 0.5]) == 61.11
    assert math.isnan(task_score([]))


def test_gold_nll_is_the_mean_over_the_gold_tokens_alone() -> None:
    scores = [None, {"5": {"logprob": -9.0}}, {"7": {"logprob": -1.0}}, {"8": {"logprob": -2.0}}]
    assert gold_nll(scores, 2, (7, 8)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "scores",
    [
        None,
        [None, {"7": {"logprob": -1.0}}],
        [None, {"5": {"logprob": -9.0}}, {"6": {"logprob": -1.0}}],
        [None, {"5": {"logprob": -9.0}}, None],
    ],
)
def test_a_server_that_does_not_score_the_gold_tokens_is_an_error(scores: object) -> None:
    with pytest.raises(ServerError, match="prompt_logprobs"):
        gold_nll(scores, 2, (7,))  # type: ignore[arg-type]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_logprob_that_is_no_number_is_an_error_not_a_hole_in_the_table(logprob: float) -> None:
    with pytest.raises(ServerError, match=f"token 7 is {logprob}"):
        gold_nll([None, {"7": {"logprob": logprob}}], 1, (7,))
