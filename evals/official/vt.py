"""NVIDIA's variable tracking: chains of assignments in noise, after one solved example."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import TYPE_CHECKING

from blasst.evals.official.common import OfficialSample, Request, Sizes, Text, find_size, fit
from blasst.evals.texts import NOISE, VT_PREFIX_2026, VT_TEMPLATE

if TYPE_CHECKING:
    import numpy as np

_EXAMPLE_LIMIT = 500
_HOPS = 4
_LEAD = VT_TEMPLATE[:20]
_TAIL = VT_PREFIX_2026[-10:]


class VtGenerator:
    """One chain of five names. Letters come from Python's stream, values from numpy's."""

    def __init__(self, request: Request) -> None:
        import numpy as np

        self._request = request
        self._rng = random.Random(request.seed)
        self._values: np.random.RandomState = np.random.RandomState(request.seed)

    def samples(self) -> Iterator[OfficialSample]:
        request = self._request
        small = Request(_EXAMPLE_LIMIT, request.budget, 1, request.seed, request.tokens)
        first = self._fitted(small, step=5, letters=3, extra=0)
        example = f"{first.text} {' '.join(first.answers)}\n\n"
        extra = request.tokens(example)
        for sample in self._many(request, step=10, letters=5, extra=extra):
            cut = sample.text.index(_LEAD)
            text = f"{sample.text[:cut]} {self._renamed(example)}\n\n{sample.text[cut:]}"
            yield OfficialSample(text, sample.answers, sample.length)

    def _fitted(self, request: Request, step: int, letters: int, extra: int) -> OfficialSample:
        return next(self._many(request, step, letters, extra))

    def _many(
        self, request: Request, step: int, letters: int, extra: int
    ) -> Iterator[OfficialSample]:
        def used(size: int) -> int:
            text, names = self._draw(size, letters)
            return request.tokens(f"{text} {names}") + request.budget + extra

        size = find_size(used, request.limit, Sizes(step))
        reserved = Request(
            request.limit, request.budget + extra, request.count, request.seed, request.tokens
        )
        for _ in range(request.count):
            # A sample that is too long is drawn again at the same size, not at a smaller one.
            yield fit(lambda _: self._draw(size, letters), size, step, reserved)

    def _draw(self, size: int, letters: int) -> Text:
        names, chain = self._chain(letters)
        lines = [NOISE + "\n"] * size
        if len(lines) <= len(chain):
            lines = [part + "." if part.strip() else part for x in lines for part in x.split(".")]
            if len(lines) <= len(chain):
                chain = chain[: len(lines) - 1]
        places = sorted(self._rng.sample(range(len(lines)), len(chain)))
        for j, place in enumerate(places):
            lines.insert(place + j, chain[j])
        context = " ".join(lines).replace(". \n", ".\n")
        value = chain[0].split("=")[-1].strip()
        template = VT_TEMPLATE + VT_PREFIX_2026
        return template.format(context=context, query=value, num_v=_HOPS + 1), names

    def _chain(self, letters: int) -> tuple[list[str], list[str]]:
        """Names and lines. Raises IndexError after a collision, as the program does inside."""
        count = _HOPS + 1
        names = [self._name(letters) for _ in range(count)]
        while len(set(names)) < count:
            names.append(self._name(letters))
        chains = []
        for start in range(0, len(names), count):
            these = names[start : start + count]
            lines = [f"VAR {these[0]} = {self._values.randint(10000, 99999)}"]
            lines += [f"VAR {these[j + 1]} = VAR {these[j]} " for j in range(_HOPS)]
            chains.append(lines)
        return names[:count], chains[0]

    def _name(self, letters: int) -> str:
        return "".join(self._rng.choices(string.ascii_uppercase, k=letters))

    def _renamed(self, example: str) -> str:
        for name in example[example.index(_TAIL) + len(_TAIL) :].split():
            example = example.replace(name, self._name(len(name)))
        return example
