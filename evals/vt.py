"""Variable tracking: one chain of five names that all hold one value, hidden in noise lines."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from blasst.evals.tasks import Draw, Rendered
from blasst.evals.texts import NOISE, VT_PREFIX, VT_TEMPLATE

NAMES = 5
_EXAMPLE_LINES = 8


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
        return VT_TEMPLATE.format(context="\n".join(text), query=self.value)

    def prefix(self) -> str:
        return VT_PREFIX.format(num_v=len(self.names), query=self.value)


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


def draw(draw: Draw) -> VtDraft:
    """The five lines of the chain at balanced depths, in the order in which they must stand."""
    rng = draw.rng()
    chain = _chain(rng, 5, tuple(sorted(draw.spread(NAMES))))
    example = _chain(rng, 3, tuple(sorted(rng.random() for _ in range(NAMES))))
    return VtDraft(chain, example)


def _chain(rng: random.Random, letters: int, places: tuple[float, ...]) -> Chain:
    names: dict[str, None] = {}
    while len(names) < NAMES:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return Chain(tuple(names), str(rng.randint(10_000, 99_998)), places)
