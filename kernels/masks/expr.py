"""Masks as expressions over a query token and a key token, defined once for every consumer.

A mask is written with Python operators on `QUERY` and `KEY`, whose attributes are the per-token
fields of `Segments`; it never holds a tensor. Programs (torch, CuTe DSL) are compiled from the
expression alone, so that all layouts of one mask share one compiled kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Side = Literal["query", "key"]

INDEX = "index"
FIELDS = (INDEX, "document", "segment", "turn", "role", "position")
"""Per-token integers. index is the place in the sequence that causality compares."""


class Op(Enum):
    """Comparisons, with what the negation of each one is."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"

    @property
    def apply(self) -> Callable[[Any, Any], Any]:
        function: Callable[[Any, Any], Any] = getattr(operator, self.value)
        return function

    @property
    def opposite(self) -> Op:
        return _OPPOSITE[self]


_OPPOSITE = {
    Op.EQ: Op.NE,
    Op.NE: Op.EQ,
    Op.LT: Op.GE,
    Op.GE: Op.LT,
    Op.GT: Op.LE,
    Op.LE: Op.GT,
}


class Term:
    """An integer of a token pair; comparisons with terms and integers make masks."""

    def _compare(self, op: Op, other: Term | int) -> Mask:
        return Compare(op, self, as_term(other))

    def __eq__(self, other: object) -> Mask:  # type: ignore[override]
        return self._compare(Op.EQ, as_term(other))

    def __ne__(self, other: object) -> Mask:  # type: ignore[override]
        return self._compare(Op.NE, as_term(other))

    def __lt__(self, other: Term | int) -> Mask:
        return self._compare(Op.LT, other)

    def __le__(self, other: Term | int) -> Mask:
        return self._compare(Op.LE, other)

    def __gt__(self, other: Term | int) -> Mask:
        return self._compare(Op.GT, other)

    def __ge__(self, other: Term | int) -> Mask:
        return self._compare(Op.GE, other)

    def __sub__(self, other: Term | int) -> Term:
        return Difference(self, as_term(other))

    __hash__ = None  # type: ignore[assignment]

    def text(self) -> str:
        """The structure: parameters by place, without their values."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Field(Term):
    """A per-token integer of one side of the pair."""

    side: Side
    name: str

    def text(self) -> str:
        return f"{self.side}.{self.name}"


@dataclass(frozen=True, eq=False)
class Constant(Term):
    """Part of the structure: another value is another kernel.

    A plain int: torch.compile takes `tensor != Role.THINK`, an enumeration's member, for True.
    """

    value: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _integer(self.value))

    def text(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Parameter(Term):
    """A value that travels in a tensor: another value is the same kernel."""

    value: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _integer(self.value))

    def text(self) -> str:
        return "param"


@dataclass(frozen=True, eq=False)
class Difference(Term):
    """left - right."""

    left: Term
    right: Term

    def text(self) -> str:
        return f"({self.left.text()} - {self.right.text()})"


def as_term(value: object) -> Term:
    """Integers are constants of the structure."""
    return value if isinstance(value, Term) else Constant(_integer(value))


def _integer(value: object) -> int:
    """A plain int that an int32 tensor holds: beyond it, comparisons would wrap silently."""
    if not isinstance(value, int):
        raise TypeError(f"a mask compares token fields and integers, not {type(value).__name__}")
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{value} in a mask is beyond int32, in which fields are compared")
    return int(value)


class Mask:
    """Which key tokens a query token sees. Combine with &, | and ~.

    ~ is resolved at once into opposite comparisons (positive logic): CuTe DSL cannot negate a
    vector of booleans.
    """

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with &, | and ~")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self.text() == other.text() and parameters(self) == parameters(other)

    def __hash__(self) -> int:
        return hash((self.text(), parameters(self)))

    def text(self) -> str:
        """The structure: equal text = the same kernel."""
        raise NotImplementedError

    def terms(self) -> Iterator[Term]:
        """Fields, constants and parameters, left to right."""
        raise NotImplementedError

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key, as far as the structure tells."""
        return False


@dataclass(frozen=True, eq=False)
class Compare(Mask):
    """left op right."""

    op: Op
    left: Term
    right: Term

    def __invert__(self) -> Mask:
        return Compare(self.op.opposite, self.left, self.right)

    def text(self) -> str:
        return f"({self.left.text()} {self.op.value} {self.right.text()})"

    def terms(self) -> Iterator[Term]:
        yield from _leaves(self.left)
        yield from _leaves(self.right)

    @property
    def is_causal(self) -> bool:
        return self.text() in _CAUSAL


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Both."""

    left: Mask
    right: Mask

    def __invert__(self) -> Mask:
        return Or(~self.left, ~self.right)

    def text(self) -> str:
        return f"({self.left.text()} and {self.right.text()})"

    def terms(self) -> Iterator[Term]:
        yield from self.left.terms()
        yield from self.right.terms()

    @property
    def is_causal(self) -> bool:
        return self.left.is_causal or self.right.is_causal


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Either."""

    left: Mask
    right: Mask

    def __invert__(self) -> Mask:
        return And(~self.left, ~self.right)

    def text(self) -> str:
        return f"({self.left.text()} or {self.right.text()})"

    def terms(self) -> Iterator[Term]:
        yield from self.left.terms()
        yield from self.right.terms()

    @property
    def is_causal(self) -> bool:
        return self.left.is_causal and self.right.is_causal


_CAUSAL = (
    "(query.index ge key.index)",
    "(query.index gt key.index)",
    "(key.index le query.index)",
    "(key.index lt query.index)",
)


def _leaves(term: Term) -> Iterator[Term]:
    if isinstance(term, Difference):
        yield from _leaves(term.left)
        yield from _leaves(term.right)
    else:
        yield term


@dataclass(frozen=True)
class Token:
    """One side of the pair; every attribute is an integer per token (see `Segments`)."""

    side: Side

    @property
    def index(self) -> Term:
        return Field(self.side, INDEX)

    @property
    def document(self) -> Term:
        return Field(self.side, "document")

    @property
    def segment(self) -> Term:
        return Field(self.side, "segment")

    @property
    def turn(self) -> Term:
        return Field(self.side, "turn")

    @property
    def role(self) -> Term:
        return Field(self.side, "role")

    @property
    def position(self) -> Term:
        return Field(self.side, "position")


QUERY = Token("query")
KEY = Token("key")


def field_names(mask: Mask, side: Side) -> tuple[str, ...]:
    """The fields that the mask reads on one side, without index, in a fixed order."""
    used = {t.name for t in mask.terms() if isinstance(t, Field) and t.side == side}
    return tuple(name for name in FIELDS if name in used and name != INDEX)


def reads_index(mask: Mask) -> bool:
    """Whether the order of tokens matters to the mask."""
    return any(isinstance(t, Field) and t.name == INDEX for t in mask.terms())


def parameters(mask: Mask) -> tuple[int, ...]:
    """Values of the parameters, in the order of the structure."""
    return tuple(t.value for t in mask.terms() if isinstance(t, Parameter))
