"""RULER's counting tasks with every sample in an order of its own: cwe and fwe."""

from __future__ import annotations

import functools
import random
import string
from dataclasses import dataclass

from blasst.evals.official.common import numbered
from blasst.evals.official.words import coded_words
from blasst.evals.tasks import Draw, Rendered
from blasst.evals.texts import CWE_PREFIX, CWE_TEMPLATE, FWE_PREFIX, FWE_TEMPLATE
from blasst.evals.wordlists import word_lists

COMMON = 10


@dataclass(frozen=True)
class CweDraft:
    """words: the first ten are the common ones. times: how often a common word and another one
    stand in the list. name: of the sample, for its order at each size."""

    words: tuple[str, ...]
    example: str
    times: tuple[int, int]
    name: str

    @property
    def answers(self) -> tuple[str, ...]:
        return self.words[:COMMON]

    @property
    def gold(self) -> str:
        """As the solved example lists them: no blank before the first."""
        return numbered(list(self.answers))

    def render(self, size: int) -> Rendered:
        """`size` different words. Beyond the word list, two words joined make another one."""
        others = list(self.words[COMMON:size])
        rng = random.Random(self.name + ":more")
        known = set(self.words)
        while len(others) < size - COMMON:
            word = rng.choice(self.words) + rng.choice(self.words)
            if word not in known:
                known.add(word)
                others.append(word)
        context = _list(list(self.answers), others, self.times, f"{self.name}:{size}")
        return Rendered(self.example + CWE_TEMPLATE.format(context=context), CWE_PREFIX, ())


def draw_cwe(draw: Draw) -> CweDraft:
    """No answer is part of another word of the list: a substring metric would count it."""
    rng = draw.rng()
    words = rng.sample(_words(), len(_words()))
    common = _free_of_parts(words)
    others = [word for word in words if word not in set(common)]
    solved, rest = others[:COMMON], others[COMMON : 40 if draw.length >= 4096 else 20]
    times = ((10, 3), (30, 3)) if draw.length >= 4096 else ((3, 1), (6, 1))
    text = CWE_TEMPLATE.format(context=_list(solved, rest, times[0], draw.name)) + CWE_PREFIX
    rng.shuffle(others)
    return CweDraft(
        (*common, *others), text + numbered(solved) + "\n", times[1], f"{draw.name}:order"
    )


@dataclass(frozen=True)
class FweDraft:
    """vocabulary: rank 1 is three dots, ranks 2 to 4 are the answers."""

    vocabulary: tuple[str, ...]
    name: str

    @property
    def answers(self) -> tuple[str, ...]:
        return self.vocabulary[1:4]

    @property
    def gold(self) -> str:
        """Separated as in the coded text."""
        return "".join(f" {word}" for word in self.answers)

    def render(self, size: int) -> Rendered:
        """About `size` words."""
        words = coded_words(list(self.vocabulary), size)
        random.Random(f"{self.name}:{size}").shuffle(words)
        return Rendered(FWE_TEMPLATE.format(context=" ".join(words)), FWE_PREFIX, ())


def draw_fwe(draw: Draw) -> FweDraft:
    """As many words in the vocabulary as RULER has for this length."""
    rng = draw.rng()
    size = max(8, (draw.length - 50) // 50)
    words: dict[str, None] = {"...": None}
    while len(words) < size:
        words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    return FweDraft(tuple(words), draw.name)


def _list(common: list[str], others: list[str], times: tuple[int, int], seed: str) -> str:
    words = common * times[0] + others * times[1]
    random.Random(seed).shuffle(words)
    return numbered(words)


@functools.cache
def _words() -> tuple[str, ...]:
    lists = word_lists()
    return tuple(sorted({*lists.nouns, *lists.adjectives, *lists.verbs}))


@functools.cache
def _contained() -> frozenset[str]:
    """Words that occur inside another word of the list."""
    text = "\n".join(_words())
    return frozenset(word for word in _words() if text.count(word) > 1)


def _free_of_parts(words: list[str]) -> list[str]:
    return [word for word in words if word not in _contained()][:COMMON]
