"""Which vLLM releases are supported, and how their attention layers differ from one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

OLDEST = (0, 26)
NEWEST_EXCLUDED = (0, 34)
PINS = "vllm>=0.26,<0.34"


def unsupported_reason(version: str) -> str | None:
    """Why this vLLM cannot be used, or None. Private interfaces move between its releases."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None:
        release = (int(match[1]), int(match[2]))
        if OLDEST <= release < NEWEST_EXCLUDED:
            return None
    return (
        f"vLLM {version} is not supported: this release of blasst was written for vLLM "
        f">= {_dotted(OLDEST)}, < {_dotted(NEWEST_EXCLUDED)}; install '{PINS}', or another blasst"
    )


def cpu_isa(layer: Any, impl: Any) -> str:
    """Name of the CPU cache layout; on the layer since vLLM 0.29, on the impl before."""
    return str(getattr(layer, "isa", None) or getattr(impl, "isa", "") or "")


# Per-row arrays of CommonAttentionMetadata besides the ones that a sub-batch always replaces;
# the two private ones exist up to vLLM 0.29, the others come and go.
_ROW_TENSORS: Sequence[str] = (
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
    "seq_lens_cpu_upper_bound",
    "is_prefilling",
    "req_idx",
)
_CACHES: Sequence[str] = ("_num_computed_tokens_cache", "_token_to_req_indices_cache", "positions")


def row_fields(common: Any, rows: Any, host_rows: Any) -> dict[str, Any]:
    """Field values of `common` for these rows only: what this release has of the per-row fields.

    rows: slice or index tensor on the batch's device, host_rows: the same on the CPU.
    """
    fields: dict[str, Any] = {}
    for name in _ROW_TENSORS:
        value = getattr(common, name, None)
        if value is not None:  # a tensor on the device or the host, or a numpy array
            on_device = getattr(value, "device", None) == common.seq_lens.device
            fields[name] = value[rows if on_device else host_rows]
    fields |= {name: None for name in _CACHES if hasattr(common, name)}
    return fields


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
