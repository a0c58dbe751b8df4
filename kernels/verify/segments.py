"""Straight-line register arithmetic, compiled to one Python function per segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blasst.kernels.verify.registers import BANK_NAMES, HALF_BANKS, Array, Ref

Function = Callable[..., Any]
_SIGNATURE = ", ".join(BANK_NAMES)


class MicroOp(NamedTuple):
    """function(*sources, target) writes the target's row; None copies the one source.

    guard: (predicate, negated), or None.
    """

    function: Function | None
    sources: tuple[Ref, ...]
    target: Ref
    guard: tuple[Ref, bool] | None = None


class Flow(NamedTuple):
    """What values one operation takes and where its result goes, as keys. copy: it computes
    nothing. fresh: nothing of the target's old value stays."""

    sources: tuple[int, ...]
    target: int
    copy: bool
    fresh: bool


WIDE = 1 << 24  # keys of 64-bit rows begin here; those of 32-bit rows are the rows


def key(ref: Ref) -> int:
    """Of 32-bit rows and 64-bit ones, halves included; -1 for predicates and 16-bit rows."""
    return {32: ref.row, 64: WIDE + ref.row}.get(ref.width, -1)


def _flow(op: MicroOp) -> Flow:
    sources = tuple(k for k in map(key, op.sources) if k >= 0)
    whole = BANK_NAMES[op.target.bank] not in HALF_BANKS and op.guard is None
    return Flow(sources, key(op.target), op.function is None, whole)


@dataclass(frozen=True, slots=True)
class Segment:
    """full(*banks) when all lanes run; masked(mask, *banks) else. reads, writes: 32-bit rows."""

    full: Callable[..., None]
    masked: Callable[..., None]
    reads: frozenset[int]
    writes: frozenset[int]
    flow: tuple[Flow, ...]


def compile_segment(ops: Sequence[MicroOp], first: int) -> Segment:
    """first: index of its first instruction, for the function's name in a traceback."""
    functions: dict[Any, str] = {}
    full = [_statement(op, functions, None) for op in ops]
    masked = [_statement(op, functions, "m") for op in ops]
    namespace: dict[str, Any] = {name: function for function, name in functions.items()}
    namespace["masked"], namespace["masked_copy"] = _masked, _masked_copy
    source = "\n".join(
        [
            f"def full({_SIGNATURE}):",
            *(f"    {line}" for line in full),
            f"def partial(m, {_SIGNATURE}):",
            *(f"    {line}" for line in masked),
        ]
    )
    exec(compile(source, f"<segment {first}>", "exec"), namespace)
    return Segment(
        namespace["full"],
        namespace["partial"],
        frozenset(r.row for op in ops for r in op.sources if r.width == 32),
        frozenset(op.target.row for op in ops if op.target.width == 32),
        tuple(map(_flow, ops)),
    )


def _statement(op: MicroOp, functions: dict[Any, str], mask: str | None) -> str:
    conditions = [mask] if mask else []
    if op.guard is not None:
        conditions.append(("~" if op.guard[1] else "") + op.guard[0].code)
    condition = " & ".join(conditions)
    sources = ", ".join(ref.code for ref in op.sources)
    if op.function is None:
        if not condition:
            return f"{op.target.code}[:] = {sources}"
        return f"masked_copy({sources}, {op.target.code}, {condition})"
    name = functions.setdefault(op.function, f"f{len(functions)}")
    if not condition:
        return f"{name}({sources}, {op.target.code})"
    return f"masked({name}, ({sources},), {op.target.code}, {condition})"


def _masked(function: Function, sources: tuple[Array, ...], target: Array, mask: Array) -> None:
    before = target.copy()
    function(*sources, target)
    keep = ~mask
    np.copyto(target, before, where=keep if target.ndim == 1 else keep[:, None])


def _masked_copy(source: Array, target: Array, mask: Array) -> None:
    np.copyto(target, source, where=mask)
