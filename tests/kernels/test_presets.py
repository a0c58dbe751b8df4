"""Presets: written, read again, refused where they do not hold."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from blasst.kernels.exchange.presets import (
    Preset,
    PresetError,
    PresetFit,
    PresetGeometry,
    curve_of_config,
    loads,
)
from blasst.kernels.threshold import SparsityCurve

GEOMETRY = PresetGeometry("hopper", 64, 128)
PRESET = Preset(
    "a-model",
    GEOMETRY,
    SparsityCurve(12.5, 7.25),
    PresetFit(0.02, 24, 0.05, 0.9, (4096, 8192)),
    "balanced RULER",
    {"blasst": "0.1.0"},
)


def test_a_preset_comes_back_as_it_was() -> None:
    assert loads(PRESET.dumps()) == PRESET
    assert PresetGeometry.parse(str(GEOMETRY)) == GEOMETRY


def test_a_target_becomes_a_scale_within_the_measured_range() -> None:
    found = PRESET.threshold(0.5)
    assert (found.unit, found.value) == ("scale", pytest.approx(12.5 * math.exp(3.625)))
    for target in (0.04, 0.91, -1.0, 2.0, math.nan):
        with pytest.raises(PresetError, match=r"outside 0.05..0.9"):
            PRESET.threshold(target)


@pytest.mark.parametrize("other", ["hopper:128x128", "cpu:64x128", "hopper:64x64"])
def test_another_geometry_or_model_is_refused(other: str) -> None:
    PRESET.check("a-model", GEOMETRY)
    with pytest.raises(PresetError, match=f"for hopper:64x128 and this server runs {other}"):
        PRESET.check("a-model", PresetGeometry.parse(other))
    with pytest.raises(PresetError, match="calibrate this model"):
        PRESET.check("b-model", GEOMETRY)


def change(*path: str, value: Any) -> str:
    body = json.loads(PRESET.dumps())
    inner = body
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(body)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "blasst-preset"}',
        change("version", value=2),
        change("curve", "a", value=-1),
        change("curve", "b", value="7"),
        change("curve", "a", value=math.nan),
        change("curve", "a", value=10**400),
        change("geometry", "tile_m", value=0),
        change("geometry", "tile_m", value=True),
        change("fit", "low", value=0.95),
        change("fit", "lengths", value=5),
        change("versions", value=[]),
        change("model", value=None),
        "[" * 100_000,
        PRESET.dumps()[:-30],
    ],
)
def test_what_is_no_whole_preset_is_refused(text: str) -> None:
    with pytest.raises(PresetError):
        loads(text)


FLAT = {"formula": "a * exp(b * target_sparsity)", "prefill": {"a": 100.0, "b": 5.0}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sparse_attention_config": {"threshold_scale_factor": FLAT}}, None),
        ({"threshold_scale_factor": FLAT | {"decode": {"a": 0.05, "b": 10.0}}}, None),
        (
            {
                "sparse_attention_config": {
                    "config_groups": {
                        "group_0": {"algorithm": "other"},
                        "group_1": {
                            "algorithm": "skip_softmax",
                            "threshold_scale_factor": FLAT,
                            "target_sparsity": {"prefill": 0.5},
                        },
                    }
                }
            },
            0.5,
        ),
    ],
)
def test_configs_of_others_are_read(config: dict[str, Any], expected: float | None) -> None:
    assert curve_of_config(config) == (SparsityCurve(100.0, 5.0), expected)


def test_our_own_config_is_read_again_in_both_forms() -> None:
    config = PRESET.sparse_attention_config(0.6)
    assert curve_of_config({"sparse_attention_config": config}) == (PRESET.curve, 0.6)
    del config["config_groups"]
    assert curve_of_config(config) == (PRESET.curve, None)
    with pytest.raises(PresetError, match="outside"):
        PRESET.sparse_attention_config(0.99)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sparse_attention_config": []},
        {"threshold_scale_factor": FLAT | {"formula": "a + b"}},
        {"threshold_scale_factor": {"formula": FLAT["formula"], "decode": {}}},
        {"threshold_scale_factor": FLAT | {"prefill": {"a": 0, "b": 1}}},
        {"threshold_scale_factor": FLAT | {"prefill": {"a": 10**400, "b": 1}}},
    ],
)
def test_configs_without_a_curve_for_prefill_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(PresetError):
        curve_of_config(config)


@pytest.mark.parametrize("text", ["", "hopper", "hopper:64", "hopper:ax128", ":64x128"])
def test_geometries_that_are_none(text: str) -> None:
    with pytest.raises(PresetError, match="hopper:64x128"):
        PresetGeometry.parse(text)
