"""Progress on stderr: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import TextIO

_EVERY_S = 10.0


def duration(seconds: float) -> str:
    """75 -> 1:15, 4000 -> 1:06:40."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    tail = f"{rest % 60:02d}"
    return f"{hours}:{rest // 60:02d}:{tail}" if hours else f"{rest // 60}:{tail}"


class Progress:
    """Counts steps of one total and estimates the time left from those done in this run."""

    def __init__(self, total: int, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.total, self.done = total, 0
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._start = time.monotonic()
        self._last = -_EVERY_S
        self._live = self._stream.isatty()
        self._work, self._work_done = float(total), 0.0
        self._until = math.inf
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._clear()
            print(text, file=self._stream, flush=True)

    def note(self, work: float) -> None:
        """One more is done, and others with it: the last of them is a step, which says so."""
        with self._lock:
            self.done += 1
            self._work_done += work

    def step(self, what: str, work: float = 1.0) -> None:
        """One more is done; `what` names it, `work` is its share of the total work."""
        with self._lock:
            self._step(what, work)

    def _step(self, what: str, work: float) -> None:
        self.done += 1
        self._work_done += work
        elapsed = time.monotonic() - self._start
        due = self._live or elapsed - self._last >= _EVERY_S or self.done == self.total
        if self._quiet or not due:
            return
        self._last = elapsed
        seconds = elapsed * (max(self._work, self._work_done) / self._work_done - 1)
        left = duration(min(seconds, self._until - time.monotonic()))
        line = f"{self.done}/{self.total}  {what}  elapsed {duration(elapsed)}  left about {left}"
        if self._live:
            self._clear()
            self._stream.write(line)
            self._stream.flush()
        else:
            print(line, file=self._stream, flush=True)

    def restart(self, total: int, work: float, until: float | None = None) -> None:
        """A new total begins, timed from now; until: on time.monotonic(), ended by then anyway."""
        self.total, self.done = total, 0
        self._work, self._work_done = work, 0.0
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
