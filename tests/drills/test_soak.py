"""The soak's arithmetic: what grows is seen, what comes and goes is not."""

from __future__ import annotations

from collections import Counter

import pytest

from blasst.deploy.drills.soak import Sample, _judge, growth
from blasst.deploy.drills.verdict import Result


def samples(mib_per_minute=0.0, files_per_minute=0.0, spikes=False):
    return [
        Sample(
            at_s=5.0 * i,
            mib=50.0 + 20.0 * min(i, 10) / 10 + mib_per_minute * i / 12,
            files=int(14 + files_per_minute * i / 12 + (3 if spikes and i % 7 == 0 else 0)),
        )
        for i in range(180)
    ]


def test_a_warm_up_and_passing_connections_are_no_growth():
    assert growth(samples(spikes=True)) == (0.0, 0)


def test_growth_is_what_was_added_after_the_warm_up():
    mib, files = growth(samples(mib_per_minute=2.0, files_per_minute=1.0))
    assert mib == pytest.approx(2.0 * 10.5, rel=0.05)
    assert files in (10, 11)


@pytest.mark.parametrize(
    ("leak", "words"),
    [({"mib_per_minute": 2.0}, "grew by"), ({"files_per_minute": 0.2}, "descriptors")],
)
def test_a_leak_is_a_fault(leak, words):
    result = Result()
    _judge(result, {"sidecar": samples(**leak), "worker": samples()}, Counter({"/metrics: 200": 9}))
    (fault,) = result.faults
    assert fault.startswith("sidecar")
    assert words in fault


def test_an_answer_of_the_5xx_is_a_fault():
    result = Result()
    _judge(result, {}, Counter({"/metrics: 503": 1}))
    assert result.faults == ["the sidecar answered /metrics: 503 1 times"]
