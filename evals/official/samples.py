"""The 13 tasks by RULER's names, each with its generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blasst.evals.errors import InputError
from blasst.evals.kinds import NIAH
from blasst.evals.official.common import OfficialSample, Request
from blasst.evals.official.niah import NiahGenerator
from blasst.evals.official.qa import QaGenerator
from blasst.evals.official.sentences import SentenceCache
from blasst.evals.official.vt import VtGenerator
from blasst.evals.official.words import CweGenerator, FweGenerator
from blasst.evals.qa_data import QaSet
from blasst.evals.wordlists import KeyList, WordLists


@dataclass(frozen=True)
class Materials:
    """qa: the data set of qa_1 or qa_2; called only for these tasks."""

    lists: WordLists
    keys: KeyList
    essay: SentenceCache
    qa: Callable[[str], QaSet]


def official_samples(task: str, request: Request, materials: Materials) -> Iterator[OfficialSample]:
    """Prompt and answer prefix as one text, without a chat format. Raises InputError."""
    if task in NIAH:
        generator = NiahGenerator(NIAH[task], request, materials.keys, materials.essay)
        return generator.samples()
    if task == "vt":
        return VtGenerator(request).samples()
    if task == "cwe":
        return CweGenerator(request, materials.lists).samples()
    if task == "fwe":
        return FweGenerator(request).samples()
    if task in ("qa_1", "qa_2"):
        return QaGenerator(request, materials.qa(task)).samples()
    raise InputError(f"unknown task {task!r}")
