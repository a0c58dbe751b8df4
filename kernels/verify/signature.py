"""How an arithmetic opcode is described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Signature(NamedTuple):
    """function(*sources, target) writes its last argument, rows of 32 lanes; types as in PTX.

    second: the function of the second target, of instructions such as setp p|q.
    """

    function: Callable[..., Any]
    target: str
    sources: tuple[str, ...]
    second: Callable[..., Any] | None = None


def same(function: Callable[..., Any], kind: str, count: int = 2) -> Signature:
    """`count` sources and a target of one type."""
    return Signature(function, kind, (kind,) * count)
