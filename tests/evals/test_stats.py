"""Statistics against published values and against simulated experiments whose truth is known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from blasst.evals.stats import (
    even_pairs,
    fewest_pairs,
    mcnemar_exact,
    mean_difference,
    student95,
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


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 2.920), (3, 2.353), (4, 2.132), (9, 1.833), (30, 1.697)]
)
def test_students_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student95(freedom) == pytest.approx(quantile, rel=0.013)
    assert student95(1.9) == math.inf


def test_fewest_pairs_is_where_no_change_begins_to_mean_something() -> None:
    assert fewest_pairs(0.01) == 299
    assert 0.99**299 <= 0.05 < 0.99**298
    assert fewest_pairs(0.05) == 59


def test_a_mean_difference_by_hand() -> None:
    strata = [[-1.0] * 10 + [0.0] * 90, [1.0] * 5 + [0.0] * 45]
    found = mean_difference(strata)
    assert found.mean == pytest.approx(0.0)
    # 0.1 0.9 / 100 and 0.1 0.9 / 50, over two tasks; and one changed pair more, of 100: as many as
    # there would be, had both tasks the 50 of one
    expected = ((0.09 / 100 + 0.09 / 50) / 4 + 1 / 100**2) ** 0.5
    assert found.error == pytest.approx(expected)
    # half a pair; and skew: third moments -0.1 0.9 0.8 / 100^2 and 0.1 0.9 0.8 / 50^2
    skew = (1 + 2 * 1.645**2) / 6 * (0.072 / 50**2 - 0.072 / 100**2) / 2 / (0.09 / 100 + 0.09 / 50)
    assert found.bounds.high == pytest.approx(1.645 * expected + 0.005 + skew, rel=1e-3)
    assert found.bounds.low == pytest.approx(-1.645 * expected - 0.005, rel=1e-3)
    loss = found.detectable
    assert loss == pytest.approx(0.005 + 2.4865 * (expected**2 + loss / 100) ** 0.5, rel=1e-3)
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
    assert interval.low == pytest.approx(-0.0196 - 0.5 * 0.0119, abs=1e-3)
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


@pytest.mark.parametrize("pairs", [299, 340, 436, 474, 520, 640, 1040, 1300, 6500])
def test_a_loss_of_the_margin_passes_exactly_as_often_as_said(pairs: int) -> None:
    """Rare losses only, and their binomial distribution: at most 5%, at every size."""
    most = -1
    while 1 + most < pairs / 100:
        worse = [-1.0] * (most + 1) + [0.0] * (pairs - most - 1)
        if mean_difference([worse], repeats=2000).bounds.low <= -0.01:
            break
        most += 1
    ways = (math.comb(pairs, k) * 0.01**k * 0.99 ** (pairs - k) for k in range(most + 1))
    assert sum(ways) <= 0.05
    assert (most >= 0) == (pairs >= 299)


def test_a_loss_of_the_margin_is_rarely_called_a_larger_one() -> None:
    """Many lose a tenth, few gain it back: the few are easily missed. 5% of 800 runs, +-1.5%."""
    rng = np.random.default_rng(5)
    called = 0
    for run in range(800):
        changes = rng.choice([-0.1, 1.0, 0.0], 338, p=[0.2, 0.01, 0.79])
        strata = [task.tolist() for task in np.array_split(changes, 13)]
        called += mean_difference(strata, seed=run, repeats=500).bounds.high < -0.01
    assert called / 800 <= 0.065


def test_the_detectable_loss_is_detected() -> None:
    """80% of 400 runs, whose noise is +-4%, and not nearly all."""
    rng = np.random.default_rng(3)
    loss = mean_difference([[-1.0] * 12 + [1.0] * 12 + [0.0] * 366]).detectable
    found = 0
    for run in range(400):
        changes = rng.choice([-1.0, 1.0, 0.0], 390, p=[0.03 + loss, 0.03, 0.94 - loss])
        strata = [task.tolist() for task in np.array_split(changes, 13)]
        found += mean_difference(strata, seed=run, repeats=500).bounds.high < 0
    assert 0.77 < found / 400 < 0.95


def test_the_task_with_the_fewest_pairs_says_how_much_is_known() -> None:
    """A loss of 13 points in one task of 13 is one point of the mean; 8 of its samples miss it."""
    strata = [[0.0] * 8, *([0.0] * 100 for _ in range(12))]
    assert 0.87**8 > 0.3
    assert even_pairs(strata) == 104 < fewest_pairs(0.01)
    assert mean_difference(strata).bounds.low < -0.02


def test_a_harmless_threshold_passes_with_enough_samples() -> None:
    rng = random.Random(3)
    strata = [rng.choices([-1.0, 1.0, 0.0], [0.01, 0.01, 0.98], k=500) for _ in range(13)]
    found = mean_difference(strata)
    assert found.bounds.low > -0.01
    assert found.detectable < 0.01
