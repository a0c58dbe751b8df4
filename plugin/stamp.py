"""The decision about one request, as it travels in the request's own sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STAMP_KEY = "blasst_stamp"
"""Reserved key of `SamplingParams.extra_args`; set at admission, refused from users."""


@dataclass(frozen=True)
class Stamp:
    """skip_lambda: natural base, None = dense. generation: of the desired state that was in force
    at admission (0: there was none)."""

    skip_lambda: float | None
    generation: int = 0

    def encode(self) -> list[float | int | None]:
        """Plain values: the parameters cross processes as msgpack."""
        return [self.skip_lambda, self.generation]


def stamped(extra_args: Mapping[str, Any] | None, stamp: Stamp) -> dict[str, Any]:
    """A new dict: the given one may be shared with other requests, or be the caller's own."""
    return {**(extra_args or {}), STAMP_KEY: stamp.encode()}


def read_stamp(extra_args: Mapping[str, Any] | None) -> Stamp | None:
    """The stamp of a request, or None: it did not pass admission."""
    raw = (extra_args or {}).get(STAMP_KEY)
    if raw is None:
        return None
    skip_lambda, generation = raw
    return Stamp(None if skip_lambda is None else float(skip_lambda), int(generation))
