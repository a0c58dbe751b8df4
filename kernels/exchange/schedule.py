"""A threshold for each class of prompt length: dense to 16K, MAG 7000 to 64K, MAG 4500 above."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blasst.kernels.threshold import UNITS, SkipThreshold, ThresholdError

MOST_STEPS = 12
LENGTH_MAX = 1 << 24
_REST = "rest"
_EXAMPLE = "16k=off,64k=mag:7000,rest=mag:4500"


@dataclass(frozen=True)
class Step:
    """Prompts of at most `up_to` tokens (None: of any length) that no earlier step took.
    threshold None = dense."""

    up_to: int | None
    threshold: SkipThreshold | None

    def __str__(self) -> str:
        where = "above" if self.up_to is None else f"to {self.up_to} tokens"
        return f"{self.threshold or 'dense'} {where}"


@dataclass(frozen=True)
class Schedule:
    """Raises ThresholdError unless the steps' lengths rise and the last one has none."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= MOST_STEPS:
            raise ThresholdError(f"a schedule has 1 to {MOST_STEPS} steps, not {len(self.steps)}")
        if self.steps[-1].up_to is not None:
            raise ThresholdError(
                f"the last step ends at {self.steps[-1].up_to} tokens, so longer prompts would "
                f"have none; leave its length out (in text: {_REST}=...)"
            )
        before = 0
        for step in self.steps[:-1]:
            if step.up_to is None:
                raise ThresholdError("only the last step of a schedule may be without a length")
            if not before < step.up_to <= LENGTH_MAX:
                raise ThresholdError(
                    f"step length {step.up_to} must be above the one before ({before}) and at most "
                    f"{LENGTH_MAX} prompt tokens"
                )
            before = step.up_to

    def at(self, prompt_tokens: int) -> SkipThreshold | None:
        """The threshold of a prompt of this final length."""
        for step in self.steps[:-1]:
            assert step.up_to is not None
            if prompt_tokens <= step.up_to:
                return step.threshold
        return self.steps[-1].threshold

    @property
    def all_dense(self) -> bool:
        return all(step.threshold is None for step in self.steps)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """As of a command line: 16k=off,64k=mag:7000,rest=mag:4500. Raises ThresholdError."""
        return cls(tuple(_parse_step(part) for part in text.split(",")))

    @classmethod
    def load(cls, raw: object) -> Schedule:
        """Of JSON as `dump` makes it. Raises ThresholdError."""
        if not isinstance(raw, Sequence) or isinstance(raw, str):
            raise ThresholdError("a schedule is a list of steps")
        return cls(tuple(_load_step(entry) for entry in raw[: MOST_STEPS + 1]))

    def dump(self) -> list[dict[str, Any]]:
        return [
            {
                "up_to": step.up_to,
                "threshold": None
                if step.threshold is None
                else {"unit": step.threshold.unit, "value": step.threshold.value},
            }
            for step in self.steps
        ]

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))


Threshold = SkipThreshold | Schedule
"""What a deployment can have in force; dense is None."""


def threshold_at(threshold: Threshold | None, prompt_tokens: int) -> SkipThreshold | None:
    """The one threshold that holds for a prompt of this final length; None = dense."""
    return threshold.at(prompt_tokens) if isinstance(threshold, Schedule) else threshold


def dump_threshold(threshold: Threshold | None) -> dict[str, Any] | None:
    """As JSON: {"unit", "value"}, or {"schedule": [...]}."""
    if threshold is None:
        return None
    if isinstance(threshold, Schedule):
        return {"schedule": threshold.dump()}
    return {"unit": threshold.unit, "value": threshold.value}


def load_threshold(raw: Any) -> Threshold | None:
    """The inverse. Raises ThresholdError; KeyError or TypeError for another shape."""
    if raw is None:
        return None
    if "schedule" in raw:
        return Schedule.load(raw["schedule"])
    return SkipThreshold.parse(raw["unit"], raw["value"])


def _load_step(entry: object) -> Step:
    if not isinstance(entry, Mapping) or entry.keys() != {"up_to", "threshold"}:
        raise ThresholdError("a step has up_to and threshold")
    up_to, raw = entry["up_to"], entry["threshold"]
    if isinstance(up_to, bool) or not isinstance(up_to, int | None):
        raise ThresholdError(f"step length {up_to!r} is not a whole number of prompt tokens")
    if raw is None:
        return Step(up_to, None)
    if not isinstance(raw, Mapping) or raw.keys() != {"unit", "value"}:
        raise ThresholdError("the threshold of a step has unit and value, or is null")
    return Step(up_to, SkipThreshold.parse(str(raw["unit"]), raw["value"]))


def _parse_step(text: str) -> Step:
    where, equals, what = text.strip().partition("=")
    number = re.fullmatch(r"(\d{1,9})(k?)", where.strip())
    if not equals or (number is None and where.strip() != _REST):
        raise ThresholdError(
            f"schedule step {text[:60]!r} is not TOKENS=THRESHOLD; give one such as {_EXAMPLE}"
        )
    up_to = None if number is None else int(number[1]) * (1024 if number[2] else 1)
    if what.strip() == "off":
        return Step(up_to, None)
    unit, colon, value = what.strip().partition(":")
    if not colon:
        raise ThresholdError(
            f"schedule step {text[:60]!r} needs off or UNIT:VALUE, UNIT one of {', '.join(UNITS)}"
        )
    return Step(up_to, SkipThreshold.parse(unit, value))
