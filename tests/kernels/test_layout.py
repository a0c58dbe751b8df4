"""Label classes: bounded, total, and consistent with their edges."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blasst.kernels.exchange import layout
from blasst.kernels.exchange.stats import StatsWriter, read_stats
from blasst.kernels.threshold import mag_to_lambda


@pytest.mark.parametrize(
    ("mag", "name"),
    [
        (999, "mag_lt_1000"),
        (1000, "mag_1000_1499"),
        (1499.9, "mag_1000_1499"),
        (1500, "mag_1500_2499"),
        (2500, "mag_2500_4499"),
        (4500, "mag_4500_6999"),
        (7000, "mag_7000_9999"),
        (9999, "mag_7000_9999"),
        (10000, "mag_ge_10000"),
        (126000, "mag_ge_10000"),
    ],
)
def test_mag_classes(mag: float, name: str) -> None:
    assert layout.lambda_class(mag_to_lambda(mag)) == name


def test_classes_without_a_mag() -> None:
    assert layout.lambda_class(None) == "dense"
    assert layout.lambda_class(0.0) == "lambda_0"


@given(st.floats(2.0**-126, 1.0, exclude_max=True))
def test_every_lambda_has_a_class(skip_lambda: float) -> None:
    assert layout.lambda_class(skip_lambda) in layout.LAMBDA_CLASSES[2:]


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "le_1k"), (1024, "le_1k"), (1025, "le_2k"), (65536, "le_64k"), (1 << 20, "le_1m")],
)
def test_length_classes(tokens: int, name: str) -> None:
    assert layout.length_class(tokens) == name


@given(st.integers(1, 1 << 40))
def test_every_length_has_a_class(tokens: int) -> None:
    name = layout.length_class(tokens)
    assert name in layout.LENGTH_CLASSES
    assert (name == "gt_1m") == (tokens > 1 << 20)


@given(st.floats(0.0, 1e6))
def test_ttft_bucket_bounds_the_value(seconds: float) -> None:
    bounds = (*layout.TTFT_BUCKETS_S, math.inf)
    i = layout.ttft_bucket(seconds)
    assert seconds <= bounds[i]
    assert i == 0 or seconds > bounds[i - 1]


def test_pages_have_room_for_their_fields(tmp_path: Path) -> None:
    for name, fields in (
        (layout.RANK, layout.rank_fields(4, 3)),
        (layout.FRONT, layout.front_fields()),
    ):
        writer = StatsWriter(tmp_path, name, kind=name, labels={}, fields=fields)
        page = read_stats(writer.path)
        assert page.fields == fields
        assert len({f.name for f in fields}) == len(fields)
        writer.close()
