"""NVIDIA's needle generator: eight tasks by haystack, kinds of key and value, and three counts."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Iterator, Sequence

from blasst.evals.kinds import NiahKind
from blasst.evals.official.common import OfficialSample, Request, Sizes, Text, find_size, fit
from blasst.evals.official.sentences import SentenceCache
from blasst.evals.texts import NEEDLE, NIAH_PREFIX, NIAH_TEMPLATE, NOISE

_DEPTHS = [round(100 * i / 39) for i in range(40)]


class NiahGenerator:
    """words: keys to choose from. essay: RULER's haystack, cut into sentences on demand."""

    def __init__(
        self, kind: NiahKind, request: Request, words: Sequence[str], essay: SentenceCache
    ) -> None:
        self._kind, self._request, self._words, self._essay = kind, request, words, essay
        self._rng = random.Random(request.seed)
        self._keys = max(kind.keys, kind.queries)

    def samples(self) -> Iterator[OfficialSample]:
        request, essay = self._request, self._kind.haystack == "essay"
        step = 500 if essay else 25 if request.limit >= 4096 else 5
        sizes = Sizes(step, len(self._essay.words) if essay else None, most_first=True)
        size = find_size(self._used, request.limit, sizes)
        for _ in range(request.count):
            yield fit(self._draw, size, step, request)

    def _used(self, size: int) -> int:
        text, answers = self._draw(size)
        return self._request.tokens(text + " ".join(answers)) + self._request.budget

    def _draw(self, size: int) -> Text:
        kind, rng = self._kind, self._rng
        keys: list[str] = []
        values: list[list[str]] = []
        needles: list[str] = []
        for _ in range(self._keys):
            keys.append(self._one(kind.key))
            values.append([])
            for _ in range(kind.values):
                values[-1].append(self._one(kind.value))
                needles.append(self._needle(keys[-1], values[-1][-1]))
        random.Random(self._request.seed).shuffle(needles)
        place = self._in_essay if kind.haystack == "essay" else self._in_lines
        context = place(size, needles)
        asked = rng.sample(range(self._keys), kind.queries)
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        template, plural = NIAH_TEMPLATE + NIAH_PREFIX, kind.value
        if kind.queries * kind.values == 1:
            template, plural = singular(template), plural[:-1]
        text = template.format(type_needle_v=plural, context=context, query=query)
        return text, [value for i in asked for value in values[i]]

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self._kind.value, key=key, value=value)

    def _in_essay(self, size: int, needles: list[str]) -> str:
        sentences = self._essay.first(size)
        depths = self._rng.sample(_DEPTHS, len(needles))
        places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts, last = [], 0
        for place, needle in zip(places, needles, strict=True):
            parts += [" ".join(sentences[last:place]), needle]
            last = place
        return " ".join([*parts, " ".join(sentences[last:])])

    def _in_lines(self, size: int, needles: list[str]) -> str:
        kind = self._kind
        lines = [NOISE] * size
        if kind.haystack == "needle":
            lines = [self._needle(self._one(kind.key), self._one(kind.value)) for _ in range(size)]
        places = sorted(self._rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _one(self, kind: str) -> str:
        if kind == "words":
            return self._rng.choice(self._words)
        if kind == "numbers":
            return str(self._rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))


@functools.cache
def singular(template: str) -> str:
    """The template for one answer; "are" becomes "is" everywhere, as in RULER."""
    for many, one in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(many, one)
    return template
