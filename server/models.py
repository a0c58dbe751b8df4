"""What travels over the API: bodies with units, bounds and examples, which OpenAPI then shows."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blasst.kernels.exchange.desired import MIN_CONTEXT_MAX
from blasst.kernels.threshold import MAG_MAX, SkipThreshold, ThresholdError
from blasst.server.problems import Problem

REASON_MAX = 500
_UNIT_FIELDS = ("mag", "lambda", "scale", "target_skip_rate", "off")


def _absent() -> Any:
    """Default of a field that a body may leave out but never set to null."""
    return None


class ThresholdChange(BaseModel):
    """The body of PUT: exactly one of mag, lambda, scale, target_skip_rate and off."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={
            "oneOf": [{"required": [name]} for name in _UNIT_FIELDS],
            "examples": [
                {"mag": 2500, "reason": "chosen from last week's sweep"},
                {"lambda": 0.05, "min_context": 16384},
                {"scale": 500},
                {"target_skip_rate": 0.5},
                {"off": True},
            ],
        },
    )

    mag: float = Field(
        default_factory=_absent,
        description="MAG: lambda = 2^(-MAG/1000); a higher MAG skips less. Usual: 1000 to 14000.",
        json_schema_extra={"exclusiveMinimum": 0, "maximum": MAG_MAX},
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
    off: bool = Field(
        default_factory=_absent,
        description="true: dense attention, no block is skipped.",
        json_schema_extra={"const": True},
    )
    min_context: int = Field(
        default_factory=_absent,
        description="Prompts shorter than this many tokens run dense; left out: the engine's own "
        "setting.",
        json_schema_extra={"minimum": 0, "maximum": MIN_CONTEXT_MAX},
    )
    reason: str = Field(default="", max_length=REASON_MAX, description="Free text, kept with it.")

    def threshold(self) -> SkipThreshold | None:
        """None = dense, and also with a target skip rate: its preset gives the threshold. Raises
        Problem for a value outside its range, or not exactly one unit."""
        given: dict[str, float | bool] = {
            name: value
            for name, value in zip(
                _UNIT_FIELDS,
                (self.mag, self.skip_lambda, self.scale, self.target_skip_rate, self.off),
                strict=True,
            )
            if value is not None
        }
        if len(given) != 1:
            _refuse(f"give exactly one of {', '.join(_UNIT_FIELDS)}; this body has {len(given)}")
        ((unit, value),) = given.items()
        if self.preset is not None and unit != "target_skip_rate":
            _refuse("preset goes with target_skip_rate only")
        if unit == "target_skip_rate":
            if not 0.0 <= value < 1.0:
                _refuse(f"target_skip_rate {value:g} is outside 0 <= rate < 1")
            return None
        if unit == "off":
            if value is not True:
                _refuse("off must be true; leave it out and give a threshold otherwise")
            return None
        try:
            return SkipThreshold.parse(unit, value)
        except ThresholdError as e:
            _refuse(str(e))


class ThresholdValue(BaseModel):
    """A threshold in the unit it was given in."""

    unit: str = Field(description="mag, lambda or scale")
    value: float


class FrontEndView(BaseModel):
    """One vLLM API server process, and how far it has followed."""

    name: str
    pid: int | None
    model_name: str
    alive: bool = Field(description="false: the process is gone; its counters remain")
    generation_read: int = Field(description="generation that new requests get")
    generation_stamped: int = Field(description="generation of the last request it admitted")
    age_s: float = Field(description="seconds since it last wrote its statistics page")


_STATE_EXAMPLE: dict[str, Any] = {
    "generation": 3,
    "threshold": {"unit": "mag", "value": 2500.0},
    "mag": 2500.0,
    "lambda": 0.1767766952966369,
    "min_context": 16384,
    "updated_at": "2026-11-30T07:30:00.000+00:00",
    "updated_by": "127.0.0.1",
    "reason": "chosen from last week's sweep",
    "origin": "",
    "converged": True,
    "front_ends": [
        {
            "name": "front-4242",
            "pid": 4242,
            "model_name": "smollm2",
            "alive": True,
            "generation_read": 3,
            "generation_stamped": 3,
            "age_s": 0.4,
        }
    ],
}


class ThresholdState(BaseModel):
    """The deployment's threshold and who has taken it over. threshold null = dense."""

    model_config = ConfigDict(json_schema_extra={"examples": [_STATE_EXAMPLE]})

    generation: int = Field(description="rises by at least 1 with every change; 0 = never set")
    threshold: ThresholdValue | None
    mag: float | None = Field(description="null for dense, for lambda 0 and for a scale")
    skip_lambda: float | None = Field(
        alias="lambda", description="null for dense and for a scale (it depends on the prompt)"
    )
    min_context: int | None = Field(description="prompt tokens; null: the engine's own setting")
    updated_at: str = Field(description="RFC 3339, UTC; empty before the first change")
    updated_by: str
    reason: str
    origin: str = Field(
        description="preset and target skip rate that the threshold came from; else empty"
    )
    converged: bool = Field(
        description="every live front end has read this generation, and there is at least one"
    )
    front_ends: list[FrontEndView]


class LayerTiles(BaseModel):
    """P.V tiles of one layer, one number a kv head (in the order of kv_heads)."""

    layer: int
    visited: list[int]
    skipped: list[int]


class TileTable(BaseModel):
    """skip rate = skipped / visited."""

    kv_heads: list[int]
    layers: list[LayerTiles]


class RankView(BaseModel):
    """One worker rank."""

    engine: str
    rank: str
    model_name: str
    impl: str
    alive: bool
    age_s: float = Field(
        description="seconds since it last wrote its statistics page, which it does only after it "
        "worked: of an idle rank it grows; alive says whether the process runs"
    )
    counters: dict[str, int]
    tiles: TileTable


class TtftView(BaseModel):
    """Time from admission to the first token, in seconds; quantiles to one bucket (10%)."""

    count: int
    mean_s: float | None
    p50_s: float | None
    p95_s: float | None


class ClassView(BaseModel):
    """Requests of one class of lambda and of prompt length."""

    model_name: str
    lambda_class: str
    prompt_length_class: str
    admitted: int
    ttft: TtftView


class Status(BaseModel):
    """Everything the status page shows. desired null: the file is unreadable, `error` says why."""

    desired: ThresholdState | None
    error: str
    converged: bool
    front_ends: list[FrontEndView]
    ranks: list[RankView]
    tiles: TileTable = Field(
        description="all engines and ranks added up; only of models that run, if any does"
    )
    unreadable_pages: int = Field(
        description="statistics pages that are damaged or of another release: not counted here"
    )
    requests_rejected: int
    desired_read_errors: int
    classes: list[ClassView]


class PresetView(BaseModel):
    """One calibration preset. refusal: why it does not fit what runs; empty when it does."""

    name: str
    model: str | None = Field(description="null: the file cannot be read, refusal says why")
    geometry: str | None = Field(description="implementation:rowsxkeys that vote as one")
    low: float | None = Field(description="lowest skip rate that was measured")
    high: float | None = Field(description="highest skip rate that was measured")
    error: float | None = Field(description="largest difference of a skip rate from the curve")
    usable: bool
    refusal: str


class PresetList(BaseModel):
    """All presets of the folder, in name order."""

    presets: list[PresetView]


class AuditState(BaseModel):
    """A threshold as the audit log keeps it; threshold null = dense."""

    threshold: ThresholdValue | None
    min_context: int | None


class AuditRecord(BaseModel):
    """One change. result: applied; failed: the disk refused it; lost: a crash came before it."""

    time: str = Field(description="RFC 3339, UTC")
    who: str = Field(description="address of the caller, and its token's scope")
    old: AuditState | None = Field(description="null: the file was corrupt or lost")
    new: AuditState
    reason: str
    generation: int
    result: str
    chain: str = Field(description="SHA-256 over this record and its predecessor's chain")


class AuditList(BaseModel):
    """The newest records, newest last."""

    records: list[AuditRecord]


class Health(BaseModel):
    """ok, or a problem."""

    status: str = "ok"


def parse_change(body: bytes, content_type: str) -> tuple[ThresholdChange, SkipThreshold | None]:
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
    nulls = [name for name, value in raw.items() if value is None]
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
