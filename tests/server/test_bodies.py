"""Whatever is sent: a threshold within its bounds, or a Problem of the 4xx kind; never a crash."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.server.change import parse_change
from blasst.server.problems import Problem

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["mag", "lambda", "scale", "off", "min_context", "reason", "unit", "value"]
)


def check(body: bytes) -> None:
    try:
        change, threshold = parse_change(body, "application/json")
    except Problem as problem:
        refusal = problem
    else:
        refusal = None
    if refusal is not None:
        assert refusal.status in (400, 422)
        assert refusal.detail
        return
    if threshold is None:
        assert change.off is True
    else:
        assert math.isfinite(threshold.value)
        assert threshold.unit == "scale" or 0 <= threshold.skip_lambda() < 1


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(FIELDS, JSON_VALUES, max_size=4))
def test_any_object(value: dict[str, object]) -> None:
    check(json.dumps(value).encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    check(body)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["mag", "lambda", "scale"]), st.floats() | st.integers())
def test_any_number(field: str, value: float) -> None:
    check(json.dumps({field: value}).encode())
