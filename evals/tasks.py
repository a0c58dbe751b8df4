"""RULER's 13 tasks by name: how each draws a sample, what its answer may cost, how it is scored.

Parameters as published (NVIDIA/RULER, scripts/synthetic.yaml); the generators are our own.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from blasst.evals.errors import InputError
from blasst.evals.qa_data import QaSet

Metric = Literal["all", "part"]


@dataclass(frozen=True)
class Rendered:
    """A sample's text at one haystack size. `marks`: offsets in `user` of what must be found."""

    user: str
    prefix: str
    marks: tuple[int, ...]


class Draft(Protocol):
    """Everything random about a sample, drawn once; only the haystack's size is still open."""

    @property
    def answers(self) -> tuple[str, ...]: ...

    @property
    def gold(self) -> str: ...

    def render(self, size: int) -> Rendered:
        """The text with `size` units of haystack (words, lines, documents)."""
        ...


def _no_qa(task: str) -> QaSet:
    raise InputError(f"{task} needs its data set; run `blasst ruler fetch` once")


@dataclass(frozen=True)
class Haystack:
    """Material that drafts are cut from. qa: the data set of qa_1 or qa_2."""

    essay_words: tuple[str, ...]
    qa: Callable[[str], QaSet] = _no_qa


@dataclass(frozen=True)
class Draw:
    """One sample's randomness: `rng` is its own; spread() balances it against its neighbours."""

    task: str
    length: int
    seed: int
    index: int
    haystack: Haystack

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.task}:{self.length}:{self.index}"

    def rng(self) -> random.Random:
        return random.Random(self.name)

    def spread(self, count: int) -> tuple[float, ...]:
        """`count` (<= 5) positions in [0, 1): over the indexes of a cell each coordinate, and all
        of them together, fill their range evenly however many samples there are."""
        shift = random.Random(f"{self.seed}:{self.task}:{self.length}")
        return tuple((shift.random() + self.index * step) % 1.0 for step in _STEPS[:count])


_STEPS = tuple(root % 1.0 for root in ((1 + 5**0.5) / 2, 2**0.5, 3**0.5, 13**0.5 / 2, 21**0.5))
"""Multiples of such roots leave no gap and no heap; from five fields, so that none follows
another."""


@dataclass(frozen=True)
class Task:
    """max_tokens: what the model may answer with, reserved in the length. step: one unit's worth
    of haystack in tokens, a first guess for the search. min_size: the smallest haystack allowed.
    metric: all = share of the references found, part = any of them."""

    name: str
    draw: Callable[[Draw], Draft]
    max_tokens: int
    step: float
    min_size: int
    metric: Metric = "all"


@functools.cache
def tasks() -> dict[str, Task]:
    """By RULER's names, in RULER's order."""
    from blasst.evals import counting, niah, qa, vt
    from blasst.evals.kinds import NIAH

    per_unit = {"essay": (1.3, 100), "repeat": (25.0, 6), "needle": (25.0, 6)}
    found = [
        Task(name, functools.partial(niah.draw, kind=kind), 128, *per_unit[kind.haystack])
        for name, kind in NIAH.items()
    ]
    found += [
        Task("vt", vt.draw, max_tokens=30, step=25.0, min_size=6),
        Task("cwe", counting.draw_cwe, max_tokens=120, step=15.0, min_size=12),
        Task("fwe", counting.draw_fwe, max_tokens=50, step=3.0, min_size=60),
        Task("qa_1", qa.draw, max_tokens=32, step=180.0, min_size=1, metric="part"),
        Task("qa_2", qa.draw, max_tokens=32, step=130.0, min_size=2, metric="part"),
    ]
    return {task.name: task for task in found}


def task_named(name: str) -> Task:
    try:
        return tasks()[name]
    except KeyError:
        raise InputError(f"unknown task {name!r}; this release has {', '.join(tasks())}") from None
