"""What a time limit leaves out, how it is foreseen, and how it is said."""

from __future__ import annotations

import pytest

from blasst.evals.timebox import Pace, left_out_words


def test_a_length_not_measured_yet_is_foreseen_from_the_nearest() -> None:
    pace = Pace()
    assert pace.predict(2048) is None
    pace.add(2048, 4.0)
    assert pace.predict(2048) == 4.0
    assert pace.predict(4096) == pytest.approx(4.0 * 2**1.5)
    pace.add(4096, 20.0)
    assert pace.predict(8192) == pytest.approx(20.0 * 2**1.5)
    pace.add(2048, 8.0)
    assert pace.predict(2048) == 6.0


def test_one_line_says_what_is_missing() -> None:
    planned = [(task, n) for task in ("a", "b") for n in (1, 2)] * 2
    missing = [("b", 2), ("b", 2), ("a", 1), ("b", 1)]
    assert left_out_words(planned, missing) == (
        "left out: b at 2; 1 sample instead of 2: a at 1, b at 1"
    )
