"""What one writer asked for and what anybody saw of it: does the second follow from the first?

Times are of the machine's monotonic clock, in seconds, so processes can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Lambda = float | None
"""Natural base; None = dense."""


@dataclass(frozen=True)
class Write:
    """One change. generation None: nobody acknowledged it, so it may have happened or not."""

    skip_lambda: Lambda
    began: float
    ended: float
    generation: int | None


@dataclass(frozen=True)
class Seen:
    """A pair that `observer` saw at some moment from `began` to `ended`. late_s: how long it may
    show what a newer change has replaced; infinite: no promise."""

    observer: str
    began: float
    ended: float
    generation: int
    skip_lambda: Lambda
    late_s: float = 0.0


def faults(writes: Sequence[Write], seen: Sequence[Seen]) -> list[str]:
    """One line per broken promise. The promises: every pair was asked for, generations are in the
    order of asking, no observer went back, none saw a change before it was asked for, and none an
    older one after a newer was acknowledged."""
    values, found = _values(writes, seen)
    origins, unfounded = _origins(writes, values)
    for pair in seen:
        origin = origins.get(pair.generation)
        if origin is not None and pair.ended < origin.began:
            found.append(f"{pair} was seen before it was asked for")
    return [*found, *unfounded, *_backwards(seen), *_stale(writes, seen)]


def _values(
    writes: Sequence[Write], seen: Iterable[Seen]
) -> tuple[Mapping[int, Lambda], list[str]]:
    """Generation -> the one value that it has for everybody."""
    found = []
    newest = 0
    values: dict[int, Lambda] = {0: None}
    for write in writes:
        if write.generation is None:
            continue
        # The value that is in force already is no change: its generation again is right.
        if write.generation < newest:
            found.append(f"{write} was acknowledged after generation {newest}")
        newest = max(newest, write.generation)
        if values.setdefault(write.generation, write.skip_lambda) != write.skip_lambda:
            found.append(f"{write}: its generation was given out before")
    for pair in seen:
        value = values.setdefault(pair.generation, pair.skip_lambda)
        if value != pair.skip_lambda:
            found.append(f"{pair}: generation {pair.generation} has lambda {value}")
    return values, found


def _origins(
    writes: Sequence[Write], values: Mapping[int, Lambda]
) -> tuple[Mapping[int, Write], list[str]]:
    """Generation -> the change that made it, found in the order of asking."""
    found: list[str] = []
    origins: dict[int, Write] = {}
    acknowledged: dict[int, int] = {}
    for number, write in enumerate(writes):
        if write.generation is not None:
            acknowledged.setdefault(write.generation, number)
    at = -1
    for generation in sorted(values.keys() - {0}):
        index = acknowledged.get(generation)
        if index is None:
            after = (i for g, i in acknowledged.items() if g > generation)
            open_ones = range(at + 1, min(after, default=len(writes)))
            same = (
                i
                for i in open_ones
                if writes[i].generation is None and writes[i].skip_lambda == values[generation]
            )
            index = next(same, None)
        if index is None:
            found.append(f"generation {generation}, {values[generation]}, was never asked for")
        elif index <= at:
            found.append(f"generation {generation}, {values[generation]}, is out of order")
        else:
            at = index
            origins[generation] = writes[index]
    return origins, found


def _backwards(seen: Iterable[Seen]) -> list[str]:
    found: list[str] = []
    newest: dict[str, Seen] = {}
    for pair in sorted(seen, key=lambda s: s.ended):
        before = newest.get(pair.observer)
        if before is None or pair.generation >= before.generation:
            newest[pair.observer] = pair
        elif before.ended < pair.began:
            # Two looks that overlap may have happened in either order.
            found.append(f"{pair} came after {before}")
    return found


def _stale(writes: Iterable[Write], seen: Iterable[Seen]) -> list[str]:
    found: list[str] = []
    acknowledged = [(w.ended, w.generation) for w in writes if w.generation is not None]
    at, newest = 0, 0
    for pair in sorted(seen, key=lambda s: s.began - s.late_s):
        while at < len(acknowledged) and acknowledged[at][0] < pair.began - pair.late_s:
            newest = max(newest, acknowledged[at][1])
            at += 1
        if pair.generation < newest:
            found.append(f"{pair} is older than generation {newest}, acknowledged before")
    return found
