"""RULER's eight needle tasks as parameters (NVIDIA/RULER, scripts/synthetic.yaml)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NiahKind:
    """haystack: repeat (five noise sentences), essay, or needle (needles with other keys).
    key, value: words, numbers or uuids. queries > 1: that many keys are asked for."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": NiahKind("repeat"),
    "niah_single_2": NiahKind("essay"),
    "niah_single_3": NiahKind("essay", value="uuids"),
    "niah_multikey_1": NiahKind("essay", keys=4),
    "niah_multikey_2": NiahKind("needle"),
    "niah_multikey_3": NiahKind("needle", key="uuids", value="uuids"),
    "niah_multivalue": NiahKind("essay", values=4),
    "niah_multiquery": NiahKind("essay", queries=4),
}
