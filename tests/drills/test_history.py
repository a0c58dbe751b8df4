"""The drills' own judgement: it passes what is right and sees each kind of fault."""

from __future__ import annotations

import dataclasses
import math

import pytest

from blasst.deploy.drills.history import Seen, Write, faults

WRITES = [
    Write(0.1, 1.0, 1.1, 1),
    Write(0.2, 2.0, 2.1, None),
    Write(0.3, 3.0, 3.1, 3),
    Write(0.4, 4.0, 4.1, None),
    Write(None, 5.0, 5.1, 5),
]


def see(at, generation, skip_lambda, observer="file", late_s=0.0):
    return Seen(observer, at, at + 0.01, generation, skip_lambda, late_s)


GOOD = [
    see(0.5, 0, None),
    see(1.05, 1, 0.1),
    see(2.05, 2, 0.2),
    see(3.5, 3, 0.3),
    see(3.5, 3, 0.3, "front 1"),
    see(5.5, 5, None),
    see(6.0, 1, 0.1, "page", math.inf),
]


def test_a_right_history_has_no_fault():
    assert faults(WRITES, GOOD) == []


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (see(3.6, 3, 0.35), "has lambda"),
        (see(3.6, 2, 0.2, "front 1"), "came after"),
        (see(3.6, 2, 0.2, "front 2"), "acknowledged before"),
        (see(1.5, 2, 0.2, "front 2"), "before it was asked for"),
        (see(4.2, 4, 0.2, "front 2"), "never asked for"),
        (see(6.2, 6, 0.9), "never asked for"),
        (see(0.6, 0, 0.1), "has lambda"),
        (see(9.0, 1, 0.1, "page", 5.0), "older than generation 3"),
    ],
)
def test_each_fault_is_seen(pair, words):
    assert any(words in line for line in faults(WRITES, [*GOOD, pair])), faults(
        WRITES, [*GOOD, pair]
    )


def test_the_value_in_force_again_is_the_same_generation():
    again = [*WRITES, Write(0.9, 6.0, 6.1, None), Write(None, 7.0, 7.1, 5)]
    assert faults(again, [*GOOD, see(7.5, 5, None)]) == []
    late = [*again, Write(0.3, 8.0, 8.1, 3)]
    assert any("acknowledged after" in line for line in faults(late, GOOD))


def test_a_generation_that_is_given_out_twice_or_out_of_order_is_seen():
    twice = [*WRITES, Write(0.6, 6.0, 6.1, 5)]
    assert any("given out before" in line for line in faults(twice, []))
    swapped = [dataclasses.replace(WRITES[0], generation=3), WRITES[1]]
    swapped.append(dataclasses.replace(WRITES[2], generation=1))
    assert any("out of order" in line for line in faults(swapped, []))
