"""RULER's texts: from NVIDIA's package (pinned) or from a folder of the user's, with sha256."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blasst.evals.errors import InputError
from blasst.evals.kinds import NIAH
from blasst.evals.models import ESSAYS, essays_path, ruler_package
from blasst.evals.packages import Say, sha256_of
from blasst.evals.qa_data import QaSet, read_hotpotqa, read_squad

if TYPE_CHECKING:
    from blasst.evals.official.samples import Materials

ESSAY_FILE, SQUAD_FILE, HOTPOT_FILE = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"


@dataclass(frozen=True)
class DataFiles:
    """folder: where the three files are; None: the package's, fetched when first asked for."""

    folder: Path | None
    say: Say

    def path(self, name: str) -> Path:
        if self.folder is None:
            return essays_path(self.say) if name == ESSAY_FILE else ruler_package(self.say) / name
        path = self.folder / name
        if not path.is_file():
            raise InputError(f"--data {self.folder} holds no {name}; leave --data out to fetch it")
        return path

    def origin(self, task: str) -> str:
        """File, origin and sha256 of the texts that samples of this task are cut from."""
        name = {"qa_1": SQUAD_FILE, "qa_2": HOTPOT_FILE}.get(task)
        if task in NIAH and NIAH[task].haystack == "essay":
            name = ESSAY_FILE
        if name is None:
            return ""
        origin = ESSAYS.pin if self.folder is None else str(self.folder)
        return f"{name}: {origin}, sha256 {sha256_of(self.path(name))}"

    def qa(self, task: str) -> QaSet:
        return _qa(self.path(SQUAD_FILE if task == "qa_1" else HOTPOT_FILE))

    def materials(self) -> Materials:
        """For official mode."""
        from blasst.evals.official.samples import Materials
        from blasst.evals.official.sentences import SentenceCache
        from blasst.evals.wordlists import key_list, word_lists

        essay = SentenceCache.read(self.path(ESSAY_FILE))
        return Materials(word_lists(), key_list(), essay, self.qa)


@functools.lru_cache(maxsize=2)
def _qa(path: Path) -> QaSet:
    return read_squad(path) if path.name == SQUAD_FILE else read_hotpotqa(path)
