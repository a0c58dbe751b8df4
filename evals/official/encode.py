"""Official samples as token ids: the same text, its answer prefix inside the assistant's turn."""

from __future__ import annotations

from collections.abc import Iterator

from blasst.evals.errors import InputError
from blasst.evals.kinds import NIAH
from blasst.evals.official.common import OfficialSample, Request, numbered
from blasst.evals.official.samples import Materials, official_samples
from blasst.evals.prompts import PromptEncoder
from blasst.evals.samples import Sample, check_request, sample_id
from blasst.evals.tasks import task_named

_LEADS = {
    "vt": " Answer: According to the chain(s)",
    "cwe": " Answer: The top 10",
    "fwe": " Answer: According to the coded",
    "qa_1": " Answer:",
    "qa_2": " Answer:",
}
"""How the answer prefix begins; the needle tasks' begins in another way."""


def generate_official(
    task_name: str,
    length: int,
    count: int,
    *,
    seed: int,
    encoder: PromptEncoder,
    materials: Materials,
) -> Iterator[Sample]:
    """Samples 0..count-1 of NVIDIA's stream at `program_limit` tokens.

    Each depends on those before it, so that more samples begin with the same ones, but a sample
    cannot be made alone. Prompt and answer never exceed `length`.
    """
    task = task_named(task_name)
    check_request(length, count)
    tokens = encoder.count
    limit = program_limit(task_name, length, encoder)
    request = Request(limit, task.max_tokens, count, seed, tokens)
    for index, made in enumerate(_named(task_name, length, request, materials)):
        user, prefix = split_prefix(task_name, made.text)
        marks = _marks(task_name, made, user)
        encoded = encoder.encode(user, prefix, marks)
        if len(encoded.ids) + task.max_tokens > length:
            raise InputError(
                f"official {task_name}: {len(encoded.ids)} tokens and {task.max_tokens} for the "
                f"answer exceed {length}; give a slightly longer length"
            )
        yield Sample(
            id=sample_id("official", task_name, length, seed, index),
            task=task_name,
            length=length,
            index=index,
            seed=seed,
            prompt=encoded.ids,
            gold=encoder.encode_answer(_gold(task_name, list(made.answers))),
            answers=made.answers,
            max_tokens=task.max_tokens,
            needles=encoded.places,
            prompt_format=encoder.format.name,
            tokenizer_sha256=encoder.sha256,
            mode="official",
        )


def _named(
    task_name: str, length: int, request: Request, materials: Materials
) -> Iterator[OfficialSample]:
    """The stream; what it cannot make names task and length."""
    try:
        yield from official_samples(task_name, request, materials)
    except InputError as e:
        raise InputError(f"official {task_name} at {length}: {e}") from e


def program_limit(task_name: str, length: int, encoder: PromptEncoder) -> int:
    """`--max_seq_length` of NVIDIA's program for the same texts: `length` less the turn format,
    which the program does not count, and for fwe less the answer, which it does not either."""
    parts = encoder.format
    overhead = encoder.count(parts.before) + encoder.count(parts.after)
    # At a border of the format the text may be cut in another way: two tokens of room.
    limit = length - overhead - (2 if overhead else 0)
    return limit - task_named(task_name).max_tokens if task_name == "fwe" else limit


def split_prefix(task_name: str, text: str) -> tuple[str, str]:
    """The user's text and the answer prefix that ends the official one."""
    lead = _LEADS.get(task_name, " The special magic ")
    at = text.rindex(lead)
    return text[:at], text[at:]


def _marks(task_name: str, made: OfficialSample, user: str) -> tuple[int, ...]:
    """Where the needles of the needle tasks and of vt begin; nowhere for the others."""
    if task_name in NIAH:
        ends = [user.index(f"is: {answer}.") for answer in made.answers]
        return tuple(sorted(user.rindex("One of the special", 0, end) for end in ends))
    if task_name == "vt":
        return tuple(sorted(user.index(f"VAR {name} =") for name in made.answers))
    return ()


def _gold(task_name: str, answers: list[str]) -> str:
    """The answer as balanced mode writes it."""
    if task_name == "vt":
        return " ".join(answers)
    if task_name == "cwe":
        return numbered(answers)
    if task_name == "fwe":
        return "".join(f" {word}" for word in answers)
    if task_name in NIAH and len(answers) > 1:
        return " " + ", ".join(answers[:-1]) + ", and " + answers[-1]
    return " " + answers[0]
