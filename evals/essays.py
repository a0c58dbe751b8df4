"""The essay haystack: words of RULER's essay file, cut into sentences by one simple rule."""

from __future__ import annotations

import json
import re
from pathlib import Path

from blasst.evals.errors import InputError

_ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "vs", "etc", "e.g", "i.e", "inc", "co", "corp", "fig")
)
_END = re.compile(r"""[.!?]+["')\]\u201d\u2019]*$""")


def essay_words(path: Path) -> list[str]:
    """All words in order; white space of any kind separates them."""
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f'{path} is not an essay file ({{"text": ...}}): {e}') from e
    words = str(text).split()
    if not words:
        raise InputError(f"{path} holds no words")
    return words


def sentences(words: list[str]) -> list[str]:
    """Group words into sentences; joined by blanks they are the words again.

    A sentence ends after a word that ends in . ! or ? (closing quotes or brackets may follow),
    unless the word is a usual abbreviation or one initial, or the next word begins in lower case.
    """
    out: list[str] = []
    start = 0
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else None
        if following is None or _ends(word, following):
            out.append(" ".join(words[start : i + 1]))
            start = i + 1
    return out


def _ends(word: str, following: str) -> bool:
    end = _END.search(word)
    if end is None or following[0].islower():
        return False
    if not end.group().startswith("."):
        return True
    stem = word[: end.start()].lstrip("\"'([\u201c\u2018")
    initial = len(stem) == 1 and stem.isalpha() and stem != "I"
    return not initial and stem.lower() not in _ABBREVIATIONS
