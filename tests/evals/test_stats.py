"""Statistics against published values and against simulated experiments whose truth is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from blasst.evals.stats import (
    fewest_pairs,
    mcnemar_exact,
    mean_difference,
    two_sided,
)


@pytest.mark.parametrize(
    ("worse", "better", "p"),
    [
        (0, 0, 1.0),
        (0, 5, 0.0625),
        (0, 6, 0.03125),
        (1, 9, 0.021484375),  # 2 (1 + 10) / 1024
        (3, 3, 1.0),
        (6, 4, 0.75390625),  # sign test tables: n = 10, k = 4
    ],
)
def test_exact_mcnemar(worse: int, better: int, p: float) -> None:
    assert mcnemar_exact(worse, better) == pytest.approx(p, rel=1e-12)
    assert mcnemar_exact(better, worse) == mcnemar_exact(worse, better)


def test_fewest_pairs_is_where_no_change_begins_to_mean_something() -> None:
    assert fewest_pairs(0.01) == 299
    assert 0.99**299 <= 0.05 < 0.99**298
    assert fewest_pairs(0.05) == 59


def test_a_mean_difference_by_hand() -> None:
    strata = [[-1.0] * 10 + [0.0] * 90, [1.0] * 5 + [0.0] * 45]
    found = mean_difference(strata)
    assert found.mean == pytest.approx(0.0)
    # 0.1 0.9 / 100 and 0.1 0.9 / 50, over two tasks; and one changed pair of 150 more
    expected = ((0.09 / 100 + 0.09 / 50) / 4 + 1 / 150**2) ** 0.5
    assert found.error == pytest.approx(expected)
    assert found.bounds.high == pytest.approx(1.645 * expected, rel=0.06)
    assert found.bounds.low == pytest.approx(-1.645 * expected, rel=0.06)
    assert found.detectable == pytest.approx(2.4865 * expected, rel=1e-4)
    assert mean_difference(strata) == found


def test_each_task_weighs_the_same_and_both_ways_are_alike() -> None:
    strata = [[1.0] * 10, [0.0] * 990]
    assert mean_difference(strata).mean == pytest.approx(0.5)
    turned = [[-d for d in task] for task in strata]
    a, b = mean_difference(strata), mean_difference(turned)
    assert b.mean == -a.mean
    assert b.bounds.low == pytest.approx(-a.bounds.high, abs=0.003)


def test_no_change_at_all_is_not_certainty() -> None:
    few, many = mean_difference([[0.0] * 20]), mean_difference([[0.0] * 1300])
    assert few.bounds.low < -0.05
    assert -0.01 < many.bounds.low < 0
    interval = two_sided([0.0] * 100)
    assert interval.low == pytest.approx(-0.0196, abs=1e-3)
    with pytest.raises(ValueError, match="at least one sample"):
        mean_difference([[0.0], []])


@pytest.mark.parametrize(("pairs", "helps"), [(300, 0.0), (1300, 0.0), (1300, 0.02)])
def test_a_true_loss_of_the_margin_rarely_passes(pairs: int, helps: float) -> None:
    """One-sided 5%: with 13 tasks and a loss of exactly one point, GO in about 5% of 400 runs;
    the noise of 400 runs at 5% is +-2.1%."""
    rng = np.random.default_rng(7)
    passed = 0
    for run in range(400):
        changes = rng.choice([-1.0, 1.0, 0.0], pairs, p=[0.01 + helps, helps, 0.99 - 2 * helps])
        strata = [task.tolist() for task in np.array_split(changes, 13)]
        passed += mean_difference(strata, seed=run, repeats=2000).bounds.low > -0.01
    assert passed / 400 <= 0.08


def test_a_harmless_threshold_passes_with_enough_samples() -> None:
    rng = random.Random(3)
    strata = [rng.choices([-1.0, 1.0, 0.0], [0.01, 0.01, 0.98], k=500) for _ in range(13)]
    found = mean_difference(strata)
    assert found.bounds.low > -0.01
    assert found.detectable < 0.01
