"""What the sidecar did and what went wrong, counted under closed sets of names."""

from __future__ import annotations

import datetime
import threading
from collections import Counter
from dataclasses import dataclass

CHANGES = ("applied", "unchanged", "refused", "failed")
"""What became of a wanted change. refused: a precondition, or no layer could honour it; failed:
the disk did not take it."""

CALLERS = (
    "bad-json",
    "foreign-host",
    "method-not-allowed",
    "not-found",
    "not-json",
    "read-only",
    "too-large",
    "too-many",
    "too-many-refused",
    "too-slow",
    "unauthorized",
)
"""Problems of a call as such: anybody can make them, so they never become the last error shown."""

ERRORS = (
    *CALLERS,
    "audit-unreadable",
    "bad-threshold",
    "canary",
    "followed-file",
    "internal",
    "no-effect",
    "no-preset",
    "no-space",
    "precondition-failed",
    "precondition-required",
    "preset-unfit",
    "state-unreadable",
    "state-unwritable",
    "token-file",
    "upstream-metrics",
)
OTHER = "other"


@dataclass(frozen=True)
class LastError:
    """time: RFC 3339, UTC. kind: of ERRORS. message: the rule and the remedy."""

    time: str
    kind: str
    message: str


class Tally:
    """Counters of one sidecar since its start; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = Counter(dict.fromkeys(CHANGES, 0))
        self._errors = Counter(dict.fromkeys((*ERRORS, OTHER), 0))
        self._last: LastError | None = None

    def change(self, result: str) -> None:
        """One wanted change; result: of CHANGES."""
        assert result in CHANGES, result
        with self._lock:
            self._changes[result] += 1

    def error(self, kind: str, message: str) -> None:
        """One error; a kind that is not of ERRORS counts as other."""
        known = kind if kind in ERRORS else OTHER
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self._lock:
            self._errors[known] += 1
            if known not in CALLERS:
                self._last = LastError(now, known, message)

    def changes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._changes)

    def errors(self) -> dict[str, int]:
        with self._lock:
            return dict(self._errors)

    @property
    def last(self) -> LastError | None:
        return self._last
