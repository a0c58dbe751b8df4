"""What each synchronisation instruction did in a run: why leaving it out can change nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blasst.kernels.verify.clocks import Clock


@dataclass
class Note:
    """Of one instruction. times: executed; initial: passed a barrier that no one had completed;
    taught: told the warp something new; followed: a memory access of the warp came later.
    observed: of an arrival, whether a warp waited for a phase that it took part in.
    """

    times: int = 0
    initial: int = 0
    taught: int = 0
    followed: int = 0
    observed: int = 0


@dataclass
class Evidence:
    """notes: by instruction index."""

    notes: dict[int, Note] = field(default_factory=lambda: defaultdict(Note))
    _open: dict[Any, set[int]] = field(default_factory=lambda: defaultdict(set))
    _arrived: dict[Any, set[int]] = field(default_factory=lambda: defaultdict(set))

    def learned(self, warp: Any, at: int, clock: Clock | None, initial: bool = False) -> None:
        """A wait that passed; clock: what it is about to give the warp."""
        note = self.notes[at]
        note.times += 1
        note.initial += initial
        own = warp.clock
        if clock is not None and bool(
            np.any(clock.seen > own.seen) or np.any(clock.fenced > own.fenced)
        ):
            note.taught += 1
        self._open[warp].add(at)

    def accessed(self, warp: Any) -> None:
        """A memory access or asynchronous operation of a warp."""
        waits = self._open[warp]
        for at in waits:
            self.notes[at].followed += 1
        waits.clear()

    def arrived(self, barrier: Any, at: int) -> None:
        self.notes[at].times += 1
        self._arrived[barrier].add(at)

    def observed(self, barrier: Any) -> None:
        """A warp waited for the barrier: all arrivals so far count."""
        for at in self._arrived.pop(barrier, ()):
            self.notes[at].observed += 1
