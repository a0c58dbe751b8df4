"""Variable tracking: one chain of five names that all hold one value, hidden in noise lines."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from blasst.evals.tasks import Haystack, Rendered

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NAMES = 5
_EXAMPLE_LINES = 8
_QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)


@dataclass(frozen=True)
class Chain:
    """`places`: per line of the chain, sorted, the share of noise lines before it (0..1)."""

    names: tuple[str, ...]
    value: str
    places: tuple[float, ...]

    def lines(self) -> list[str]:
        first = f"VAR {self.names[0]} = {self.value}"
        pairs = zip(self.names, self.names[1:], strict=False)
        return [first, *(f"VAR {name} = VAR {before} " for before, name in pairs)]

    def question(self, size: int) -> str:
        """The user's text with `size` noise lines."""
        text = [NOISE] * size
        spots = [int(size * place) for place in self.places]
        for spot, line in reversed(list(zip(spots, self.lines(), strict=True))):
            text.insert(spot, line)
        return _QUESTION.format(context="\n".join(text), value=self.value)

    def prefix(self) -> str:
        return _PREFIX.format(count=len(self.names), value=self.value)


@dataclass(frozen=True)
class VtDraft:
    """The asked chain, after one solved example with shorter names."""

    chain: Chain
    example: Chain

    @property
    def answers(self) -> tuple[str, ...]:
        return self.chain.names

    @property
    def gold(self) -> str:
        """The names in chain order; the prefix ends in a blank, so the first has none."""
        return " ".join(self.chain.names)

    def render(self, size: int) -> Rendered:
        example = self.example.question(_EXAMPLE_LINES) + self.example.prefix()
        lead = example + " ".join(self.example.names) + "\n\n\n"
        question = self.chain.question(size)
        marks = tuple(len(lead) + question.index(line) for line in self.chain.lines())
        return Rendered(lead + question, self.chain.prefix(), marks)


def draw(rng: random.Random, haystack: Haystack) -> VtDraft:
    """`haystack` is not used: the noise is five fixed sentences."""
    return VtDraft(chain=_chain(rng, 5), example=_chain(rng, 3))


def _chain(rng: random.Random, letters: int) -> Chain:
    names: dict[str, None] = {}
    while len(names) < NAMES:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    value = str(rng.randint(10_000, 99_998))
    places = tuple(sorted(rng.random() for _ in range(NAMES)))
    return Chain(tuple(names), value, places)
