"""The masks of packed training. Each is a plain expression; combine them with &, | and ~."""

from __future__ import annotations

from enum import IntEnum

from blasst.kernels.masks.expr import KEY, QUERY, Mask, Parameter

PADDING_DOCUMENT = -1
TRUNK = 0
"""The segment that every segment of a document sees: the prefix, or the stripped history."""


class Role(IntEnum):
    """What a token is. Values are part of compiled kernels."""

    TEXT = 0
    THINK = 1
    ANSWER = 2
    PADDING = 3


def causal() -> Mask:
    """A token sees itself and what is before it in the sequence."""
    return QUERY.index >= KEY.index


def document() -> Mask:
    """A token sees its own document; padding is a document of its own."""
    return QUERY.document == KEY.document


def padding() -> Mask:
    """Padding sees nothing and is seen by nothing: out 0, lse -inf, no gradient."""
    return (QUERY.document != PADDING_DOCUMENT) & (KEY.document != PADDING_DOCUMENT)


def sliding_window(window: int) -> Mask:
    """A token sees `window` tokens, itself included; with causal(). The width is no constant of
    the kernel: another width does not compile another one."""
    if window < 1:
        raise ValueError(f"window {window} must be at least 1 token")
    return (QUERY.index - KEY.index) < Parameter(window)


def shared_prefix() -> Mask:
    """Causal; a token sees the trunk (segment 0) and its own segment.

    Over [prefix, suffix 1, ..., suffix n] this is shared-prefix training. Over the layout of
    `chat.conversation(strip="exact")`, where the trunk is the stripped history and every turn with
    thinking is a branch, it is strip-thinking without contaminated history keys.
    """
    return causal() & ((KEY.segment == TRUNK) | (KEY.segment == QUERY.segment))


def strip_history_thinking() -> Mask:
    """Causal; thinking is seen in its own turn only (one copy of every token).

    The keys of earlier answers were computed with their own thinking in view, which inference never
    has: see docs/attention-contract.md.
    """
    return causal() & ~((KEY.role == Role.THINK) & (KEY.turn < QUERY.turn))
