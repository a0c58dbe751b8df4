"""Units of the threshold: every conversion, exact round trips, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blasst.kernels.threshold import (
    LAMBDA_MAX,
    MAG_MAX,
    SkipThreshold,
    SparsityCurve,
    ThresholdError,
    check_lambda,
    lambda_to_log2,
    lambda_to_mag,
    lambda_to_scale,
    log2_to_lambda,
    mag_to_lambda,
    scale_to_lambda,
)

MAGS = st.floats(1e-6, MAG_MAX)
LAMBDAS = st.floats(2.0**-126, 1.0, exclude_max=True)


@pytest.mark.parametrize(
    ("mag", "skip_lambda"),
    [(1000, 0.5), (2000, 0.25), (14000, 2.0**-14), (2500, 0.1767766952966369), (126000, 2.0**-126)],
)
def test_known_mags(mag: float, skip_lambda: float) -> None:
    assert mag_to_lambda(mag) == skip_lambda
    assert lambda_to_mag(skip_lambda) == mag


@given(st.integers(1, 126_000))
def test_whole_mags_come_back_exactly(mag: int) -> None:
    assert lambda_to_mag(mag_to_lambda(mag)) == mag


@given(MAGS)
def test_mag_to_lambda_and_back(mag: float) -> None:
    back = lambda_to_mag(mag_to_lambda(mag))
    assert math.isclose(back, mag, rel_tol=1e-12, abs_tol=1e-9)


@given(st.integers(1, 125_999))
def test_a_higher_mag_skips_less(mag: int) -> None:
    assert mag_to_lambda(mag + 1) < mag_to_lambda(mag)


@given(LAMBDAS)
def test_log2_round_trip(skip_lambda: float) -> None:
    assert math.isclose(log2_to_lambda(lambda_to_log2(skip_lambda)), skip_lambda, rel_tol=1e-13)


def test_a_scale_just_below_one_is_clamped_too() -> None:
    with pytest.warns(RuntimeWarning, match="clamped"):
        assert scale_to_lambda(9995, 10000) == LAMBDA_MAX


def test_a_negative_zero_is_zero() -> None:
    assert str(SkipThreshold("lambda", -0.0).skip_lambda()) == "0.0"


def test_lambda_zero_never_skips() -> None:
    assert lambda_to_log2(0.0) == -math.inf
    assert log2_to_lambda(-math.inf) == 0.0
    with pytest.raises(ThresholdError, match="has no MAG"):
        lambda_to_mag(0.0)


@given(st.floats(0.0, 100.0), st.integers(128, 1 << 20))
def test_scale_round_trip(scale: float, length: int) -> None:
    skip_lambda = scale_to_lambda(scale, length)
    assert math.isclose(lambda_to_scale(skip_lambda, length), scale, rel_tol=1e-12, abs_tol=1e-300)


def test_scale_is_clamped_with_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="clamped to 0.999"):
        assert scale_to_lambda(5000.0, 4096) == LAMBDA_MAX


@given(st.floats(1e-3, 1e5), st.floats(0.1, 20.0), st.floats(0.0, 1.0, exclude_max=True))
def test_sparsity_curve_round_trip(a: float, b: float, target: float) -> None:
    curve = SparsityCurve(a, b)
    assert math.isclose(curve.target(curve.scale(target)), target, abs_tol=1e-9)


BAD_NUMBERS: list[object] = [math.nan, math.inf, -math.inf, -1.0, True, None, "x", [], 10**400]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 0, MAG_MAX * 1.001, 1e9, 1e-14])
def test_bad_mags(value: object) -> None:
    with pytest.raises(ThresholdError):
        mag_to_lambda(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 1.0, 1.5, -1e-300])
def test_bad_lambdas(value: object) -> None:
    with pytest.raises(ThresholdError):
        check_lambda(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan])
def test_bad_log2(value: float) -> None:
    with pytest.raises(ThresholdError):
        log2_to_lambda(value)


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_bad_scales(value: object) -> None:
    with pytest.raises(ThresholdError):
        scale_to_lambda(value, 4096)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, -1, 1.5, True])
def test_bad_lengths(length: object) -> None:
    with pytest.raises(ThresholdError, match="length"):
        scale_to_lambda(1.0, length)  # type: ignore[arg-type]


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 0), (-1, 1), (math.nan, 1), (1, math.inf)])
def test_bad_curves(a: float, b: float) -> None:
    with pytest.raises(ThresholdError):
        SparsityCurve(a, b)


@pytest.mark.parametrize("target", [-0.1, 1.0, math.nan])
def test_bad_targets(target: float) -> None:
    with pytest.raises(ThresholdError):
        SparsityCurve(1.0, 1.0).scale(target)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1e5), (1e308, 10.0)])
def test_a_curve_too_steep_for_a_number(a: float, b: float) -> None:
    with pytest.raises(ThresholdError, match="finite"):
        SkipThreshold("scale", SparsityCurve(a, b).scale(0.5))


@given(MAGS)
def test_threshold_keeps_what_was_given(mag: float) -> None:
    threshold = SkipThreshold("mag", mag)
    assert (threshold.unit, threshold.value) == ("mag", mag)
    assert threshold.skip_lambda() == mag_to_lambda(mag)


def test_threshold_of_each_unit() -> None:
    assert SkipThreshold("lambda", 0).skip_lambda() == 0.0
    assert SkipThreshold("scale", 512).skip_lambda(65536) == 512 / 65536
    with pytest.raises(ThresholdError, match="together with the prompt's length"):
        SkipThreshold("scale", 512).skip_lambda()
    assert str(SkipThreshold("mag", 2500)) == "mag 2500"


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        ("mag", "2500", 2500.0),
        ("lambda", " 0.05 ", 0.05),
        ("scale", 7, 7.0),
        ("mag", "2.5e3", 2500),
    ],
)
def test_parse(unit: str, value: object, expected: float) -> None:
    assert SkipThreshold.parse(unit, value) == SkipThreshold(unit, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unit", "value", "message"),
    [
        ("mags", 1, "unit 'mags' is unknown; choose one of lambda, mag, scale"),
        ("mag", "many", "mag 'many' is not a number; give one such as 2500"),
        ("mag", "nan", "not finite"),
        ("mag", -3, "outside 0 < MAG"),
        ("mag", 1e9, "outside 0 < MAG"),
        ("lambda", 1, "outside 0 <= lambda < 1"),
        ("lambda", None, "must be a number, not NoneType"),
        ("lambda", True, "must be a number, not bool"),
        ("scale", -1, "is negative"),
        ("scale", "inf", "not finite"),
        ("mag", {"a": 1}, "must be a number, not dict"),
    ],
)
def test_parse_refuses(unit: str, value: object, message: str) -> None:
    with pytest.raises(ThresholdError, match=message):
        SkipThreshold.parse(unit, value)
