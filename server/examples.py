"""One whole example of every kind of answer, for the OpenAPI document; a test validates them."""

from __future__ import annotations

from typing import Any

_STATE: dict[str, Any] = {
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
            "min_context": 8192,
            "age_s": 0.4,
        }
    ],
}
_TILES: dict[str, Any] = {
    "kv_heads": [0, 1],
    "layers": [{"layer": 0, "visited": [3200, 3200], "skipped": [1611, 1702]}],
}
_RANK: dict[str, Any] = {
    "engine": "0",
    "rank": "0",
    "model_name": "smollm2",
    "impl": "cpu",
    "geometry": "128x128",
    "generation_seen": 3,
    "layers_voting": 30,
    "layers_dense": {},
    "served": {
        "weights": "5d07a10c62c41a3b",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "quantization": "none",
        "max_num_batched_tokens": "8192",
        "tensor_parallel_size": "1",
        "pipeline_parallel_size": "1",
    },
    "alive": True,
    "age_s": 0.4,
    "counters": {
        "prefill_requests_vote": 12,
        "prefill_requests_dense": 3,
        "prefill_tokens_vote": 98304,
        "prefill_tokens_dense": 900,
        "decode_tokens": 480,
        "unstamped_requests": 0,
    },
    "tiles": _TILES,
}
_CLASS: dict[str, Any] = {
    "model_name": "smollm2",
    "lambda_class": "mag_2500_4499",
    "prompt_length_class": "le_8k",
    "admitted": 12,
    "ttft": {"count": 12, "mean_s": 1.31, "p50_s": 1.29, "p95_s": 1.5},
    "prefill": {"count": 12, "mean_s": 1.22, "p50_s": 1.2, "p95_s": 1.4},
}
_STATUS: dict[str, Any] = {
    "desired": _STATE,
    "error": "",
    "last_error": {
        "time": "2026-11-30T07:29:00.000+00:00",
        "kind": "precondition-failed",
        "message": "The generation is 3, not what If-Match names: somebody changed it since.",
    },
    "canary": {
        "probes": 20,
        "agreement": 0.97,
        "control_agreement": 1.0,
        "nll_increase_nats": 0.012,
        "min_agreement": 0.9,
        "max_nll_increase_nats": 0.05,
        "breached": False,
        "noisy": False,
        "steps": 0,
        "error": "",
    },
    "converged": True,
    "front_ends": _STATE["front_ends"],
    "ranks": [_RANK],
    "tiles": _TILES,
    "unreadable_pages": 0,
    "requests_rejected": 0,
    "desired_read_errors": 0,
    "classes": [_CLASS],
}
_PRESETS: dict[str, Any] = {
    "presets": [
        {
            "name": "smollm2-cpu",
            "model": "smollm2",
            "geometry": "cpu:128x128",
            "low": 0.08,
            "high": 0.91,
            "error": 0.03,
            "usable": True,
            "refusal": "",
        }
    ]
}
_AUDIT: dict[str, Any] = {
    "records": [
        {
            "time": "2026-11-30T07:30:00.000+00:00",
            "who": "127.0.0.1 (write token)",
            "old": {"threshold": None, "schedule": None, "min_context": None},
            "new": {
                "threshold": {"unit": "mag", "value": 2500.0},
                "schedule": None,
                "min_context": 16384,
            },
            "reason": "chosen from last week's sweep",
            "generation": 3,
            "result": "applied",
            "chain": "9f2d5c1e0b7a4d3386e1f0c9a8b7d6e5f4c3b2a190817263544536271809fedc",
        }
    ]
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "ThresholdState": _STATE,
    "Status": _STATUS,
    "PresetList": _PRESETS,
    "AuditList": _AUDIT,
    "Health": {"status": "ok"},
}
"""Name of the schema -> example."""

METRICS = """# HELP blasst_threshold_mag The same as MAG: lambda = 2^(-MAG/1000).
# TYPE blasst_threshold_mag gauge
blasst_threshold_mag{front_end="front-4242",model_name="smollm2"} 2500.0
"""
