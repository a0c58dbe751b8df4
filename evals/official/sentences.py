"""RULER's essay haystack as sentences: Punkt's English model, without downloads."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from blasst.evals.errors import InputError

_LONE_DOTS = re.compile(r"(?<=[a-z]{3}\.) (?=\.\.\.$)")
"""Between a sentence and an ellipsis: NLTK's Punkt makes two of them, the package punkt one."""


class SentenceCache:
    """Sentences of the first n words, for any n; what was cut once is not cut again."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words
        self._cut = functools.lru_cache(maxsize=64)(self._sentences)

    @classmethod
    def read(cls, path: Path) -> SentenceCache:
        """Of an essay file ({"text": ...}), split at single blanks as RULER does."""
        try:
            text = json.loads(path.read_text(encoding="utf-8"))["text"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InputError(f'{path} is not an essay file ({{"text": ...}}): {e}') from e
        return cls(tuple(re.sub(r"\s+", " ", text).split(" ")))

    def first(self, count: int) -> tuple[str, ...]:
        return self._cut(count)

    def _sentences(self, count: int) -> tuple[str, ...]:
        return tuple(cut(" ".join(self.words[:count]).strip()))


def cut(text: str) -> list[str]:
    """Sentences, as NLTK 3.10.4 cuts RULER's essays with its own data (all 31,395 of them)."""
    import punkt

    return [part for sentence in punkt.sent_tokenize(text) for part in _LONE_DOTS.split(sentence)]
