"""Question answering over documents, the gold ones at balanced positions: qa_1 and qa_2."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from blasst.evals.errors import InputError
from blasst.evals.qa_data import QaSet, Question
from blasst.evals.tasks import Draw, Rendered
from blasst.evals.texts import QA_DOCUMENT, QA_PREFIX, QA_TEMPLATE


@dataclass(frozen=True)
class QaDraft:
    """places: per gold document, the share of documents before it (0..1). others: distractors,
    those of the same article or question first, all of them again where they are too few; ranks:
    where each stands among the others."""

    question: Question
    data: QaSet
    places: tuple[float, ...]
    others: tuple[int, ...]
    ranks: tuple[float, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        return self.question.answers

    @property
    def gold(self) -> str:
        """The first reference; the prefix has no blank at its end."""
        return " " + self.question.answers[0]

    def render(self, size: int) -> Rendered:
        """`size` documents in all, as far as there are so many."""
        gold = self.question.gold
        chosen = range(min(len(self.others), max(0, size - len(gold))))
        order = [self.others[i] for i in sorted(chosen, key=self.ranks.__getitem__)]
        total = len(order) + len(gold)
        for place, document in sorted(zip(self.places, gold, strict=True)):
            order.insert(int(place * total), document)
        parts = [
            QA_DOCUMENT.format(i=i + 1, document=self.data.documents[d])
            for i, d in enumerate(order)
        ]
        lead = QA_TEMPLATE.index("{context}")
        starts = [lead + sum(len(p) + 2 for p in parts[: order.index(d)]) for d in gold]
        user = QA_TEMPLATE.format(context="\n\n".join(parts), query=self.question.text)
        return Rendered(user, QA_PREFIX, tuple(sorted(starts)))


def draw(draw: Draw) -> QaDraft:
    """Sample i is the i-th question of an order that depends on seed and task alone."""
    data = draw.haystack.qa(draw.task)
    order = _order(f"{draw.seed}:{draw.task}", len(data.questions))
    if draw.index >= len(order):
        raise InputError(f"{draw.task} has {len(order)} questions; give a smaller --count")
    question = data.questions[order[draw.index]]
    rng = draw.rng()
    near = [i for i in (*question.context, *question.more) if i not in question.gold]
    rng.shuffle(near)
    inside = {*question.gold, *near}
    # A document takes 40 tokens at least: more than these never fit.
    most = draw.length // 40
    far = rng.sample(range(len(data.documents)), min(len(data.documents), most))
    others = (*near, *(i for i in far if i not in inside))
    # SQuAD's end at some 200,000 tokens (NVIDIA's prompts too): here they come again.
    others *= -(-most // len(others)) if 0 < len(others) < most else 1
    ranks = tuple(rng.random() for _ in others)
    return QaDraft(question, data, draw.spread(len(question.gold)), others, ranks)


@functools.lru_cache(maxsize=8)
def _order(name: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(name).sample(range(count), count))
