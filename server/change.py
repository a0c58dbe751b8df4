"""The body of a PUT: one threshold, or one for each class of prompt length; every field checked."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blasst.kernels.exchange.desired import MIN_CONTEXT_MAX
from blasst.kernels.exchange.schedule import LENGTH_MAX, MOST_STEPS, Schedule, Step, Threshold
from blasst.kernels.threshold import MAG_MAX, SkipThreshold, ThresholdError
from blasst.server.problems import Problem

REASON_MAX = 500
_STEP_FIELDS = ("mag", "lambda", "scale", "off")
_UNIT_FIELDS = (*_STEP_FIELDS, "target_skip_rate", "schedule")


def _absent() -> Any:
    """Default of a field that a body may leave out but never set to null."""
    return None


class _Units(BaseModel):
    mag: float = Field(
        default_factory=_absent,
        description="MAG: lambda = 2^(-MAG/1000); a higher MAG skips less. Usual: 1000 to 14000.",
        # A MAG nearer to 0 rounds to lambda 1.
        json_schema_extra={"minimum": 1e-12, "maximum": MAG_MAX},
    )
    skip_lambda: float = Field(
        alias="lambda",
        default_factory=_absent,
        description="lambda, natural base: a block is skipped below lambda times the running "
        "maximum's weight. 0 skips nothing.",
        json_schema_extra={"minimum": 0, "exclusiveMaximum": 1},
    )
    scale: float = Field(
        default_factory=_absent,
        description="lambda times the prompt's final length in tokens.",
        json_schema_extra={"minimum": 0},
    )
    off: bool = Field(
        default_factory=_absent,
        description="true: dense attention, no block is skipped.",
        json_schema_extra={"const": True},
    )

    def given(self) -> dict[str, Any]:
        """The units that are there, by name."""
        values = (self.mag, self.skip_lambda, self.scale, self.off)
        named = zip(_STEP_FIELDS, values, strict=True)
        return {name: value for name, value in named if value is not None}


class StepChange(_Units):
    """One step of a schedule: exactly one of mag, lambda, scale and off."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={
            "oneOf": [{"required": [name]} for name in _STEP_FIELDS],
            "examples": [{"up_to": 16384, "off": True}, {"mag": 4500}],
        },
    )

    up_to: int = Field(
        default_factory=_absent,
        description="Longest prompt, in tokens, that this step is for; only the last step has none "
        "and is for all longer ones.",
        json_schema_extra={"minimum": 1, "maximum": LENGTH_MAX},
    )

    def step(self) -> Step:
        """Raises Problem."""
        given = self.given()
        if len(given) != 1:
            _refuse(
                f"a step has exactly one of {', '.join(_STEP_FIELDS)}; this one has {len(given)}"
            )
        return Step(self.up_to, _single(given))


class ThresholdChange(_Units):
    """The body of PUT: exactly one of mag, lambda, scale, off, target_skip_rate and schedule."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={
            "oneOf": [{"required": [name]} for name in _UNIT_FIELDS],
            "dependentRequired": {"preset": ["target_skip_rate"]},
            "examples": [
                {"mag": 2500, "reason": "chosen from last week's sweep"},
                {"lambda": 0.05, "min_context": 16384},
                {"scale": 500},
                {"target_skip_rate": 0.5},
                {"off": True},
                {
                    "schedule": [
                        {"up_to": 16384, "off": True},
                        {"up_to": 65536, "mag": 7000},
                        {"mag": 4500},
                    ]
                },
            ],
        },
    )

    target_skip_rate: float = Field(
        default_factory=_absent,
        description="Share of the visited tiles to skip, through a calibration preset that fits "
        "the running model and kernel; kept as the scale that this gives.",
        json_schema_extra={"minimum": 0, "exclusiveMaximum": 1},
    )
    preset: str = Field(
        default_factory=_absent,
        max_length=200,
        description="Name of the preset; left out: the only one that fits.",
    )
    schedule: list[StepChange] = Field(
        default_factory=_absent,
        description="A threshold for each class of prompt length, shortest first.",
        json_schema_extra={"minItems": 1, "maxItems": MOST_STEPS},
    )
    min_context: int = Field(
        default_factory=_absent,
        description="Prompts shorter than this many tokens run dense; left out: the engine's own "
        "setting.",
        json_schema_extra={"minimum": 0, "maximum": MIN_CONTEXT_MAX},
    )
    reason: str = Field(default="", max_length=REASON_MAX, description="Free text, kept with it.")

    def threshold(self) -> Threshold | None:
        """None = dense, and also with a target skip rate: its preset gives the threshold. Raises
        Problem for a value outside its range, or not exactly one unit."""
        given = self.given()
        for name, value in (
            ("target_skip_rate", self.target_skip_rate),
            ("schedule", self.schedule),
        ):
            if value is not None:
                given[name] = value
        if len(given) != 1:
            _refuse(f"give exactly one of {', '.join(_UNIT_FIELDS)}; this body has {len(given)}")
        if self.preset is not None and "target_skip_rate" not in given:
            _refuse("preset goes with target_skip_rate only")
        if "target_skip_rate" in given:
            if not 0.0 <= self.target_skip_rate < 1.0:
                _refuse(f"target_skip_rate {self.target_skip_rate:g} is outside 0 <= rate < 1")
            return None
        if "schedule" in given:
            try:
                return Schedule(tuple(step.step() for step in self.schedule[: MOST_STEPS + 1]))
            except ThresholdError as e:
                _refuse(str(e))
        return _single(given)


def _single(given: dict[str, Any]) -> SkipThreshold | None:
    ((unit, value),) = given.items()
    if unit == "off":
        if value is not True:
            _refuse("off must be true; leave it out and give a threshold otherwise")
        return None
    try:
        return SkipThreshold.parse(unit, value)
    except ThresholdError as e:
        _refuse(str(e))


def parse_change(body: bytes, content_type: str) -> tuple[ThresholdChange, Threshold | None]:
    """A PUT body and its threshold. Raises Problem: 415, 400 (not JSON) or 422 (a bad value)."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise Problem(415, "not-json", "Send the body as Content-Type: application/json.")
    try:
        raw = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise Problem(400, "bad-json", f"The body is not JSON: {str(e)[:200]}.") from e
    if not isinstance(raw, dict):
        _refuse('the body must be a JSON object such as {"mag": 2500}')
    try:
        change = ThresholdChange.model_validate(raw)
    except ValidationError as e:
        _refuse("; ".join(_explain(error) for error in e.errors(include_url=False)[:5]))
    steps = raw.get("schedule") or ()
    nulls = [name for part in (raw, *steps) for name, value in part.items() if value is None]
    if nulls:
        _refuse(f"{nulls[0]} must not be null; leave it out")
    if change.min_context is not None and not 0 <= change.min_context <= MIN_CONTEXT_MAX:
        _refuse(f"min_context {change.min_context} is outside 0..{MIN_CONTEXT_MAX} prompt tokens")
    return change, change.threshold()


def _explain(error: Any) -> str:
    where = ".".join(str(part)[:40] for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown field {where!r}"
    return f"{where}: {error['msg']}"


def _refuse(detail: str) -> NoReturn:
    raise Problem(422, "bad-threshold", detail)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is given twice")
    return fields
