"""Clock reads of one thread block, from the kernel's buffer to a timeline and to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from blasst.kernels.instruments.steps import NAMES, STEPS, Step
from blasst.kernels.instruments.timeline import Mark, Span, Timeline

VERSION = 1
LEFT_OUT = "P.V left out"


@dataclass(frozen=True)
class Recording:
    """warps: names by index in the thread block. reads: (warp, visit, step, clock), in cycles.

    about: what ran, for the reader.
    """

    title: str
    warps: Mapping[int, str]
    reads: Sequence[tuple[int, int, int, int]]
    about: Mapping[str, object]

    def timeline(self) -> Timeline:
        """Each step of a warp runs from the warp's previous clock read to its own.

        Times in cycles from the first read. A visit with a vote and no exponentials is a skip.
        """
        origin = min((clock for *_, clock in self.reads), default=0)
        lanes = [name for warp, name in sorted(self.warps.items()) if self._of(warp)]
        spans: list[Span] = []
        marks: list[Mark] = []
        for warp, lane in sorted(self.warps.items()):
            reads = self._of(warp)
            kept = {visit for _, step, visit in reads if step == Step.EXP2}
            for (before, *_), (clock, step, visit) in pairwise(reads):
                if step in NAMES:
                    start, end = float(before - origin), float(clock - origin)
                    spans.append(Span(lane, NAMES[Step(step)], start, end, visit))
                if step == Step.VOTE and visit not in kept:
                    marks.append(Mark(lane, LEFT_OUT, float(clock - origin), visit))
        return Timeline(self.title, "cycles", lanes, spans, marks)

    def _of(self, warp: int) -> list[tuple[int, int, int]]:
        """(clock, step, visit) of a warp, by time; the exponentials' mark breaks no tie."""
        return sorted((clock, step, visit) for w, visit, step, clock in self.reads if w == warp)

    def save(self, path: Path) -> None:
        """JSON that `load` reads."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}))

    @staticmethod
    def load(path: Path) -> Recording:
        """Raises ValueError for a file that is no recording of this version."""
        try:
            fields = json.loads(path.read_text())
            if fields.pop("version") != VERSION:
                raise ValueError("it is of another version")
            return Recording(
                str(fields["title"]),
                {int(warp): str(name) for warp, name in fields["warps"].items()},
                [(int(w), int(v), int(s), int(c)) for w, v, s, c in fields["reads"]],
                dict(fields["about"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"{path} is no recording of `blasst trace`: {e}") from e


def reads_of(buffer: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, int, int, int]]:
    """buffer: [1 + warps, visits, STEPS] as the kernel wrote it, 0 = not marked."""
    return [
        (warp, visit, step, clock)
        for warp, visits in enumerate(buffer[1:])
        for visit, steps in enumerate(visits)
        for step, clock in enumerate(steps[:STEPS])
        if clock
    ]
