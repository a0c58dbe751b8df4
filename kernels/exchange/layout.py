"""What the two kinds of statistics page hold, and the bounded label sets they are counted by."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

from blasst.kernels.exchange.stats import Field
from blasst.kernels.threshold import lambda_to_mag

RANK = "rank"
"""Page of one rank; labels engine, rank, pid, model_name, impl, first_layer, first_kv_head,
tile_m and tile_n (query rows and keys that vote as one; absent: unknown, or of an older release),
refusal: why none of its layers can skip, "" when some can, and those of SERVED."""

SERVED = (
    "weights",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
"""Labels that say what an engine computes with; absent: unknown, or of an older release. weights: a
digest, another one for another training of the same shapes."""

FRONT = "front"
"""Page of one vLLM front end; labels pid, model_name, vllm_version, and min_context: its own
setting, prompt tokens below which it is dense where the deployment's state does not say."""

RETIRED = "retired"
"""Label, and beginning of the name, of a page that adds up those of processes that are gone."""

LAMBDA_CLASSES = (
    "dense",
    "lambda_0",
    "mag_ge_10000",
    "mag_7000_9999",
    "mag_4500_6999",
    "mag_2500_4499",
    "mag_1500_2499",
    "mag_1000_1499",
    "mag_lt_1000",
)
_MAG_EDGES = (1000.0, 1500.0, 2500.0, 4500.0, 7000.0, 10000.0)

LENGTH_EDGES = tuple(1024 << i for i in range(11))
"""Upper bounds (prompt tokens, inclusive) of the prompt-length classes, 1K to 1M."""

LENGTH_CLASSES = (
    *(f"le_{edge >> 10}k" if edge < 1 << 20 else "le_1m" for edge in LENGTH_EDGES),
    "gt_1m",
)

LAYER_REASONS = (
    "other_backend",
    "layer_class",
    "attention_type",
    "sliding_window",
    "soft_cap",
    "sinks",
    "alibi",
    "kv_cache_dtype",
    "cache_layout",
    "engine",
    "kernel",
)
"""Why a layer is dense, the first reason that was found: closed, as labels must be. engine: an
option of vLLM; kernel: no implementation takes its head size, dtype or device."""

REQUEST_REASONS = ("below_min_context", "streamed_input", "pooling")
"""Why a request ran dense although a threshold was in force for the deployment."""

TTFT_BUCKETS_S = tuple(round(0.005 * 1.1**i, 6) for i in range(120))
"""5 ms to about 420 s in steps of 10%: a 5% shift moves half a bucket of the counts."""

RANK_COUNTERS = (
    "prefill_requests_vote",
    "prefill_requests_dense",
    "prefill_tokens_vote",
    "prefill_tokens_dense",
    "decode_tokens",
    "unstamped_requests",
)
"""Scalars of a rank page; "requests" counts (request, step) pairs, "tokens" query tokens."""


def lambda_class(skip_lambda: float | None) -> str:
    """The class that a request's lambda is counted under; None = dense."""
    if skip_lambda is None:
        return "dense"
    if skip_lambda == 0.0:
        return "lambda_0"
    mag = lambda_to_mag(skip_lambda)
    return LAMBDA_CLASSES[len(LAMBDA_CLASSES) - 1 - bisect.bisect_right(_MAG_EDGES, mag)]


def length_class(prompt_tokens: int) -> str:
    """The class of a prompt's length."""
    return LENGTH_CLASSES[bisect.bisect_left(LENGTH_EDGES, prompt_tokens)]


def ttft_bucket(seconds: float) -> int:
    """Index into TTFT_BUCKETS_S + (inf,) of one observation (non-cumulative)."""
    return bisect.bisect_left(TTFT_BUCKETS_S, seconds) if not math.isnan(seconds) else -1


LATER_RANK_FIELDS = (
    Field("generation_seen", (1,)),
    Field("layers_voting", (1,)),
    Field("layers_dense", (len(LAYER_REASONS),)),
)
"""Pages of release 0.1.0 lack them and are read all the same. generation_seen: the highest that a
request's stamp brought here."""


def tiles_of(rank_labels: Mapping[str, str]) -> str:
    """Rows x keys that vote as one on a rank, such as 128x128; "" where its page does not say."""
    rows, keys = rank_labels.get("tile_m", ""), rank_labels.get("tile_n", "")
    return f"{rows}x{keys}" if rows and keys else ""


def rank_fields(num_layers: int, num_kv_heads: int) -> tuple[Field, ...]:
    """tiles: [layer, kv_head, {visited, skipped}] of this rank's layers and kv heads."""
    return (
        Field("tiles", (num_layers, num_kv_heads, 2)),
        *(Field(name, (1,)) for name in RANK_COUNTERS),
        *LATER_RANK_FIELDS,
    )


_TABLE = (len(LAMBDA_CLASSES), len(LENGTH_CLASSES))
LATER_FRONT_FIELDS = (
    Field("prefill_count", _TABLE),
    Field("prefill_sum_seconds", _TABLE, "d"),
    Field("prefill_bucket", (*_TABLE, len(TTFT_BUCKETS_S) + 1)),
    Field("requests_dense", (len(REQUEST_REASONS),)),
    Field("threshold_classes", (len(LENGTH_CLASSES),), "d"),
)
"""Pages of release 0.1.0 lack them and are read all the same. threshold_classes: lambda in force
for prompts of each length class (of its longest prompt); NaN: dense, or no one lambda."""


def front_fields() -> tuple[Field, ...]:
    """[lambda class, length class] tables; generations as last read and as last stamped."""
    table = _TABLE
    return (
        Field("requests_admitted", table),
        Field("ttft_count", table),
        Field("ttft_sum_seconds", table, "d"),
        Field("ttft_bucket", (*table, len(TTFT_BUCKETS_S) + 1)),
        Field("generation_read", (1,)),
        Field("generation_stamped", (1,)),
        Field("desired_read_errors", (1,)),
        Field("requests_rejected", (1,)),
        Field("threshold_lambda", (1,), "d"),
        Field("threshold_mag", (1,), "d"),
        *LATER_FRONT_FIELDS,
    )
