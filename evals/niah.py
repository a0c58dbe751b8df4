"""Needles in noise, essays or other needles: RULER's eight retrieval tasks, depths balanced."""

from __future__ import annotations

import functools
import random
import uuid
from dataclasses import dataclass, field

from blasst.evals.essays import sentences
from blasst.evals.kinds import NiahKind
from blasst.evals.official.niah import singular
from blasst.evals.tasks import Draw, Rendered
from blasst.evals.texts import NEEDLE, NIAH_PREFIX, NIAH_TEMPLATE, NOISE
from blasst.evals.wordlists import word_lists


@dataclass(frozen=True)
class Needle:
    """depth: the share of sentences or lines before it (0..1). asked: its value is an answer."""

    text: str
    depth: float
    asked: bool


@dataclass(frozen=True)
class NiahDraft:
    """`needles` in document order; `answers` in the order in which a model would give them."""

    kind: NiahKind
    query: str
    answers: tuple[str, ...]
    needles: tuple[Needle, ...]
    essay: tuple[str, ...]
    lines: _Lines

    @property
    def gold(self) -> str:
        """The values as a sentence would list them; the prefix has no blank at its end."""
        if len(self.answers) == 1:
            return " " + self.answers[0]
        return " " + ", ".join(self.answers[:-1]) + ", and " + self.answers[-1]

    def render(self, size: int) -> Rendered:
        """`size` words of the essays, repeated when they run out, or `size` lines."""
        if self.kind.haystack == "essay":
            repeats = -(-size // len(self.essay))
            text, joint = sentences(list((self.essay * repeats)[:size])), " "
        else:
            text, joint = self.lines.first(size), "\n"
        places = [int(len(text) * needle.depth) for needle in self.needles]
        for place, needle in reversed(list(zip(places, self.needles, strict=True))):
            text.insert(place, needle.text)
        context = joint.join(text)
        template, prefix, what = NIAH_TEMPLATE, NIAH_PREFIX, self.kind.value
        if len(self.answers) == 1:
            template, prefix, what = singular(template), singular(prefix), what[:-1]
        names = {"type_needle_v": what, "query": self.query}
        lead = len(template[: template.index("{context}")].format(**names))
        marks = tuple(lead + context.index(n.text) for n in self.needles if n.asked)
        user = template.format(context=context, **names)
        return Rendered(user, prefix.format(**names), marks)


@dataclass
class _Lines:
    """Noise lines, the same ones whatever their number; none of them uses a key of `taken`."""

    kind: NiahKind
    rng: random.Random
    taken: frozenset[str]
    _made: list[str] = field(default_factory=list)

    def first(self, size: int) -> list[str]:
        if self.kind.haystack == "repeat":
            return [NOISE] * size
        while len(self._made) < size:
            key = _one(self.kind.key, self.rng)
            if key not in self.taken:
                self._made.append(_needle(self.kind, key, _one(self.kind.value, self.rng)))
        return self._made[:size]


def draw(draw: Draw, kind: NiahKind) -> NiahDraft:
    """Different keys and values; asked needles at balanced depths, the others anywhere."""
    rng = draw.rng()
    keys = _distinct(kind.key, max(kind.keys, kind.queries), rng)
    values = _distinct(kind.value, len(keys) * kind.values, rng)
    asked = rng.sample(range(len(keys)), kind.queries)
    depths = iter(draw.spread(len(asked) * kind.values))
    needles, answers = [], []
    for i in [*asked, *(i for i in range(len(keys)) if i not in asked)]:
        for value in values[i * kind.values : (i + 1) * kind.values]:
            depth = next(depths) if i in asked else rng.random()
            needles.append((Needle(_needle(kind, keys[i], value), depth, i in asked), value))
            answers += [value] if i in asked else []
    needles.sort(key=lambda pair: pair[0].depth)
    if kind.values > 1:
        answers = [value for needle, value in needles if needle.asked]
    names = [keys[i] for i in asked]
    query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
    lines = _Lines(kind, random.Random(draw.name + ":lines"), frozenset(keys))
    ordered = tuple(needle for needle, _ in needles)
    return NiahDraft(kind, query, tuple(answers), ordered, draw.haystack.essay_words, lines)


def _needle(kind: NiahKind, key: str, value: str) -> str:
    return NEEDLE.format(type_needle_v=kind.value, key=key, value=value)


def _distinct(kind: str, count: int, rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[_one(kind, rng)] = None
    return list(found)


def _one(kind: str, rng: random.Random) -> str:
    if kind == "words":
        adjectives, nouns = _key_words()
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@functools.cache
def _key_words() -> tuple[list[str], list[str]]:
    """Adjectives and nouns of letters only: a dash would split a key in two."""
    lists = word_lists()
    return (
        sorted({word for word in lists.adjectives if word.isalpha()}),
        sorted({word for word in lists.nouns if word.isalpha()}),
    )
