"""Needles in an essay: RULER's niah tasks with word keys and seven-digit numbers."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from blasst.evals.essays import sentences
from blasst.evals.tasks import Haystack, Rendered

NEEDLE = "One of the special magic numbers for {key} is: {value}."
_DEPTHS = 40
_ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n{context}\n"
    "What is the special magic number for {key} mentioned in the provided text?",
    " The special magic number for {key} mentioned in the provided text is",
)
_MANY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n{context}\n"
    "What are all the special magic numbers for {key} mentioned in the provided text?",
    " The special magic numbers for {key} mentioned in the provided text are",
)


@dataclass(frozen=True)
class NiahDraft:
    """`depths`: per needle, in document order, the share of sentences before it (0..1)."""

    key: str
    answers: tuple[str, ...]
    depths: tuple[float, ...]
    words: tuple[str, ...]

    @property
    def gold(self) -> str:
        """The values in document order, as a sentence would list them; the prefix has no blank."""
        if len(self.answers) == 1:
            return " " + self.answers[0]
        return " " + ", ".join(self.answers[:-1]) + ", and " + self.answers[-1]

    def render(self, size: int) -> Rendered:
        """The first `size` words of the essays, repeated when they run out, with the needles."""
        repeats = -(-size // len(self.words))
        text = sentences(list((self.words * repeats)[:size]))
        needles = [NEEDLE.format(key=self.key, value=value) for value in self.answers]
        places = [int(len(text) * depth) for depth in self.depths]
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            text.insert(place, needle)
        template, prefix = _ONE if len(self.answers) == 1 else _MANY
        context = " ".join(text)
        user = template.format(context=context, key=self.key)
        lead = template.index("{context}")
        marks = tuple(lead + context.index(needle) for needle in needles)
        return Rendered(user, prefix.format(key=self.key), marks)


def draw(rng: random.Random, haystack: Haystack, *, num_values: int) -> NiahDraft:
    """One key with `num_values` different numbers, at depths out of 40 evenly spaced ones."""
    adjectives, nouns = _word_lists()
    key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    values: dict[str, None] = {}
    while len(values) < num_values:
        values[str(rng.randint(10**6, 10**7 - 1))] = None
    depths = sorted(rng.sample(range(_DEPTHS), num_values))
    shares = tuple(depth / (_DEPTHS - 1) for depth in depths)
    return NiahDraft(key, tuple(values), shares, haystack.essay_words)


@functools.cache
def _word_lists() -> tuple[list[str], list[str]]:
    """wonderwords' adjectives and nouns, letters only (a dash would split a key in two)."""
    from wonderwords import RandomWord

    source = RandomWord()
    adjectives = source.filter(include_parts_of_speech=["adjectives"])
    nouns = source.filter(include_parts_of_speech=["nouns"])
    return (
        sorted({word for word in adjectives if word.isalpha()}),
        sorted({word for word in nouns if word.isalpha()}),
    )
