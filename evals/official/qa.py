"""NVIDIA's question answering: the documents that hold the answer among others."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from blasst.evals.errors import InputError
from blasst.evals.official.common import OfficialSample, Request, Sizes, Text, find_size, fit
from blasst.evals.qa_data import QaSet
from blasst.evals.texts import QA_DOCUMENT, QA_PREFIX, QA_TEMPLATE


class QaGenerator:
    """Question i of the data set is sample i."""

    def __init__(self, request: Request, data: QaSet) -> None:
        self._request, self._data = request, data
        self._documents = list(data.documents)
        self._rng = random.Random(request.seed)

    def samples(self) -> Iterator[OfficialSample]:
        request, data = self._request, self._data
        if request.count > len(data.questions):
            raise InputError(
                f"{request.count} samples: the data set has {len(data.questions)} questions"
            )

        def used(size: int) -> int:
            text, answers = self._draw(0, size)
            return request.tokens(f"{text} {answers}") + request.budget

        sizes = Sizes(10, len(self._documents))
        size = find_size(used, request.limit, sizes)
        for index in range(request.count):
            yield fit(functools.partial(self._draw, index), size, sizes.step, request)

    def _draw(self, index: int, size: int) -> Text:
        question = self._data.questions[index]
        if size < len(self._documents):
            texts = [self._documents[i] for i in self._chosen(index, size)]
        else:
            texts = self._documents  # shuffled in place: the program does so, and goes on with it
        random.Random(self._request.seed).shuffle(texts)
        context = "\n\n".join(
            QA_DOCUMENT.format(i=i + 1, document=text) for i, text in enumerate(texts)
        )
        text = (QA_TEMPLATE + QA_PREFIX).format(context=context, query=question.text)
        return text, list(question.answers)

    def _chosen(self, index: int, size: int) -> list[int]:
        question = self._data.questions[index]
        context, more = list(question.context), list(question.more)
        if size - len(context) <= len(more):
            return context + self._rng.sample(more, size - len(context))
        inside = {*context, *more}
        others = [i for i in range(len(self._documents)) if i not in inside]
        missing = max(0, size - len(context) - len(more))
        return context + more + self._rng.sample(others, missing)
