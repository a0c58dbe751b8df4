"""RULER's texts: from NVIDIA's package (pinned) or from a folder of the user's, with sha256."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blasst.evals.errors import InputError
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

    def describe(self, tasks: tuple[str, ...]) -> dict[str, str]:
        """What the samples of these tasks are cut from: file -> origin and sha256."""
        names = {ESSAY_FILE: any(t not in ("qa_1", "qa_2", "vt", "cwe", "fwe") for t in tasks)}
        names |= {SQUAD_FILE: "qa_1" in tasks, HOTPOT_FILE: "qa_2" in tasks}
        origin = ESSAYS.pin if self.folder is None else str(self.folder)
        return {
            n: f"{origin}, sha256 {sha256_of(self.path(n))}" for n, used in names.items() if used
        }

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
