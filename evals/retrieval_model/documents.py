"""Training documents as token arrays: RULER's tasks with many questions each, and plain copying.

Pieces are tokenised once; the tokenizer's borders make their concatenation the text's own tokens,
so that the hot loop is numpy only.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blasst.evals.official.niah import singular
from blasst.evals.official.words import ZETA_2
from blasst.evals.texts import (
    FWE_PREFIX,
    FWE_TEMPLATE,
    NIAH_PREFIX,
    NIAH_TEMPLATE,
    NOISE,
    VT_PREFIX,
    VT_TEMPLATE,
)
from blasst.evals.wordlists import word_lists

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS = 1
QUESTIONS = {256: 3, 512: 6, 1024: 12, 2048: 16, 4096: 24, 8192: 32, 16384: 48, 32768: 64}
"""Questions a document: without many of them, almost no token of a long one teaches anything."""
EVALUATED = ("copy", "single", "multikey", "multivalue", "multiquery", "vt", "fwe")

Ids = np.ndarray


class Piece(NamedTuple):
    """ids: int32. weight: of these tokens in the loss; above 0 they are an answer."""

    ids: Ids
    weight: float


@dataclass(frozen=True)
class Needles:
    """haystack: noise, essay or needle. keys in the document; values a key; asked: keys a
    question; questions: at most."""

    haystack: str = "essay"
    keys: int = 1
    values: int = 1
    asked: int = 1
    questions: int = 1


class Documents:
    """essay: token ids of running text. One seed, one stream."""

    def __init__(self, tokenizer: Tokenizer, essay: Ids, seed: int) -> None:
        self._tokenizer, self._essay = tokenizer, essay
        self._numpy, self._python = np.random.default_rng(seed), random.Random(seed)
        self._size = tokenizer.get_vocab_size()
        lists = word_lists()
        self._adjectives = [w for w in lists.adjectives if w.isalpha()]
        self._nouns = [w for w in lists.nouns if w.isalpha()]
        self._known: dict[str, Ids] = {}

    def batch(self, count: int, length: int, mix: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [count, length], weights float32 [count, length])."""
        made = [self._pack(self._any(length - 1, mix), length) for _ in range(count)]
        return np.stack([ids for ids, _ in made]), np.stack([weights for _, weights in made])

    def evaluation(self, task: str, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One question a document, of EVALUATED."""
        room = length - 1
        make: dict[str, Callable[[], list[Piece]]] = {
            "copy": lambda: self.copy(room),
            "single": lambda: self.needles(room, Needles()),
            "multikey": lambda: self.needles(room, Needles("needle")),
            "multivalue": lambda: self.needles(room, Needles(values=4)),
            "multiquery": lambda: self.needles(room, Needles(keys=4, asked=4)),
            "vt": lambda: self.chains(room, 1),
            "fwe": lambda: self.frequent(room),
        }
        made = [self._pack(make[task](), length) for _ in range(count)]
        return np.stack([ids for ids, _ in made]), np.stack([weights for _, weights in made])

    def copy(self, room: int) -> list[Piece]:
        """Two random segments in random order; all but the first token of a repeat is an answer."""
        size = int(self._numpy.integers(8, max(9, room // 4)))
        segments = [self._numpy.integers(3, self._size, size).astype(np.int32) for _ in range(2)]
        pieces: list[Piece] = []
        seen: set[int] = set()
        for _ in range(-(-room // size)):
            i = int(self._numpy.integers(2))
            weight = 1.0 if i in seen else 0.0
            pieces += [Piece(segments[i][:1], 0.0), Piece(segments[i][1:], weight)]
            seen.add(i)
        return pieces

    def needles(self, room: int, spec: Needles) -> list[Piece]:
        """A key's values are asked for in document order: places first, values after them."""
        keys = [self._key() for _ in range(spec.keys)]
        values = [[self._number() for _ in range(spec.values)] for _ in keys]
        single = spec.values * spec.asked == 1
        template, prefix, what = NIAH_TEMPLATE, NIAH_PREFIX, "numbers"
        if single:
            template, prefix, what = singular(template), singular(prefix), "number"
        head, _, tail = template.partition("{context}")
        lead = self._ids(head.format(type_needle_v=what))
        order = self._numpy.permutation(spec.keys).tolist()
        questions = [
            self._ask(tail + prefix, what, [keys[i] for i in group], [values[i] for i in group])
            for group in (order[i : i + spec.asked] for i in range(0, spec.keys, spec.asked))
            if len(group) == spec.asked
        ][: spec.questions]
        texts = [self._needle(keys[i], v) for i in range(spec.keys) for v in values[i]]
        fixed = len(lead) + sum(map(len, texts)) + _size(questions[:1])
        while len(questions) > 1 and fixed + _size(questions[1:]) > room:
            questions.pop()
        room -= fixed + _size(questions[1:])
        filler = self._filler(spec.haystack, max(0, room))
        slots = np.sort(self._numpy.integers(0, len(filler) + 1, len(texts))).tolist()
        # A random key at each place; its next value, so that values stand in order.
        whose = [i for i in range(spec.keys) for _ in range(spec.values)]
        self._python.shuffle(whose)
        used = dict.fromkeys(range(spec.keys), 0)
        placed = []
        for i in whose:
            placed.append(texts[i * spec.values + used[i]])
            used[i] += 1
        pieces = [Piece(lead, 0.0), *_insert(filler, slots, placed)]
        return [*pieces, *(piece for question in questions for piece in question)]

    def chains(self, room: int, count: int) -> list[Piece]:
        """`count` chains of five names; each is asked for."""
        head, _, tail = VT_TEMPLATE.partition("{context}")
        lines: list[tuple[Ids, int]] = []
        questions = []
        for chain in range(count):
            names = ["".join(self._python.choices(string.ascii_uppercase, k=5)) for _ in range(5)]
            value = str(self._python.randint(10000, 99998))
            texts = [f"VAR {names[0]} = {value}\n"]
            texts += [f"VAR {b} = VAR {a} \n" for a, b in itertools.pairwise(names)]
            lines += [(self._fresh(text), chain) for text in texts]
            ask = (tail + VT_PREFIX).format(query=value, num_v=5)
            question = [Piece(self._fresh(ask), 0.0), Piece(self._fresh(names[0]), 1.0)]
            question += [Piece(self._fresh(" " + name), 1.0) for name in names[1:]]
            questions.append(question)
        lead = self._ids(head)
        room -= len(lead) + sum(len(ids) for ids, _ in lines) + _size(questions)
        filler = [self._ids(NOISE + "\n")] * max(0, room // len(self._ids(NOISE + "\n")))
        slots = np.sort(self._numpy.integers(0, len(filler) + 1, len(lines))).tolist()
        order = [chain for chain in range(count) for _ in range(5)]
        self._python.shuffle(order)
        waiting = {c: iter([ids for ids, own in lines if own == c]) for c in range(count)}
        placed = [next(waiting[c]) for c in order]
        self._python.shuffle(questions)
        pieces = [Piece(lead, 0.0), *_insert(filler, slots, placed)]
        return [*pieces, *(piece for question in questions for piece in question)]

    def frequent(self, room: int) -> list[Piece]:
        """Coded words whose counts fall with the square of their rank; ranks 2 to 4 are asked."""
        head, _, tail = FWE_TEMPLATE.partition(" {context}")
        lead, ask = self._ids(head), self._ids(tail + FWE_PREFIX)
        room = max(40, room - len(lead) - len(ask) - 20)
        size = max(8, (room - 50) // 50)
        code = ["".join(self._python.choices(string.ascii_lowercase, k=6)) for _ in range(size)]
        words = [self._ids(" ..."), *(self._fresh(" " + word) for word in code[1:])]
        lengths = np.array([len(word) for word in words])
        shares = np.arange(1, size + 1) ** -2.0 / ZETA_2
        counts = (room / float((shares * lengths).sum()) * shares).astype(int)
        order = np.repeat(np.arange(size), counts)
        self._numpy.shuffle(order)
        kept = order[np.cumsum(lengths[order]) <= room]
        pieces = [Piece(lead, 0.0), *(Piece(words[i], 0.0) for i in kept), Piece(ask, 0.0)]
        return [*pieces, *(Piece(words[i], 4.0) for i in (1, 2, 3))]

    def _any(self, room: int, mix: Sequence[float]) -> list[Piece]:
        kind = int(self._numpy.choice(4, p=np.array(mix) / sum(mix)))
        many = QUESTIONS.get(room + 1, max(1, room // 128))
        if kind == 0:
            return self.copy(room)
        if kind == 1:
            return self.needles(room, self._spec(room, many))
        if kind == 2:
            return self.chains(room, max(1, min(many // 3, (room - 100) // 260)))
        return self.frequent(room)

    def _spec(self, room: int, many: int) -> Needles:
        """A quarter with several values a key, an eighth with several keys a question."""
        haystack = str(self._numpy.choice(["noise", "essay", "needle"], p=[0.2, 0.4, 0.4]))
        draw = self._numpy.random()
        values = int(self._numpy.integers(2, 5)) if room >= 511 and draw < 0.25 else 1
        asked = int(self._numpy.integers(2, 5)) if room >= 511 and 0.25 <= draw < 0.37 else 1
        questions = max(1, many // (values * asked))
        return Needles(haystack, questions * asked, values, asked, questions)

    def _ask(self, text: str, what: str, keys: list[str], values: list[list[str]]) -> list[Piece]:
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        flat = [value for own in values for value in own]
        pieces = [Piece(self._fresh(text.format(type_needle_v=what, query=query)), 0.0)]
        for i, value in enumerate(flat):
            joint = "" if not i else ", and" if i == len(flat) - 1 else ","
            pieces.append(Piece(self._fresh(f"{joint} {value}"), 1.0))
        return [*pieces, Piece(self._ids("."), 1.0)]

    def _needle(self, key: str, value: str) -> Ids:
        return self._fresh(f" One of the special magic numbers for {key} is: {value}.")

    def _filler(self, haystack: str, room: int) -> list[Ids]:
        if haystack == "noise":
            unit = self._ids(" " + NOISE)
            return [unit] * (room // len(unit))
        if haystack == "needle":
            units: list[Ids] = []
            while True:
                unit = self._needle(self._key(), self._number())
                room -= len(unit)
                if room < 0:
                    return units
                units.append(unit)
        start = int(self._numpy.integers(0, max(1, len(self._essay) - room)))
        text = self._essay[start : start + room]
        return np.array_split(text, max(1, len(text) // 40))

    def _key(self) -> str:
        return f"{self._python.choice(self._adjectives)}-{self._python.choice(self._nouns)}"

    def _number(self) -> str:
        return str(self._python.randint(10**6, 10**7 - 1))

    def _ids(self, text: str) -> Ids:
        """Of a text that comes again."""
        if text not in self._known:
            self._known[text] = self._fresh(text)
        return self._known[text]

    def _fresh(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    @staticmethod
    def _pack(pieces: list[Piece], length: int) -> tuple[Ids, Ids]:
        ids, weights = np.zeros(length, np.int32), np.zeros(length, np.float32)
        ids[0] = BOS
        found = np.concatenate([piece.ids for piece in pieces])[: length - 1]
        each = [np.full(len(piece.ids), piece.weight, np.float32) for piece in pieces]
        ids[1 : 1 + len(found)] = found
        weights[1 : 1 + len(found)] = np.concatenate(each)[: length - 1]
        return ids, weights


def _size(questions: list[list[Piece]]) -> int:
    return sum(len(piece.ids) for question in questions for piece in question)


def _insert(filler: list[Ids], slots: list[int], placed: list[Ids]) -> list[Piece]:
    """`placed[i]` before filler number `slots[i]`; slots rise."""
    pieces, at = [], 0
    for slot, ids in zip(slots, placed, strict=True):
        pieces += [Piece(unit, 0.0) for unit in filler[at:slot]]
        pieces.append(Piece(ids, 0.0))
        at = slot
    return [*pieces, *(Piece(unit, 0.0) for unit in filler[at:])]
