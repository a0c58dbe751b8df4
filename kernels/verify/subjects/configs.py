"""Config dataclasses of our kernels, to JSON (dataclasses.asdict) and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def rebuild(kind: type[T], data: dict[str, Any]) -> T:
    """The dataclass that asdict made `data` of; nested dataclasses and tuples included."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return rebuild(typing.cast("type[Any]", option), value)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
