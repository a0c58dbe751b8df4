"""NVIDIA's counting tasks: common words in a numbered list, frequent words of a coded text."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from blasst.evals.errors import InputError
from blasst.evals.official.common import (
    OfficialSample,
    Request,
    Sizes,
    Text,
    find_size,
    fit,
    numbered,
)
from blasst.evals.texts import CWE_PREFIX, CWE_TEMPLATE, FWE_PREFIX, FWE_TEMPLATE
from blasst.evals.wordlists import WordLists

ZETA_2 = 1.6449340668482264
"""Riemann's zeta(2) = pi^2 / 6: the normaliser of rank^-2."""
_COMMON = 10


class CweGenerator:
    """Ten common words among others, after a small solved list."""

    def __init__(self, request: Request, lists: WordLists) -> None:
        self._request = request
        self._rng = random.Random(request.seed)
        self._words = sorted({*lists.nouns, *lists.adjectives, *lists.verbs})
        random.Random(request.seed).shuffle(self._words)

    def samples(self) -> Iterator[OfficialSample]:
        sizes = Sizes(10, len(self._words))
        size = find_size(self._used, self._request.limit, sizes)
        for _ in range(self._request.count):
            yield fit(self._draw, size, sizes.step, self._request)

    def _used(self, size: int) -> int:
        text, answers = self._draw(size)
        return self._request.tokens(f"{text} {numbered(answers)}") + self._request.budget

    def _draw(self, size: int) -> Text:
        short = self._request.limit < 4096
        example, solved = self._list(*((20, 3, 1) if short else (40, 10, 3)))
        context, answers = self._list(size, *((6, 1) if short else (30, 3)))
        template = CWE_TEMPLATE + CWE_PREFIX
        lead = template.format(context=example) + numbered(solved)
        return lead + "\n" + template.format(context=context), answers

    def _list(self, size: int, common_times: int, other_times: int) -> Text:
        chosen = self._rng.sample(self._words, size)
        common, others = chosen[:_COMMON], chosen[_COMMON:]
        words = common * common_times + others * other_times
        random.Random(self._request.seed).shuffle(words)
        return numbered(words), common


class FweGenerator:
    """Coded words whose counts fall with the square of their rank; rank 1 is three dots."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._rng = random.Random(request.seed)
        self._step = request.limit // 32

    def samples(self) -> Iterator[OfficialSample]:
        """The text alone takes up to `limit` tokens here: the budget comes on top."""
        request, vocabulary = self._request, self._vocabulary()
        size = request.limit // 6
        while request.tokens(_coded(vocabulary, size, request.seed)) < request.limit:
            size += self._step
        size -= self._step
        for _ in range(request.count):
            vocabulary, count = self._vocabulary(), size
            text = _coded(vocabulary, count, request.seed)
            while (tokens := request.tokens(text)) > request.limit:
                count -= self._step
                if count <= 0:
                    raise InputError(f"{request.limit} tokens are too few for fwe")
                text = _coded(vocabulary, count, request.seed)
            yield OfficialSample(text, tuple(vocabulary[1:4]), tokens + request.budget)

    def _vocabulary(self) -> list[str]:
        size = self._request.limit // 50
        words = [self._word() for _ in range(size)]
        while len(set(words)) < size:
            words.append(self._word())
        words = sorted(set(words))
        random.Random(self._request.seed).shuffle(words)
        words[0] = "..."
        return words

    def _word(self) -> str:
        return "".join(self._rng.choices(string.ascii_lowercase, k=6))


def coded_words(vocabulary: list[str], size: int) -> list[str]:
    """About `size` words, rank k of them size / (k^2 zeta(2)) times, in order of rank."""
    import numpy as np

    ranks = np.arange(1, len(vocabulary) + 1)
    counts = (size * (ranks**-2.0) / ZETA_2).astype(int)
    pairs = zip(vocabulary, counts.tolist(), strict=True)
    return [word for word, times in pairs for _ in range(times)]


def _coded(vocabulary: list[str], size: int, seed: int) -> str:
    words = coded_words(vocabulary, size)
    random.Random(seed).shuffle(words)
    return (FWE_TEMPLATE + FWE_PREFIX).format(context=" ".join(words))
