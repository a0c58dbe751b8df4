"""Training documents as token arrays: RULER's tasks with many questions each, and plain copying.

Pieces are tokenised once; the tokenizer's borders make their concatenation the text's own tokens,
so that the hot loop is numpy only.
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blasst.evals.official.common import numbered
from blasst.evals.official.niah import singular
from blasst.evals.official.words import ZETA_2
from blasst.evals.texts import (
    CWE_PREFIX,
    CWE_TEMPLATE,
    FWE_PREFIX,
    FWE_TEMPLATE,
    NEEDLE,
    NIAH_PREFIX,
    NIAH_TEMPLATE,
    NOISE,
    VT_PREFIX,
    VT_TEMPLATE,
)
from blasst.evals.wordlists import word_lists

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS = 1, 2
QUESTIONS = {256: 3, 512: 6, 1024: 12, 2048: 16, 4096: 24, 8192: 32, 16384: 48, 32768: 64}
"""Questions a document: without many of them, almost no token of a long one teaches anything."""
EVALUATED = ("copy", "single", "multikey", "uuids", "multivalue", "multiquery", "vt", "fwe", "cwe")
_COMMON, _SHORT_CWE = 10, 5000
"""Words that cwe asks for; below so many tokens it repeats its words less often."""

Ids = np.ndarray


class Piece(NamedTuple):
    """ids: int32. weight: of these tokens in the loss; above 0 they are an answer."""

    ids: Ids
    weight: float


@dataclass(frozen=True)
class Needles:
    """haystack: noise, essay or needle. keys in the document; values a key; asked: keys a
    question; questions: at most. key, value: what they are, words, numbers or uuids."""

    haystack: str = "essay"
    keys: int = 1
    values: int = 1
    asked: int = 1
    questions: int = 1
    key: str = "words"
    value: str = "numbers"


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
        """One question a document, of EVALUATED; the end of the answer is not asked for."""
        room = length - 1
        make: dict[str, Callable[[], list[Piece]]] = {
            "copy": lambda: self.copy(room),
            "single": lambda: self.needles(room, Needles()),
            "multikey": lambda: self.needles(room, Needles("needle")),
            "uuids": lambda: self.needles(room, Needles("needle", key="uuids", value="uuids")),
            "multivalue": lambda: self.needles(room, Needles(values=4)),
            "multiquery": lambda: self.needles(room, Needles(keys=4, asked=4)),
            "vt": lambda: self.chains(room, 1),
            "fwe": lambda: self.frequent(room),
            "cwe": lambda: self.common(room, solved_weight=0.0),
        }
        made = [self._pack(make[task](), length) for _ in range(count)]
        ids, weights = (np.stack(parts) for parts in zip(*made, strict=True))
        weights[ids == EOS] = 0.0
        return ids, weights

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
        keys = [self._one(spec.key) for _ in range(spec.keys)]
        values = [[self._one(spec.value) for _ in range(spec.values)] for _ in keys]
        template, prefix, what = NIAH_TEMPLATE, NIAH_PREFIX, spec.value
        if spec.values * spec.asked == 1:
            template, prefix, what = singular(template), singular(prefix), what[:-1]
        head, _, tail = template.partition("{context}")
        if spec.haystack != "essay":
            head = head.removesuffix("\n")  # lines begin with it
        lead = self._ids(head.format(type_needle_v=what))
        order = self._numpy.permutation(spec.keys).tolist()
        questions = [
            self._ask(tail + prefix, what, [keys[i] for i in group], [values[i] for i in group])
            for group in (order[i : i + spec.asked] for i in range(0, spec.keys, spec.asked))
            if len(group) == spec.asked
        ][: spec.questions]
        texts = [self._needle(spec, keys[i], v) for i in range(spec.keys) for v in values[i]]
        fixed = len(lead) + sum(map(len, texts)) + _size(questions[:1])
        while len(questions) > 1 and fixed + _size(questions[1:]) > room:
            questions.pop()
        room -= fixed + _size(questions[1:])
        filler = self._filler(spec, max(0, room))
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

    def chains(self, room: int, count: int, *, example: bool = False) -> list[Piece]:
        """`count` chains of five names; each is asked for. example: after a solved one, as RULER
        has it."""
        if example:
            solved = [*self._chains(min(420, room // 3), 1, 3), Piece(self._ids("\n\n\n"), 0.0)]
            return [*solved, *self._chains(room - _size([solved]), count, 5)]
        return self._chains(room, count, 5)

    def _chains(self, room: int, count: int, letters: int) -> list[Piece]:
        head, _, tail = VT_TEMPLATE.partition("{context}")
        lines: list[tuple[Ids, int]] = []
        questions = []
        for chain in range(count):
            drawn = (self._python.choices(string.ascii_uppercase, k=letters) for _ in range(5))
            names = ["".join(name) for name in drawn]
            value = str(self._python.randint(10000, 99998))
            texts = [f"\nVAR {names[0]} = {value}"]
            texts += [f"\nVAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
            lines += [(self._fresh(text), chain) for text in texts]
            ask = (tail + VT_PREFIX).format(query=value, num_v=5)
            question = [Piece(self._fresh(ask), 0.0), Piece(self._fresh(names[0]), 1.0)]
            question += [Piece(self._fresh(" " + name), 1.0) for name in names[1:]]
            questions.append(question if letters == 3 else [*question, _END])
        lead = self._ids(head.removesuffix("\n"))
        room -= len(lead) + sum(len(ids) for ids, _ in lines) + _size(questions)
        noise = self._ids("\n" + NOISE)
        filler = [noise] * max(0, room // len(noise))
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
        return [*pieces, *(Piece(words[i], 4.0) for i in (1, 2, 3)), _END]

    def common(self, room: int, *, solved_weight: float = 2.0) -> list[Piece]:
        """Ten common words among others in a numbered list, after a small solved one. Asked for
        in the order in which they first stand there: any order scores, one can be learnt."""
        short = room < _SHORT_CWE
        known = self._python.sample(self._nouns, min(len(self._nouns), _COMMON + room // 9))
        few, times = (20, ((3, 1), (6, 1))) if short else (40, ((10, 3), (30, 3)))
        solved = self._listed(known[:_COMMON], known[_COMMON:few], times[0], solved_weight)
        room -= _size([solved])
        common, others = known[few : few + _COMMON], known[few + _COMMON :]
        # A numbered word has seven tokens or so; what does not fit is taken away at the end.
        fits = max(0, room - 160) // 7
        others = others[: max(1, (fits - _COMMON * times[1][0]) // times[1][1])]
        made = self._listed(common, others, times[1], 2.0)
        while _size([made]) > room and len(others) > 1:
            others = others[: len(others) * 9 // 10]
            made = self._listed(common, others, times[1], 2.0)
        return [*solved, Piece(self._ids("\n"), 0.0), *made, _END]

    def _listed(
        self, common: list[str], others: list[str], times: tuple[int, int], weight: float
    ) -> list[Piece]:
        words = common * times[0] + others * times[1]
        self._python.shuffle(words)
        text = CWE_TEMPLATE.format(context=numbered(words)) + CWE_PREFIX
        answer = numbered(sorted(common, key=words.index))
        return [Piece(self._fresh(text), 0.0), Piece(self._fresh(answer), weight)]

    def _any(self, room: int, mix: Sequence[float]) -> list[Piece]:
        kind = int(self._numpy.choice(4, p=np.array(mix) / sum(mix)))
        many = QUESTIONS.get(room + 1, max(1, room // 128))
        if kind == 0:
            return self.copy(room)
        if kind == 1:
            return self.needles(room, self._spec(room, many))
        if kind == 2:
            example = room >= 1023 and self._numpy.random() < 0.5
            left = room - 420 if example else room
            return self.chains(room, max(1, min(many // 3, (left - 100) // 260)), example=example)
        if room >= 1023 and self._numpy.random() < 0.6:
            return self.common(room)
        return self.frequent(room)

    def _spec(self, room: int, many: int) -> Needles:
        """A third with four values a key, an eighth with several keys a question; of documents
        that have room for them, a sixth with uuids."""
        haystack = str(self._numpy.choice(["noise", "essay", "needle"], p=[0.2, 0.4, 0.4]))
        draw, more, long = self._numpy.random(), self._numpy.random(), room >= 511
        values = 4 if long and draw < 0.33 else 1
        asked = int(self._numpy.integers(2, 5)) if long and 0.33 <= draw < 0.45 else 1
        value = "uuids" if room >= 1023 and more < 0.16 else "numbers"
        key = "uuids" if room >= 1023 and more < 0.08 else "words"
        cost = values * asked * (3 if value == "uuids" else 1)
        questions = max(1, many // cost)
        if values > 1 and self._numpy.random() < 0.4:
            questions = 1
        return Needles(haystack, questions * asked, values, asked, questions, key, value)

    def _ask(self, text: str, what: str, keys: list[str], values: list[list[str]]) -> list[Piece]:
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        flat = [value for own in values for value in own]
        pieces = [Piece(self._fresh(text.format(type_needle_v=what, query=query)), 0.0)]
        for i, value in enumerate(flat):
            joint = "" if not i else ", and" if i == len(flat) - 1 else ","
            pieces.append(Piece(self._fresh(f"{joint} {value}"), 1.0))
        return [*pieces, Piece(self._ids("."), 1.0), _END]

    def _needle(self, spec: Needles, key: str, value: str) -> Ids:
        """A sentence of running text, or a line."""
        text = NEEDLE.format(type_needle_v=spec.value, key=key, value=value)
        return self._fresh(f" {text}" if spec.haystack == "essay" else f"\n{text}")

    def _filler(self, spec: Needles, room: int) -> list[Ids]:
        if spec.haystack == "noise":
            unit = self._ids("\n" + NOISE)
            return [unit] * (room // len(unit))
        if spec.haystack == "needle":
            units: list[Ids] = []
            while True:
                unit = self._needle(spec, self._one(spec.key), self._one(spec.value))
                room -= len(unit)
                if room < 0:
                    return units
                units.append(unit)
        start = int(self._numpy.integers(0, max(1, len(self._essay) - room)))
        text = self._essay[start : start + room]
        return np.array_split(text, max(1, len(text) // 40))

    def _one(self, kind: str) -> str:
        if kind == "words":
            return f"{self._python.choice(self._adjectives)}-{self._python.choice(self._nouns)}"
        if kind == "numbers":
            return str(self._python.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self._python.getrandbits(128), version=4))

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


_END = Piece(np.array([EOS], np.int32), 1.0)
"""After every answer: a model that ends there costs a server few tokens."""


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
