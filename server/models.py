"""What the API answers, with units and examples, which OpenAPI then shows."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ThresholdValue(BaseModel):
    """A threshold in the unit it was given in."""

    unit: str = Field(description="mag, lambda or scale")
    value: float = Field(
        description="in its unit: MAG; lambda, natural base; lambda times prompt tokens"
    )


class StepValue(BaseModel):
    """One step of a schedule. threshold null = dense."""

    up_to: int | None = Field(
        description="longest prompt of this step, in tokens; null: all longer ones"
    )
    threshold: ThresholdValue | None = Field(description="null: dense")


class FrontEndView(BaseModel):
    """One vLLM API server process, and how far it has followed."""

    name: str = Field(description="its statistics page, front-PID")
    pid: int | None = Field(description="process id, in its own container")
    model_name: str = Field(description="the first served name")
    alive: bool = Field(description="false: the process is gone; its counters remain")
    generation_read: int = Field(description="generation that new requests get")
    generation_stamped: int = Field(description="generation of the last request it admitted")
    min_context: int | None = Field(
        description="its own setting, prompt tokens, in force where the threshold's min_context is "
        "null; null: unknown"
    )
    age_s: float = Field(description="seconds since it last wrote its statistics page")


class ThresholdState(BaseModel):
    """The deployment's threshold and who has taken it over. threshold and schedule null = dense."""

    generation: int = Field(description="rises by at least 1 with every change; 0 = never set")
    threshold: ThresholdValue | None = Field(description="as it was given; null: dense")
    mag: float | None = Field(description="null for dense, for lambda 0 and for a scale")
    skip_lambda: float | None = Field(
        alias="lambda", description="null for dense and for a scale (it depends on the prompt)"
    )
    schedule: list[StepValue] | None = Field(
        description="a threshold for each class of prompt length; then threshold is null"
    )
    min_context: int | None = Field(description="prompt tokens; null: the engine's own setting")
    updated_at: str = Field(description="RFC 3339, UTC; empty before the first change")
    updated_by: str = Field(
        description="address of the caller and its token's scope, or the file, command or canary"
    )
    reason: str = Field(description="free text that was given with it")
    origin: str = Field(
        description="preset and target skip rate that the threshold came from; else empty"
    )
    converged: bool = Field(
        description="every live front end has read this generation, and there is at least one"
    )
    front_ends: list[FrontEndView] = Field(description="of this engine, gone ones included")


class LayerTiles(BaseModel):
    """P.V tiles of one layer, one number a kv head (in the order of kv_heads)."""

    layer: int = Field(description="number in the whole model")
    visited: list[int] = Field(description="tiles, one number a kv head")
    skipped: list[int] = Field(description="tiles, one number a kv head")


class TileTable(BaseModel):
    """skip rate = skipped / visited."""

    kv_heads: list[int] = Field(description="numbers in the whole model")
    layers: list[LayerTiles] = Field(description="in the model's order")


class RankView(BaseModel):
    """One worker rank."""

    engine: str = Field(description="data-parallel index")
    rank: str = Field(description="worker rank in that engine")
    model_name: str = Field(description="the first served name")
    impl: str = Field(description="implementation that votes, such as hopper; none: no layer can")
    geometry: str = Field(description="query rows x keys that vote as one; empty: unknown")
    generation_seen: int = Field(
        description="newest generation that a request's stamp brought here; it follows with "
        "the first request after a change"
    )
    layers_voting: int = Field(description="layers that skip under a threshold")
    layers_dense: dict[str, int] = Field(description="reason -> layers that cannot skip")
    served: dict[str, str] = Field(
        description="what the engine computes with: weights (digest of the model's files), dtype, "
        "kv_cache_dtype, quantization, max_num_batched_tokens, tensor_parallel_size, "
        "pipeline_parallel_size; a name that is missing is unknown"
    )
    alive: bool = Field(description="false: the process is gone; its counters remain")
    age_s: float = Field(
        description="seconds since it last wrote its statistics page, which it does only after it "
        "worked: of an idle rank it grows; alive says whether the process runs"
    )
    counters: dict[str, int] = Field(
        description="query tokens and (request, engine step) pairs by path since the start"
    )
    tiles: TileTable = Field(description="of this rank's layers and kv heads")


class TtftView(BaseModel):
    """Times in seconds; quantiles to one bucket (10%)."""

    count: int = Field(description="requests")
    mean_s: float | None = Field(description="seconds; exact; null: none yet")
    p50_s: float | None = Field(description="seconds, to 10%; null: none yet")
    p95_s: float | None = Field(description="seconds, to 10%; null: none yet")


class ClassView(BaseModel):
    """Requests of one class of lambda and of prompt length."""

    model_name: str = Field(description="the first served name")
    lambda_class: str = Field(description="dense, lambda_0, or a range of MAG")
    prompt_length_class: str = Field(description="range of the prompt's tokens")
    admitted: int = Field(description="requests")
    ttft: TtftView = Field(description="from admission to the first token")
    prefill: TtftView = Field(
        description="from being scheduled first to the first token, where vLLM logs statistics"
    )


class LastError(BaseModel):
    """The last thing that went wrong in the sidecar, refused and badly made calls left aside."""

    time: str = Field(description="RFC 3339, UTC")
    kind: str = Field(description="as in blasst_control_errors_total")
    message: str = Field(description="the value, the rule and the remedy")


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

    desired: ThresholdState | None = Field(description="as GET /v1/blasst/threshold answers it")
    error: str = Field(description="what is wrong with the state file now; empty: nothing")
    last_error: LastError | None = Field(description="null: none since the sidecar started")
    canary: CanaryView | None = Field(description="null: it is not configured")
    converged: bool = Field(description="as of desired; false while that is null")
    front_ends: list[FrontEndView] = Field(description="of this engine, gone ones included")
    ranks: list[RankView] = Field(description="of this engine, gone ones included")
    tiles: TileTable = Field(
        description="all engines and ranks added up; only of models that run, if any does"
    )
    unreadable_pages: int = Field(
        description="statistics pages that are damaged or of another release: not counted here"
    )
    requests_rejected: int = Field(description="requests with bad blasst_* arguments")
    desired_read_errors: int = Field(description="changed state files that could not be read")
    classes: list[ClassView] = Field(description="only classes that saw a request")


class PresetView(BaseModel):
    """One calibration preset. refusal: why it does not fit what runs; empty when it does."""

    name: str = Field(description="file name without .json")
    model: str | None = Field(description="null: the file cannot be read, refusal says why")
    geometry: str | None = Field(description="implementation:rowsxkeys that vote as one")
    low: float | None = Field(description="lowest skip rate that was measured")
    high: float | None = Field(description="highest skip rate that was measured")
    error: float | None = Field(description="largest difference of a skip rate from the curve")
    usable: bool = Field(description="it fits what runs now")
    refusal: str = Field(description="why not; empty when it does")


class PresetList(BaseModel):
    """All presets of the folder, in name order."""

    presets: list[PresetView] = Field(description="200 at most")


class AuditState(BaseModel):
    """A threshold as the audit log keeps it; threshold and schedule null = dense."""

    threshold: ThresholdValue | None = Field(description="null: dense, or a schedule")
    schedule: list[StepValue] | None = Field(
        default=None, description="null: one threshold for all"
    )
    min_context: int | None = Field(description="prompt tokens; null: the engine's own setting")


class AuditRecord(BaseModel):
    """One change. result: applied; failed: the disk refused it; lost: a crash came before it."""

    time: str = Field(description="RFC 3339, UTC")
    who: str = Field(description="address of the caller, and its token's scope")
    old: AuditState | None = Field(description="null: the file was corrupt or lost")
    new: AuditState = Field(description="what was asked for")
    reason: str = Field(description="free text that was given with it")
    generation: int = Field(description="of the new state")
    result: str = Field(description="applied, failed or lost")
    chain: str = Field(description="SHA-256 over this record and its predecessor's chain")


class AuditList(BaseModel):
    """The newest records, newest last."""

    records: list[AuditRecord] = Field(description="200 at most")


class Health(BaseModel):
    """ok, or a problem."""

    status: str = Field(default="ok", description="always ok; anything else is a problem")
