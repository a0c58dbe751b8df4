"""Putting a wrapper around a method of a vLLM class, once, however often it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_blasst_wrapped"

Method = Callable[..., Any]


def wrap_method(owner: type, name: str, make: Callable[[Method], Method]) -> None:
    """Replace `owner.name` with `make(original)`; a no-op when it is already replaced.

    The method must be defined by `owner` itself: a missing one is an error of ours, and says that
    this vLLM release differs from those that the plugin was written for.
    """
    original = owner.__dict__[name]
    is_classmethod = isinstance(original, classmethod)
    function: Method = original.__func__ if is_classmethod else original
    if hasattr(function, _MARK):
        return
    wrapper = functools.wraps(function)(make(function))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, classmethod(wrapper) if is_classmethod else wrapper)
