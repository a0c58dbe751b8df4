"""Which server results are of, and whether a file of results may be continued on this one.

A file holds the results of one server. What a server cannot say is noted as unknown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blasst.evals.client import ServedModel
from blasst.evals.errors import InputError
from blasst.evals.store import Record

RECORD_VERSION = 3
"""2 (read and continued all the same) lacks what SERVED names, and the server its kernel."""
UNKNOWN = "unknown"
SERVED = (
    "weights",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
"""What the ranks of a server say of it, by its API alone: a test compares kernels.exchange.layout,
which nothing here may import."""
Details = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """What the ranks say. kernels: what votes, such as hopper:64x128, several joined, empty where
    unknown. served: by the names of SERVED, UNKNOWN where a rank does not say."""

    kernels: str
    served: Mapping[str, str]

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Engine:
        """Of the sidecar's status; ranks that are gone do not count."""
        live = [r for r in ranks if r.get("alive", True)]
        names = {(str(r["impl"]), str(r.get("geometry") or "")) for r in live}
        kernels = ", ".join(sorted(f"{i}:{g}" if g else i for i, g in names))
        said = [dict(r.get("served") or {}) for r in live]
        return cls(kernels, {name: _joined([s.get(name) for s in said]) for name in SERVED})


@dataclass(frozen=True)
class Identity:
    """server: for the plan of a sweep. not_noted: what this server says and the results that are
    continued do not."""

    fingerprint: str
    server: Details
    not_noted: tuple[str, ...] = ()


def details_of(
    model: ServedModel, engine: Engine, blasst_version: str, min_context: int
) -> Details:
    """What an answer depends on besides prompt and threshold."""
    return {
        "model": model.name,
        "root": model.root.rstrip("/").rsplit("/", 1)[-1],
        **engine.served,
        "kernel": engine.kernels or UNKNOWN,
        "max_model_len": model.max_model_len or UNKNOWN,
        "min_context": min_context,
        "vllm_version": model.version or UNKNOWN,
        "blasst_version": blasst_version or UNKNOWN,
        "record_version": RECORD_VERSION,
    }


def identity(now: Details, records: Sequence[Record], url: str) -> Identity:
    """Of the results that will hold what the server at `url` answers, with those that are there.

    Raises InputError when they are of another server. What they do not note cannot differ.
    """
    plan = next((r for r in reversed(records) if r.get("kind") == "plan"), None)
    if plan is None:
        return Identity(_fingerprint(now), now)
    try:
        had = _details_in(plan)
        fingerprint, number = str(plan["fingerprint"]), int(had["record_version"])
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(
            f"the results do not say which server they are of ({e!r}): give another --out"
        ) from e
    if number > RECORD_VERSION:
        raise InputError(
            f"the results are of record_version {number}, this release writes {RECORD_VERSION}: "
            "continue them with the release that began them, or give another --out"
        )
    if words := different(had, now):
        raise InputError(
            f"the results are not of {url} as it serves now: {words}; give another --out, or serve "
            "as then"
        )
    noted = {name: had[name] if says(had, name) else UNKNOWN for name in now}
    missing = tuple(name for name in now if noted[name] == UNKNOWN and says(now, name))
    return Identity(fingerprint, noted, missing)


def same_server(one: Record, other: Record) -> bool:
    """Of two plans in one file, as of two files put together: nothing that both say differs."""
    if one["fingerprint"] == other["fingerprint"]:
        return True
    first, second = _details_in(one), _details_in(other)
    known = all(says(details, "record_version") for details in (first, second))
    # Either may be the one that names its kernel's geometry.
    return known and not (different(first, _said(second)) and different(second, _said(first)))


def said_by_all(plans: Sequence[Record]) -> Details:
    """What the last of these plans of one server says, unknown where one of them does not."""
    every = [_details_in(plan) for plan in plans]
    mute = {name for name in SERVED if not all(says(details, name) for details in every)}
    server = dict(plans[-1]["server"])
    return server | {name: UNKNOWN for name in mute if name in server}


def _details_in(plan: Record) -> Details:
    return {"kernel": plan.get("kernels") or UNKNOWN, **plan["server"]}


def different(had: Details, now: Details) -> str:
    """What the two say that is not the same; empty where everything is that the first says."""
    found = []
    for name, value in now.items():
        if name == "record_version" or not says(had, name) or had[name] == value:
            continue
        # An older release named a kernel without its geometry.
        if name != "kernel" or not str(value).startswith(f"{had[name]}:"):
            found.append(f"{name} {had[name]} then, {value} now")
    return "; ".join(found)


def _said(details: Details) -> Details:
    return {name: value for name, value in details.items() if says(details, name)}


def says(details: Details, name: str) -> bool:
    return details.get(name) not in (None, "", UNKNOWN)


def _joined(values: Sequence[str | None]) -> str:
    if not values or not all(values):
        return UNKNOWN
    return ", ".join(sorted({str(value) for value in values}))


def _fingerprint(details: Details) -> str:
    text = json.dumps(details, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
