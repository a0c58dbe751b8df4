"""A point of a sweep: dense (None) or a SkipThreshold; its key in results, its name in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable

from blasst.evals.errors import InputError
from blasst.kernels.threshold import SkipThreshold, ThresholdError, lambda_to_mag

Point = SkipThreshold | None
DENSE_KEY = "dense"


def parse_points(mags: Iterable[str], lambdas: Iterable[str], scales: Iterable[str]) -> list[Point]:
    """In the order given, each once. A MAG may be the word dense. Raises InputError."""
    points: list[Point] = []
    for unit, values in (("mag", mags), ("lambda", lambdas), ("scale", scales)):
        for text in values:
            try:
                point = None if text == DENSE_KEY else SkipThreshold.parse(unit, text)
            except ThresholdError as e:
                raise InputError(str(e)) from e
            if point not in points:
                points.append(point)
    return points


def key_of(point: Point) -> str:
    """Stable and exact: `dense`, `mag:2500.0`."""
    return DENSE_KEY if point is None else f"{point.unit}:{point.value!r}"


def point_of(key: str) -> Point:
    """The inverse of key_of. Raises InputError."""
    if key == DENSE_KEY:
        return None
    unit, _, value = key.partition(":")
    try:
        return SkipThreshold.parse(unit, value)
    except ThresholdError as e:
        raise InputError(f"threshold {key!r} in the results: {e}") from e


def lambda_at(point: Point, length: int) -> float | None:
    """lambda of a prompt of `length` tokens; None for dense."""
    return None if point is None else point.skip_lambda(length)


def mag_at(point: Point, length: int) -> float | None:
    """The same as MAG; None for dense and for lambda 0."""
    skip_lambda = lambda_at(point, length)
    return None if not skip_lambda else lambda_to_mag(skip_lambda)


def name_of(point: Point) -> str:
    """For axes and progress lines: dense, MAG 2500, lambda 0.05."""
    if point is None:
        return DENSE_KEY
    unit = "MAG" if point.unit == "mag" else point.unit
    return f"{unit} {point.value:g}"


def order_of(point: Point) -> tuple[float, str]:
    """Sort key: dense first, then from the mildest to the one that skips most."""
    if point is None:
        return (-math.inf, "")
    if point.unit == "scale":
        return (point.value, point.unit)
    skip_lambda = point.skip_lambda()
    return (math.log2(skip_lambda) if skip_lambda else -1e9, point.unit)
