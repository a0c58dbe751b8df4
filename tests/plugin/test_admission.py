"""Who decides a request's lambda, what is refused, and how the decision travels."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blasst.kernels.exchange.desired import DENSE, DesiredState
from blasst.kernels.threshold import LAMBDA_MAX, SkipThreshold
from blasst.plugin.admission import (
    AdmissionError,
    Deployment,
    decide,
    parse_wish,
    salted,
)
from blasst.plugin.settings import Settings
from blasst.plugin.stamp import STAMP_KEY, Stamp, read_stamp, stamped

MAG = SkipThreshold("mag", 2500)
OFF = Deployment(None, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "wish"),
    [
        (None, None),
        ({}, None),
        ({"kv_transfer_params": {}}, None),
        ({"blasst_mag": 2500}, MAG),
        ({"blasst_mag": "2500"}, MAG),
        ({"blasst_lambda": 0}, SkipThreshold("lambda", 0.0)),
        ({"blasst_lambda": "5e-2"}, SkipThreshold("lambda", 0.05)),
        ({"blasst_scale": 500.0, "other": 1}, SkipThreshold("scale", 500)),
        ({"blasst_scale": "off"}, "off"),
        ({"blasst_mag": " OFF "}, "off"),
    ],
)
def test_arguments(arguments: dict[str, Any] | None, wish: object) -> None:
    assert parse_wish(arguments) == wish


@pytest.mark.parametrize(
    "arguments",
    [
        {"blasst_mag": 0},
        {"blasst_mag": -2500},
        {"blasst_mag": math.inf},
        {"blasst_mag": math.nan},
        {"blasst_mag": "2500mag"},
        {"blasst_mag": ""},
        {"blasst_mag": True},
        {"blasst_mag": None},
        {"blasst_mag": [2500]},
        {"blasst_lambda": 1},
        {"blasst_lambda": -1e-9},
        {"blasst_scale": -1},
        {"blasst_mag": 10**400},
        {"blasst_mag": 2500, "blasst_scale": "off"},
        {"blasst_threshold": 2500},
        {STAMP_KEY: [0.5, 0]},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(AdmissionError, match="give one of blasst_mag, blasst_lambda, blasst_scale"):
        parse_wish(arguments)


@given(st.dictionaries(st.sampled_from(["blasst_mag", "blasst_lambda"]), st.from_type(object)))
def test_no_argument_breaks_admission_otherwise(arguments: dict[str, Any]) -> None:
    with contextlib.suppress(AdmissionError):
        wish = parse_wish(arguments)
        assert wish is None or wish == "off" or isinstance(wish, SkipThreshold)


def test_precedence() -> None:
    settings = Settings(threshold=SkipThreshold("mag", 4500), min_context=100)
    from_env = Deployment.of(DENSE, settings)
    assert decide(None, from_env, 1000) == Stamp(2**-4.5, 0)
    from_file = Deployment.of(DesiredState(3, MAG), settings)
    assert decide(None, from_file, 1000) == Stamp(2**-2.5, 3)
    assert decide(SkipThreshold("lambda", 0.25), from_file, 1000) == Stamp(0.25, 3)
    assert decide("off", from_file, 1000) == Stamp(None, 3)
    switched_off = Deployment.of(DesiredState(4, None), settings)
    assert decide(None, switched_off, 1000) == Stamp(None, 4)


def test_minimum_context_holds_for_all_and_the_file_overrides_it() -> None:
    settings = Settings(min_context=100)
    deployment = Deployment.of(DesiredState(1, MAG), settings)
    assert decide(None, deployment, 99).skip_lambda is None
    assert decide(MAG, deployment, 99).skip_lambda is None
    assert decide(None, deployment, 100).skip_lambda == 2**-2.5
    zero = Deployment.of(DesiredState(2, MAG, min_context=0), settings)
    assert decide(None, zero, 1).skip_lambda == 2**-2.5


def test_scale_follows_the_prompt_and_is_clamped() -> None:
    scale = SkipThreshold("scale", 500)
    assert decide(scale, OFF, 2000).skip_lambda == 0.25
    assert decide(scale, OFF, 400).skip_lambda == LAMBDA_MAX


def test_lambda_zero_votes_and_is_not_dense() -> None:
    assert decide(SkipThreshold("lambda", 0), OFF, 10).skip_lambda == 0.0


def test_a_threshold_that_cannot_take_effect_is_refused() -> None:
    deployment = Deployment(MAG, 0, 1)
    with pytest.raises(AdmissionError, match=r"mag 2500 .* no GPU; set the deployment's"):
        decide(None, deployment, 10, "no GPU")
    with pytest.raises(AdmissionError, match=r"no GPU; send it without"):
        decide(MAG, OFF, 10, "no GPU")
    assert decide("off", deployment, 10, "no GPU") == Stamp(None, 1)
    assert decide(None, OFF, 10, "no GPU") == Stamp(None, 0)


@given(st.none() | st.floats(0, 0.999), st.integers(0, 2**40))
def test_stamp_survives_the_way_to_the_worker(skip_lambda: float | None, generation: int) -> None:
    import msgspec

    shared = {"kv_transfer_params": {"a": 1}}
    sent = stamped(shared, Stamp(skip_lambda, generation))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    assert read_stamp(received) == Stamp(skip_lambda, generation)
    assert shared == {"kv_transfer_params": {"a": 1}}
    assert read_stamp(shared) is None
    assert read_stamp(None) is None


def test_salt_separates_thresholds_and_callers() -> None:
    stamps = [Stamp(None), Stamp(0.0), Stamp(0.25), Stamp(0.5)]
    salts = [salted(salt, s, False) for s in stamps for salt in (None, "tenant")]
    assert len(set(salts)) == len(salts)
    assert salts[:2] == [None, "tenant"]
    assert salted("tenant", Stamp(0.5, 7), False) == salted("tenant", Stamp(0.5, 9), False)
    assert salted("tenant", Stamp(0.5), True) == "tenant"
