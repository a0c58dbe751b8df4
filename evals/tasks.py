"""RULER's tasks by name: how each draws a sample and what its answer may cost.

Parameters as published (NVIDIA/RULER, scripts/synthetic.yaml); the generators are our own.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from blasst.evals.errors import InputError


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
        """The text with `size` units of haystack (words, or lines)."""
        ...


@dataclass(frozen=True)
class Haystack:
    """Material that drafts are cut from."""

    essay_words: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """max_tokens: what the model may answer with, reserved in the length. step: one unit's worth
    of haystack in tokens, a first guess for the search. min_size: the smallest haystack allowed."""

    name: str
    draw: Callable[[random.Random, Haystack], Draft]
    max_tokens: int
    step: float
    min_size: int


@functools.cache
def tasks() -> dict[str, Task]:
    """All tasks of this release, by RULER's names."""
    from blasst.evals import niah, vt

    single = functools.partial(niah.draw, num_values=1)
    multi = functools.partial(niah.draw, num_values=4)
    found = (
        Task("niah_single_2", single, max_tokens=128, step=1.3, min_size=100),
        Task("niah_multivalue", multi, max_tokens=128, step=1.3, min_size=100),
        Task("vt", vt.draw, max_tokens=30, step=25.0, min_size=6),
    )
    return {task.name: task for task in found}


def task_named(name: str) -> Task:
    try:
        return tasks()[name]
    except KeyError:
        raise InputError(f"unknown task {name!r}; this release has {', '.join(tasks())}") from None
