"""Calibration presets: a target skip rate becomes a scale, for one model and kernel geometry.

A file that one program writes and others read; also as `sparse_attention_config` of a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blasst.kernels.threshold import SkipThreshold, SparsityCurve, ThresholdError

SCHEMA = "blasst-preset"
VERSION = 1
FORMULA = "a * exp(b * target_sparsity)"
_ALGORITHM = "skip_softmax"
_PRODUCER = "blasst"


class PresetError(ValueError):
    """A preset that cannot be read or does not fit; the message names value, rule and remedy."""


@dataclass(frozen=True)
class PresetGeometry:
    """impl: as in metrics (cpu, hopper, ...). tile_m x tile_n: query rows x keys that vote as one.

    lambda -> skip rate depends on it: a preset holds for its geometry only.
    """

    impl: str
    tile_m: int
    tile_n: int

    def __str__(self) -> str:
        return f"{self.impl}:{self.tile_m}x{self.tile_n}"

    @classmethod
    def parse(cls, text: str) -> PresetGeometry:
        """The inverse of str(), such as hopper:64x128. Raises PresetError."""
        impl, _, tiles = text.partition(":")
        rows, _, keys = tiles.partition("x")
        if not impl or not rows.isdigit() or not keys.isdigit() or 0 in (int(rows), int(keys)):
            raise PresetError(f"geometry {text!r}: give IMPL:ROWSxKEYS, such as hopper:64x128")
        return cls(impl, int(rows), int(keys))


@dataclass(frozen=True)
class PresetFit:
    """How well the curve meets what was measured. error: largest difference of a skip rate.
    low, high: the range of measured skip rates; lengths: prompt tokens that were measured."""

    error: float
    points: int
    low: float
    high: float
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Preset:
    """lambda * L = a * exp(b * target), L = the prompt's final length in tokens."""

    model: str
    geometry: PresetGeometry
    curve: SparsityCurve
    fit: PresetFit
    data: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def threshold(self, target_skip_rate: float) -> SkipThreshold:
        """The scale for a target. Raises PresetError outside the range that was measured."""
        if not self.fit.low <= target_skip_rate <= self.fit.high:
            raise PresetError(
                f"target skip rate {target_skip_rate:g} is outside {self.fit.low:.3g}.."
                f"{self.fit.high:.3g}, where this preset was measured; choose one inside or "
                "calibrate with more lambdas"
            )
        return SkipThreshold("scale", self.curve.scale(target_skip_rate))

    def check(self, model: str, geometry: PresetGeometry) -> None:
        """Raises PresetError when it was calibrated for another model or geometry."""
        if geometry != self.geometry:
            raise PresetError(
                f"the preset was calibrated for {self.geometry} and this server runs {geometry}: "
                "its skip rates would be others; calibrate on this kernel"
            )
        if model != self.model:
            raise PresetError(
                f"the preset was calibrated for {self.model!r} and this server runs {model!r}; "
                "calibrate this model"
            )

    def dumps(self) -> str:
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        return json.dumps(body | {"versions": dict(self.versions)}, indent=1) + "\n"

    def sparse_attention_config(self, target_skip_rate: float | None = None) -> dict[str, Any]:
        """As TensorRT-LLM and ModelOpt keep it in a checkpoint's config.json."""
        group: dict[str, Any] = {"algorithm": _ALGORITHM, "threshold_scale_factor": self._factor()}
        if target_skip_rate is not None:
            self.threshold(target_skip_rate)
            group["target_sparsity"] = {"prefill": target_skip_rate}
        return {
            "config_groups": {"group_0": group},
            "threshold_scale_factor": self._factor(),
            "producer": {
                "name": _PRODUCER,
                "geometry": str(self.geometry),
                "fit": asdict(self.fit) | {"lengths": list(self.fit.lengths)},
            },
        }

    def _factor(self) -> dict[str, Any]:
        return {"formula": FORMULA, "prefill": {"a": self.curve.a, "b": self.curve.b}}


def loads(text: str) -> Preset:
    """Raises PresetError for anything that is not a whole preset of this version."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise PresetError("not a preset of blasst; make one with `blasst ruler calibrate`")
        if body["version"] != VERSION:
            raise PresetError(f"preset version {body['version']!r}; this release reads {VERSION}")
        preset = Preset(
            model=_text(body["model"]),
            geometry=PresetGeometry(
                _text(body["geometry"]["impl"]),
                _whole(body["geometry"]["tile_m"]),
                _whole(body["geometry"]["tile_n"]),
            ),
            curve=SparsityCurve(
                finite_number(body["curve"]["a"]), finite_number(body["curve"]["b"])
            ),
            fit=_fit(body["fit"]),
            data=_text(body["data"]),
            versions={str(k): _text(v) for k, v in body["versions"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        if isinstance(e, PresetError):
            raise
        raise PresetError(f"the preset is damaged or was edited: {e!r}; calibrate again") from e
    if not 0.0 <= preset.fit.low < preset.fit.high < 1.0:
        raise PresetError(f"the preset's range {preset.fit.low}..{preset.fit.high} is not in 0..1")
    return preset


def curve_of_config(config: Mapping[str, Any]) -> tuple[SparsityCurve, float | None]:
    """(curve, target skip rate or None) out of a config.json with `sparse_attention_config`, in
    the flat form or in groups, or out of that section itself. Raises PresetError."""
    section = config.get("sparse_attention_config", config)
    if not isinstance(section, Mapping):
        raise PresetError("sparse_attention_config is not an object")
    groups = section.get("config_groups", {})
    candidates = [
        group
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
        and group.get("algorithm", group.get("sparse_algo")) in (_ALGORITHM, "softmax_skip")
    ]
    source = next((g for g in [*candidates, section] if "threshold_scale_factor" in g), None)
    if source is None:
        raise PresetError(
            "no threshold_scale_factor of skip_softmax in sparse_attention_config; calibrate it"
        )
    factor = source["threshold_scale_factor"]
    try:
        if "".join(factor["formula"].split()) != "".join(FORMULA.split()):
            raise PresetError(f"formula {factor['formula']!r} is not {FORMULA!r}")
        prefill = factor["prefill"]
        curve = SparsityCurve(finite_number(prefill["a"]), finite_number(prefill["b"]))
        target = (source.get("target_sparsity") or {}).get("prefill")
        return curve, None if target is None else finite_number(target)
    except (KeyError, TypeError, AttributeError, ThresholdError) as e:
        raise PresetError(f"threshold_scale_factor for prefill cannot be read: {e!r}") from e


def measured_of_config(config: Mapping[str, Any]) -> tuple[PresetGeometry, PresetFit] | None:
    """What sparse_attention_config() put beside the curve; None in one that others made. Raises
    PresetError."""
    section = config.get("sparse_attention_config", config)
    producer = section.get("producer") if isinstance(section, Mapping) else None
    if not isinstance(producer, Mapping) or producer.get("name") != _PRODUCER:
        return None
    try:
        return PresetGeometry.parse(_text(producer["geometry"])), _fit(producer["fit"])
    except (KeyError, TypeError) as e:
        raise PresetError(f"the producer in sparse_attention_config cannot be read: {e!r}") from e


def _fit(fit: Mapping[str, Any]) -> PresetFit:
    return PresetFit(
        finite_number(fit["error"]),
        _whole(fit["points"]),
        finite_number(fit["low"]),
        finite_number(fit["high"]),
        tuple(_whole(length) for length in fit["lengths"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError(f"{value!r} is not a whole number above 0")
    return value


def finite_number(value: object) -> float:
    """A number of a JSON document. Raises TypeError for all else, NaN and infinity too."""
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        raise TypeError("an integer is too large to be a number") from None
    raise TypeError(f"{value!r} is not a finite number")
