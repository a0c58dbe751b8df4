"""Statistics of paired differences: exact McNemar, stratified bootstrap, smallest sample sizes.

Differences are score with a threshold minus dense score of the same sample, -1..1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REPEATS = 20_000
Z95, Z80 = 1.6448536269514722, 0.8416212335729143
"""Quantiles of the normal distribution."""


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class MeanDifference:
    """mean: of the tasks' means. error: its standard error. bounds: 5% and 95% points, so that
    each is a one-sided 95% bound. All as shares (0.01 = one point). pairs: see even_pairs()."""

    mean: float
    error: float
    bounds: Interval
    pairs: int

    @property
    def detectable(self) -> float:
        """The true loss that such a comparison finds with 80% probability or more (one-sided, 5%):
        one of so many more samples that became worse, which scatter too."""
        loss = 0.0
        for _ in range(20):
            loss = 0.5 / self.pairs + (Z95 + Z80) * math.sqrt(self.error**2 + loss / self.pairs)
        return loss


def mcnemar_exact(worse: int, better: int) -> float:
    """Two-sided p that samples which changed are as likely to have become better as worse."""
    changed = worse + better
    tail = sum(math.comb(changed, k) for k in range(min(worse, better) + 1))
    return min(1.0, 2 * tail / 2**changed) if changed else 1.0


def fewest_pairs(margin: float, alpha: float = 0.05) -> int:
    """With fewer pairs, not one worse sample would still not exclude a loss of `margin` (share)."""
    return math.ceil(math.log(alpha) / math.log1p(-margin))


def mean_difference(
    strata: Sequence[Sequence[float]], *, seed: int = 0, repeats: int = REPEATS
) -> MeanDifference:
    """The mean over tasks, each task weighing the same; samples are drawn again within a task.

    The bounds are the wider of the bootstrap's and of a normal interval in which half a sample
    more became worse and half a sample more better (Agresti and Min): where nothing or almost
    nothing changed, a bootstrap alone would see no uncertainty at all. That interval is moved
    outwards by half a sample, as differences come in steps, and by its skew (Johnson's t): rare
    large losses are more often too few in a sample than too many. `strata`: at least one, none
    empty.
    """
    import numpy as np

    if not strata or not all(strata):
        raise ValueError("a mean difference needs at least one sample in every task")
    rng = np.random.default_rng(seed)
    means = np.zeros(repeats)
    second = third = 0.0
    for differences in strata:
        counts = Counter(differences)
        values, times = np.array(list(counts)), np.array(list(counts.values()))
        size = len(differences)
        means += rng.multinomial(size, times / size, repeats) @ values / size
        mean = math.fsum(differences) / size
        second += math.fsum((d - mean) ** 2 for d in differences) / size**2
        third += math.fsum((d - mean) ** 3 for d in differences) / size**3
    count, pairs = len(strata), even_pairs(strata)
    mean = math.fsum(math.fsum(d) / len(d) for d in strata) / count
    low, high = np.quantile(means / count, [0.05, 0.95])
    # One more changed pair, half of it each way: +-1/2 squared twice, over pairs squared.
    padded = math.sqrt(second / count**2 + 1 / pairs**2)
    skew = (1 + 2 * Z95**2) / 6 * third / second / count if second else 0.0
    bounds = Interval(
        max(-1.0, min(float(low), mean - Z95 * padded - 0.5 / pairs + min(0.0, skew))),
        min(1.0, max(float(high), mean + Z95 * padded + 0.5 / pairs + max(0.0, skew))),
    )
    return MeanDifference(mean, padded, bounds, pairs)


def even_pairs(strata: Sequence[Sequence[float]]) -> int:
    """Pairs that as good a comparison would have if every task had as few as the fewest: all
    tasks weigh the same, so a loss may be in the one that was hardly measured."""
    return len(strata) * min(map(len, strata))


def student95(freedom: float) -> float:
    """Student's 95% quantile, by its series in 1 / degrees of freedom; infinite below 2 of them,
    where the series is too small (within 1.5% from there on)."""
    if freedom < 2:
        return math.inf
    z = Z95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def two_sided(differences: Sequence[float], *, seed: int = 0) -> Interval:
    """A 95% interval for one task's mean difference."""
    found = mean_difference([differences], seed=seed)
    factor = 1.959963984540054 / Z95
    return Interval(
        max(-1.0, found.mean + (found.bounds.low - found.mean) * factor),
        min(1.0, found.mean + (found.bounds.high - found.mean) * factor),
    )
