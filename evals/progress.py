"""Progress on stderr: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from blasst.evals.eta import Costs, Eta, Job

_EVERY_S = 10.0


def duration(seconds: float) -> str:
    """75 -> 1:15, 4000 -> 1:06:40."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    tail = f"{rest % 60:02d}"
    return f"{hours}:{rest // 60:02d}:{tail}" if hours else f"{rest // 60}:{tail}"


class Progress:
    """Counts steps of one total and says how long the rest will take."""

    def __init__(self, total: int, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.total, self.done = total, 0
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._start = time.monotonic()
        self._last = -_EVERY_S
        self._live = self._stream.isatty()
        self._eta = Eta((), Costs.unknown(1, 1))
        self._until = math.inf
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._clear()
            print(text, file=self._stream, flush=True)

    def learn(self, jobs: Sequence[Job], seconds: float, waited_s: float | None = None) -> None:
        """How long these took, before they are steps, and how much of it were waits."""
        self._eta.done(jobs, seconds, waited_s)

    def note(self) -> None:
        """One more is done, and others with it: the last of them is a step, which says so."""
        with self._lock:
            self.done += 1

    def step(self, what: str) -> None:
        """One more is done; `what` names it."""
        with self._lock:
            self._step(what)

    def _step(self, what: str) -> None:
        self.done += 1
        elapsed = time.monotonic() - self._start
        due = self._live or elapsed - self._last >= _EVERY_S or self.done == self.total
        if self._quiet or not due:
            return
        self._last = elapsed
        left = duration(min(self._eta.left(), self._until - time.monotonic()))
        line = f"{self.done}/{self.total}  {what}  elapsed {duration(elapsed)}  left about {left}"
        if self._live:
            self._clear()
            self._stream.write(line)
            self._stream.flush()
        else:
            print(line, file=self._stream, flush=True)

    def restart(self, total: int, eta: Eta, until: float | None = None) -> None:
        """A new total begins, timed from now; until: on time.monotonic(), ended by then anyway."""
        self.total, self.done, self._eta = total, 0, eta
        self._until = math.inf if until is None else until
        self._start = time.monotonic()
        self._last = -_EVERY_S

    def close(self) -> None:
        if not self._quiet:
            self._clear()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
