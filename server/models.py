"""What the API answers, with units and examples, which OpenAPI then shows."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class ThresholdValue(BaseModel):
    """A threshold in the unit it was given in."""

    unit: str = Field(description="mag, lambda or scale")
    value: float


class StepValue(BaseModel):
    """One step of a schedule. threshold null = dense."""

    up_to: int | None = Field(
        description="longest prompt of this step, in tokens; null: all longer ones"
    )
    threshold: ThresholdValue | None


class FrontEndView(BaseModel):
    """One vLLM API server process, and how far it has followed."""

    name: str
    pid: int | None
    model_name: str
    alive: bool = Field(description="false: the process is gone; its counters remain")
    generation_read: int = Field(description="generation that new requests get")
    generation_stamped: int = Field(description="generation of the last request it admitted")
    age_s: float = Field(description="seconds since it last wrote its statistics page")


STATE_EXAMPLE: dict[str, Any] = {
    "generation": 3,
    "threshold": {"unit": "mag", "value": 2500.0},
    "mag": 2500.0,
    "lambda": 0.1767766952966369,
    "schedule": None,
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
    """The deployment's threshold and who has taken it over. threshold and schedule null = dense."""

    model_config = ConfigDict(json_schema_extra={"examples": [STATE_EXAMPLE]})

    generation: int = Field(description="rises by at least 1 with every change; 0 = never set")
    threshold: ThresholdValue | None
    mag: float | None = Field(description="null for dense, for lambda 0 and for a scale")
    skip_lambda: float | None = Field(
        alias="lambda", description="null for dense and for a scale (it depends on the prompt)"
    )
    schedule: list[StepValue] | None = Field(
        description="a threshold for each class of prompt length; then threshold is null"
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
    geometry: str = Field(description="query rows x keys that vote as one; empty: unknown")
    generation_seen: int = Field(
        description="newest generation that a request's stamp brought here; it follows with "
        "the first request after a change"
    )
    layers_voting: int
    layers_dense: dict[str, int] = Field(description="reason -> layers that cannot skip")
    alive: bool
    age_s: float = Field(
        description="seconds since it last wrote its statistics page, which it does only after it "
        "worked: of an idle rank it grows; alive says whether the process runs"
    )
    counters: dict[str, int]
    tiles: TileTable


class TtftView(BaseModel):
    """Times in seconds; quantiles to one bucket (10%)."""

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
    ttft: TtftView = Field(description="from admission to the first token")
    prefill: TtftView = Field(
        description="from being scheduled first to the first token, where vLLM logs statistics"
    )


class LastError(BaseModel):
    """The last thing that went wrong in the sidecar, refused and badly made calls left aside."""

    time: str = Field(description="RFC 3339, UTC")
    kind: str = Field(description="as in blasst_control_errors_total")
    message: str


class CanaryView(BaseModel):
    """The canary's newest probes. Means are null before the first one."""

    probes: int = Field(description="probes that are judged together now")
    agreement: float | None = Field(
        description="mean share of a dense answer's tokens that come out as deployed, 0 to 1"
    )
    control_agreement: float | None = Field(description="the same of a second dense answer")
    nll_increase_nats: float | None = Field(
        description="mean rise of -ln p of a dense answer's tokens, nats a token"
    )
    min_agreement: float = Field(description="bound, 0 to 1")
    max_nll_increase_nats: float = Field(description="bound, nats a token")
    breached: bool = Field(description="a bound was crossed and is not yet met by its margin")
    noisy: bool = Field(description="dense answers differ among themselves: no judgement")
    steps: int = Field(description="by which it raised the threshold since the sidecar started")
    error: str = Field(description="of the last probe; empty when it went well")


class Status(BaseModel):
    """Everything the status page shows. desired null: the file is unreadable, `error` says why."""

    desired: ThresholdState | None
    error: str = Field(description="what is wrong with the state file now; empty: nothing")
    last_error: LastError | None = Field(description="null: none since the sidecar started")
    canary: CanaryView | None = Field(description="null: it is not configured")
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
    """A threshold as the audit log keeps it; threshold and schedule null = dense."""

    threshold: ThresholdValue | None
    schedule: list[StepValue] | None = None
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
