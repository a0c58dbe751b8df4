"""What NVIDIA's generators share: find a haystack size, then shrink each sample until it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blasst.evals.errors import InputError

Count = Callable[[str], int]
"""Tokens of a text, without special tokens added."""
Text = tuple[str, list[str]]
"""A prompt with its answer prefix, and the reference answers."""

_TRIES = 200
"""NVIDIA's program tries for ever when even the smallest haystack does not fit."""


@dataclass(frozen=True)
class Request:
    """limit: tokens of prompt plus budget (`--max_seq_length`). budget: `--tokens_to_generate`."""

    limit: int
    budget: int
    count: int
    seed: int
    tokens: Count


@dataclass(frozen=True)
class OfficialSample:
    """length: tokens of the text and the budget, as the program writes it."""

    text: str
    answers: tuple[str, ...]
    length: int


@dataclass(frozen=True)
class Sizes:
    """step: units added in the search. most: units there are (None: any number);
    most_first: whether that is looked at before the step is added."""

    step: int
    most: int | None = None
    most_first: bool = False


def find_size(used: Callable[[int], int], limit: int, sizes: Sizes) -> int:
    """The largest size tried whose first sample fits; `used`: tokens with the budget at a size."""
    size, total = sizes.step, 0
    while total < limit:
        total = used(size)
        if total > limit:
            return size - sizes.step
        if sizes.most_first and sizes.most is not None and size > sizes.most:
            return sizes.most
        size += sizes.step
        if not sizes.most_first and sizes.most is not None and size > sizes.most:
            return sizes.most
    return size


def fit(draw: Callable[[int], Text], size: int, step: int, request: Request) -> OfficialSample:
    """One sample: drawn again with less, as long as it is too long. Each try draws anew."""
    for _ in range(_TRIES):
        try:
            text, answers = draw(size)
        except (ValueError, IndexError):  # more needles than places, or names that collide
            length = request.limit + 1
        else:
            length = request.tokens(text) + request.budget
        if length <= request.limit:
            return OfficialSample(text, tuple(answers), length)
        if size > step:
            size -= step
    raise InputError(
        f"{request.limit} tokens are too few: even the smallest prompt is longer; give a longer "
        "length"
    )


def numbered(words: list[str]) -> str:
    """1. first 2. second ..."""
    return " ".join(f"{i + 1}. {word}" for i, word in enumerate(words))
