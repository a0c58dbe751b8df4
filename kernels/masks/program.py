"""Programs of a mask: the same nested closures over torch tensors and over CuTe DSL values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blasst.kernels.masks.expr import (
    INDEX,
    And,
    Compare,
    Constant,
    Difference,
    Field,
    Mask,
    Or,
    Parameter,
    Side,
    Term,
    field_names,
)

Program = Callable[[Any, Any, Any, Sequence[Any]], Any]
"""(batch, query index, key index, tensors) -> visible."""

Load = Callable[..., Any]
"""(tensor, *indices) -> integer of the domain."""

Inputs = tuple[tuple[Side, str], ...]


def torch_load(tensor: Any, *at: Any) -> Any:
    """A gather; indices broadcast."""
    return tensor[at]


def inputs(mask: Mask, *, explicit_index: bool) -> Inputs:
    """(side, field) of every int32 [batch, seqlen] tensor of a program, in order.

    explicit_index: indices are loaded too, because a shard or a permutation moved the tokens. One
    more tensor follows, the parameters: int32, at least one element.
    """
    sides: tuple[Side, Side] = ("query", "key")
    names = [(side, name) for side in sides for name in field_names(mask, side)]
    if explicit_index:
        names += [(side, INDEX) for side in sides]
    return tuple(names)


def build_program(mask: Mask, load: Load, *, explicit_index: bool) -> Program:
    """The program of a mask in the domain of `load`; its structure depends on mask.text() alone."""
    slots = {name: i for i, name in enumerate(inputs(mask, explicit_index=explicit_index))}
    places = iter(range(1 << 30))
    return _mask(mask, _Domain(load, slots, lambda: next(places)))


_PROGRAMS: dict[tuple[str, bool], Program] = {}


def torch_program(mask: Mask, *, explicit_index: bool) -> Program:
    """One function object per structure: torch.compile never sees two for one mask."""
    key = mask.text(), explicit_index
    if key not in _PROGRAMS:
        program = build_program(mask, torch_load, explicit_index=explicit_index)
        return _PROGRAMS.setdefault(key, program)
    return _PROGRAMS[key]


class _Domain:
    """What the closures need while they are built."""

    def __init__(
        self, load: Load, slots: dict[tuple[Side, str], int], place: Callable[[], int]
    ) -> None:
        self.load, self.slots, self.place = load, slots, place


def _mask(mask: Mask, domain: _Domain) -> Program:
    if isinstance(mask, Compare):
        left, right, apply = _term(mask.left, domain), _term(mask.right, domain), mask.op.apply
        return lambda b, q, k, t: apply(left(b, q, k, t), right(b, q, k, t))
    if isinstance(mask, And):
        first, second = _mask(mask.left, domain), _mask(mask.right, domain)
        return lambda b, q, k, t: first(b, q, k, t) & second(b, q, k, t)
    if isinstance(mask, Or):
        first, second = _mask(mask.left, domain), _mask(mask.right, domain)
        return lambda b, q, k, t: first(b, q, k, t) | second(b, q, k, t)
    raise TypeError(f"{type(mask).__name__} is no mask")


def _term(term: Term, domain: _Domain) -> Program:
    load = domain.load
    if isinstance(term, Constant):
        value = term.value
        return lambda b, q, k, t: value
    if isinstance(term, Parameter):
        place = domain.place()
        return lambda b, q, k, t: load(t[-1], place)
    if isinstance(term, Difference):
        left, right = _term(term.left, domain), _term(term.right, domain)
        return lambda b, q, k, t: left(b, q, k, t) - right(b, q, k, t)
    if isinstance(term, Field):
        slot = domain.slots.get((term.side, term.name))
        query = term.side == "query"
        if slot is None:
            return (lambda b, q, k, t: q) if query else (lambda b, q, k, t: k)
        if query:
            return lambda b, q, k, t: load(t[slot], b, q)
        return lambda b, q, k, t: load(t[slot], b, k)
    raise TypeError(f"{type(term).__name__} is no term")
