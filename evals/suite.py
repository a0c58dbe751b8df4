"""Which samples a sweep needs, and making them for one model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blasst.evals.errors import InputError
from blasst.evals.packages import Say
from blasst.evals.samples import Sample, generate
from blasst.evals.tasks import Haystack, task_named


@dataclass(frozen=True)
class Suite:
    """count: samples of each task at each length (tokens)."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int

    @classmethod
    def of(cls, tasks: Sequence[str], lengths: Sequence[int], count: int, seed: int) -> Suite:
        """Each task and length once. Raises InputError for an unknown task."""
        for name in tasks:
            task_named(name)
        if not tasks or not lengths:
            raise InputError("give at least one task and one length")
        return cls(tuple(dict.fromkeys(tasks)), tuple(sorted(set(lengths))), count, seed)


def make_samples(
    suite: Suite, model: Path | None, prompt_format: str, say: Say
) -> Iterator[Sample]:
    """All samples, lengths in order. model: folder with a tokenizer; None: the demo model's."""
    from blasst.evals.essays import essay_words
    from blasst.evals.models import essays_path, smollm2_folder
    from blasst.evals.prompts import PromptEncoder

    encoder = PromptEncoder(model if model is not None else smollm2_folder(say), prompt_format)
    haystack = Haystack(tuple(essay_words(essays_path(say))))
    for length in suite.lengths:
        for task in suite.tasks:
            yield from generate(
                task, length, suite.count, seed=suite.seed, encoder=encoder, haystack=haystack
            )
