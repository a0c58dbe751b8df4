"""wonderwords' lists as RULER reads them, and its keys: every adjective with every noun."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True)
class WordLists:
    """In file order, as shipped: neither sorted nor free of duplicates."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]


@functools.cache
def word_lists() -> WordLists:
    """Of the installed wonderwords; samples depend on its version, which is pinned."""
    from wonderwords import random_word

    read = random_word._get_words_from_text_file
    return WordLists(
        tuple(read("nounlist.txt")),
        tuple(read("adjectivelist.txt")),
        tuple(read("verblist.txt")),
    )


class KeyList(Sequence[str]):
    """The sorted, distinct `adjective-noun` strings (6.2 million), none of them held in memory.

    Sorted strings with one adjective stand together unless another adjective continues it after
    the dash; such adjectives form one group, whose list is made when it is asked for.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._groups: list[list[str]] = []
        for stem in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._groups and stem.startswith(self._groups[-1][0]):
                self._groups[-1].append(stem)
            else:
                self._groups.append([stem])
        self._made: dict[int, list[str]] = {}
        counts = (
            len(self._nouns) if len(group) == 1 else len(self._list(i))
            for i, group in enumerate(self._groups)
        )
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = bisect.bisect_right(self._ends, index)
        at = index - (self._ends[group - 1] if group else 0)
        if len(self._groups[group]) == 1:
            return self._groups[group][0] + self._nouns[at]
        return self._list(group)[at]

    def _list(self, group: int) -> list[str]:
        if group not in self._made:
            self._made[group] = sorted(
                {stem + noun for stem in self._groups[group] for noun in self._nouns}
            )
        return self._made[group]


@functools.cache
def key_list() -> KeyList:
    lists = word_lists()
    return KeyList(lists.adjectives, lists.nouns)
