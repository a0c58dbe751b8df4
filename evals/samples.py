"""Samples of a task at a length: drawn from their own seed, filled up to the length, checked."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blasst.evals.errors import InputError
from blasst.evals.prompts import EncodedPrompt, PromptEncoder
from blasst.evals.tasks import Draft, Draw, Haystack, Task, task_named

MIN_LENGTH = 512
MAX_LENGTH = 1 << 20


@dataclass(frozen=True)
class Sample:
    """prompt, gold: token ids. needles: index in `prompt` of the first token of each needle, in
    document order. length: nominal tokens; prompt + max_tokens and prompt + gold stay within it.
    data: file, origin and sha256 of the texts that it is cut from; empty without any."""

    id: str
    task: str
    length: int
    index: int
    seed: int
    prompt: tuple[int, ...]
    gold: tuple[int, ...]
    answers: tuple[str, ...]
    max_tokens: int
    needles: tuple[int, ...]
    prompt_format: str
    tokenizer_sha256: str
    mode: str = "balanced"
    data: str = ""

    @property
    def need(self) -> int:
        """Tokens of context that a server must have for this sample."""
        return len(self.prompt) + max(self.max_tokens, len(self.gold))

    @functools.cached_property
    def prompt_sha256(self) -> str:
        """Of the ids of prompt and gold answer: two equal ones are the same measurement."""
        text = f"{','.join(map(str, self.prompt))}|{','.join(map(str, self.gold))}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each needle begins, as a share of the prompt's tokens."""
        return tuple(place / len(self.prompt) for place in self.needles)


MODES = ("balanced", "official")


def sample_id(mode: str, task: str, length: int, seed: int, index: int) -> str:
    return f"{mode}/{task}/{length}/{seed}/{index}"


def check_request(length: int, count: int) -> None:
    """Raises InputError for what no task can make."""
    if not MIN_LENGTH <= length <= MAX_LENGTH:
        raise InputError(
            f"length {length} is outside {MIN_LENGTH}..{MAX_LENGTH} tokens; usual: 2048 to 131072"
        )
    if count < 1:
        raise InputError(f"{count} samples: give at least 1")


def generate(
    task_name: str,
    length: int,
    count: int,
    *,
    seed: int,
    encoder: PromptEncoder,
    haystack: Haystack,
) -> Iterator[Sample]:
    """Balanced samples 0..count-1; each depends on (seed, task, length, its index) alone."""
    task = task_named(task_name)
    check_request(length, count)
    for index in range(count):
        draft = task.draw(Draw(task_name, length, seed, index, haystack))
        gold = encoder.encode_answer(draft.gold)
        encoded = _fill(task, draft, length, _reserve(task, gold), encoder)
        yield Sample(
            id=sample_id("balanced", task_name, length, seed, index),
            task=task_name,
            length=length,
            index=index,
            seed=seed,
            prompt=encoded.ids,
            gold=gold,
            answers=draft.answers,
            max_tokens=task.max_tokens,
            needles=encoded.places,
            prompt_format=encoder.format.name,
            tokenizer_sha256=encoder.sha256,
        )


def check_fits(
    task_name: str, length: int, *, seed: int, encoder: PromptEncoder, haystack: Haystack
) -> None:
    """Raises InputError when not even the smallest prompt of the first sample fits: before the
    samples of other tasks are made."""
    task = task_named(task_name)
    draft = task.draw(Draw(task_name, length, seed, 0, haystack))
    _smallest(task, draft, length, _reserve(task, encoder.encode_answer(draft.gold)), encoder)


def _reserve(task: Task, gold: tuple[int, ...]) -> int:
    """Tokens that are kept for the answer."""
    return max(task.max_tokens, len(gold))


_STALLS = 8
"""Sizes without another token: some more words of fwe are none in one or two steps."""


def _encoded(draft: Draft, size: int, encoder: PromptEncoder) -> EncodedPrompt:
    text = draft.render(size)
    return encoder.encode(text.user, text.prefix, text.marks)


def _smallest(
    task: Task, draft: Draft, length: int, reserve: int, encoder: PromptEncoder
) -> EncodedPrompt:
    best = _encoded(draft, task.min_size, encoder)
    if len(best.ids) > length - reserve:
        raise InputError(
            f"length {length} is too short for {task.name}: the smallest prompt has "
            f"{len(best.ids)} tokens and {reserve} are kept for the answer; give a longer length"
        )
    return best


def _fill(
    task: Task, draft: Draft, length: int, reserve: int, encoder: PromptEncoder
) -> EncodedPrompt:
    """The prompt with the largest haystack that leaves `reserve` tokens free within `length`.

    Regula falsi on size -> tokens, kept inside a bracket: three or four encodings, not thirteen.
    """
    room = length - reserve
    low, best = task.min_size, _smallest(task, draft, length, reserve, encoder)
    high: int | None = None
    per_unit, stalls = task.step, 0
    while high is None or high - low > 1:
        guess = low + max(1, int((room - len(best.ids)) / per_unit))
        if stalls > _STALLS:
            guess += 2**stalls
        if high is not None:
            guess = min(guess, high - 1)
        tried = _encoded(draft, guess, encoder)
        stalls = stalls + 1 if high is None and len(tried.ids) <= len(best.ids) else 0
        if stalls and guess > 2 * length:  # units of a token at least, but for some of fwe's
            raise InputError(
                f"{task.name} has no text for {length} tokens: it ends at {len(best.ids)}; give a "
                "shorter length"
            )
        per_unit = max((len(tried.ids) - len(best.ids)) / (guess - low), 0.05)
        if len(tried.ids) <= room:
            low, best = guess, tried
        else:
            high = guess
    if len(best.ids) + reserve > length:
        raise AssertionError(f"{len(best.ids)} + {reserve} tokens exceed {length}")
    return best


def write_samples(path: Path, samples: Iterator[Sample]) -> int:
    """One JSON object a line, complete or not there at all; returns how many."""
    count = 0
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "w", encoding="utf-8") as f:
            for sample in samples:
                f.write(json.dumps(asdict(sample), separators=(",", ":")) + "\n")
                count += 1
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def read_samples(path: Path) -> list[Sample]:
    """Raises InputError naming the line that is no sample."""
    samples = []
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                try:
                    samples.append(_parse(json.loads(line)))
                except (ValueError, KeyError, TypeError) as e:
                    raise InputError(f"{path}, line {number}, is not a sample: {e!r}") from e
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}") from e
    if not samples:
        raise InputError(f"{path} holds no samples; make some with `blasst ruler generate`")
    return samples


def _parse(record: dict[str, Any]) -> Sample:
    lists = ("prompt", "gold", "answers", "needles")
    fields: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in record.items()}
    return Sample(**fields)
