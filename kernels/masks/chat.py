"""Samples from prompts and conversations: shared prefixes, and thinking that history leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks.mods import TRUNK, Role
from blasst.kernels.masks.segments import Piece, Sample

Tokenize = Callable[[str], Sequence[int]]
Strip = Literal["mask", "exact"]


@dataclass(frozen=True)
class Tags:
    """How thinking is marked. `trailing` characters after the closing tag go with the thinking,
    because chat templates strip them too."""

    opening: str = "<think>"
    closing: str = "</think>"
    trailing: str = "\n"

    def __post_init__(self) -> None:
        if not self.opening or not self.closing:
            raise InvalidInputError(["both tags need at least one character"])

    def split(self, text: str) -> Iterator[tuple[Role, str]]:
        """Parts of an assistant message in order, none empty. Raises on tags that do not pair."""
        at = 0
        span = re.compile(
            f"{re.escape(self.opening)}.*?{re.escape(self.closing)}"
            + (f"[{re.escape(self.trailing)}]*" if self.trailing else ""),
            re.DOTALL,
        )
        for match in span.finditer(text):
            yield from self._answer(text[at : match.start()])
            self._check_thought(match.group())
            yield Role.THINK, match.group()
            at = match.end()
        yield from self._answer(text[at:])

    def _check_thought(self, span: str) -> None:
        if self.opening != self.closing and span.count(self.opening) > 1:
            raise InvalidInputError(
                [
                    f"{self.opening!r} stands twice before {self.closing!r} in {span[:60]!r}; "
                    "close each thought or choose other tags"
                ]
            )

    def _answer(self, text: str) -> Iterator[tuple[Role, str]]:
        for tag in (self.opening, self.closing):
            if tag in text:
                raise InvalidInputError(
                    [f"{tag!r} has no partner in {text[:60]!r}; close it or choose other tags"]
                )
        if text:
            yield Role.ANSWER, text


@dataclass(frozen=True)
class Template:
    """What stands before and after the content of a message. header: a format string of `role`.

    Header, thinking, answer and footer are tokenized apart, so no token crosses a border: the
    tokenizer must add no token of its own to each (such as one for the start of a text).
    """

    header: str = "<|im_start|>{role}\n"
    footer: str = "<|im_end|>\n"
    tags: Tags = field(default_factory=Tags)

    def __post_init__(self) -> None:
        try:
            self.header.format(role="user")
        except (KeyError, IndexError, ValueError) as e:
            raise InvalidInputError(
                [
                    f"header {self.header!r} is no format string of role ({e!r}); "
                    "write {{ and }} for braces"
                ]
            ) from e


def shared_prefix_sample(
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],
    *,
    prefix_loss: bool = False,
    align: int = 1,
) -> Sample:
    """[prefix, suffix 1, ..., suffix n] for the mask shared_prefix(); loss on every suffix.

    align: suffixes start at multiples of it (128 = a block border), for fewer partial blocks.
    """
    if not prefix or not suffixes or not all(suffixes):
        raise InvalidInputError(
            [
                f"{len(prefix)} tokens of prefix and suffixes of {[len(s) for s in suffixes]}: the "
                "prefix, and one suffix or more, need at least one token each"
            ]
        )
    first = Piece(tuple(prefix), loss=prefix_loss)
    rest = [
        Piece(tuple(s), segment=i, position=len(prefix), loss=True, role=Role.ANSWER, after=0)
        for i, s in enumerate(suffixes, start=1)
    ]
    return Sample((first, *rest), align)


def conversation(
    messages: Sequence[Mapping[str, str]],
    tokenize: Tokenize,
    *,
    strip: Strip = "mask",
    template: Template | None = None,
    align: int = 1,
) -> Sample:
    """A chat, loss on all that the assistant says. A turn starts with the first user message after
    another role.

    strip="mask": one copy of each token, for strip_history_thinking(); history keys have seen their
    own thinking. strip="exact": a turn with thinking is a branch that carries the loss, and its
    answer follows again, without loss, as history; for shared_prefix(). Equal to one pass per turn.
    """
    if strip not in ("mask", "exact"):
        raise InvalidInputError([f'strip {strip!r} must be "mask" or "exact"'])
    parts = _parts(messages, tokenize, template or Template())
    if not parts:
        raise InvalidInputError(["the conversation has no tokens"])
    return Sample(_one_copy(parts) if strip == "mask" else _branches(parts), align)


def passes(
    messages: Sequence[Mapping[str, str]],
    tokenize: Tokenize,
    *,
    template: Template | None = None,
) -> list[Sample]:
    """What conversation(strip="exact") stands for: one causal sample for each turn in which the
    assistant speaks, earlier thinking left out, loss on that turn only."""
    parts = _parts(messages, tokenize, template or Template())
    samples = []
    for turn in sorted({p.turn for p in parts if p.loss}):
        seen = [p for p in parts if p.turn == turn or (p.turn < turn and p.role != Role.THINK)]
        path = [_Part(p.tokens, p.turn, p.role, p.loss and p.turn == turn) for p in seen]
        samples.append(Sample(_one_copy(path)))
    return samples


@dataclass(frozen=True)
class _Part:
    tokens: tuple[int, ...]
    turn: int
    role: Role
    loss: bool


def _parts(
    messages: Sequence[Mapping[str, str]], tokenize: Tokenize, template: Template
) -> list[_Part]:
    parts: list[_Part] = []
    turn, before = 0, ""

    def add(text: str, role: Role, loss: bool) -> None:
        tokens = tuple(tokenize(text)) if text else ()
        if tokens:
            parts.append(_Part(tokens, turn, role, loss))

    for number, message in enumerate(messages, start=1):
        missing = [key for key in ("role", "content") if not isinstance(message.get(key), str)]
        if missing:
            raise InvalidInputError(
                [
                    f"message {number} needs text as {' and '.join(missing)}: tool calls and "
                    "parts of content go into the text first"
                ]
            )
        speaker, content = message["role"], message["content"]
        if speaker == "user" and before not in ("", "user"):
            turn += 1
        before = speaker
        add(template.header.format(role=speaker), Role.TEXT, False)
        if speaker == "assistant":
            for role, text in template.tags.split(content):
                add(text, role, True)
            add(template.footer, Role.ANSWER, True)
        else:
            add(content + template.footer, Role.TEXT, False)
    return parts


def _one_copy(parts: Sequence[_Part]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    position = 0
    for part in parts:
        after = len(pieces) - 1 if pieces else None
        pieces.append(Piece(part.tokens, TRUNK, part.turn, part.role, position, part.loss, after))
        position += len(part.tokens)
    return tuple(pieces)


def _branches(parts: Sequence[_Part]) -> tuple[Piece, ...]:
    """The trunk is the stripped history; a turn with thinking hangs off it from its first thought
    on, and, unless it is the last turn, its answer follows in the trunk."""
    pieces: list[Piece] = []
    trunk: int | None = None
    length = 0
    last = parts[-1].turn
    for turn in sorted({p.turn for p in parts}):
        mine = [p for p in parts if p.turn == turn]
        start = next((i for i, p in enumerate(mine) if p.role == Role.THINK), len(mine))
        for part in mine[:start]:
            pieces.append(Piece(part.tokens, TRUNK, turn, part.role, length, part.loss, trunk))
            trunk, length = len(pieces) - 1, length + len(part.tokens)
        after, position = trunk, length
        for part in mine[start:]:
            pieces.append(Piece(part.tokens, turn + 1, turn, part.role, position, part.loss, after))
            after, position = len(pieces) - 1, position + len(part.tokens)
        for part in mine[start:] if turn < last else ():
            if part.role != Role.THINK:
                pieces.append(Piece(part.tokens, TRUNK, turn, part.role, length, False, trunk))
                trunk, length = len(pieces) - 1, length + len(part.tokens)
    return tuple(pieces)
