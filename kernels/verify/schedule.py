"""Which warp and which engine goes on next: a random, reproducible and unfair choice."""

from __future__ import annotations

import random
from dataclasses import dataclass

SPEEDS = (0.02, 0.2, 1.0, 1.0, 1.0)  # share of rounds in which a warp runs: some are very slow
CORE_RATES = (0.05, 0.5, 1.0, 3.0)
COPY_RATES = (0.05, 0.5, 1.0)
MOST_STEPS = 400


@dataclass
class Schedule:
    """Seeded choices of one run. leader: the lane that elect.sync picks."""

    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.leader = self.seed % 32

    def begin(self, warps: int) -> None:
        """New biases for a block."""
        self.speeds = [self.random.choice(SPEEDS) for _ in range(warps)]
        self.core_rate = self.random.choice(CORE_RATES)
        self.copy_rate = self.random.choice(COPY_RATES)

    def products(self, queued: int) -> int:
        """How many of the queued operations the tensor core runs now."""
        if not queued:
            return 0
        return min(queued, int(self.random.expovariate(1 / (4 * self.core_rate))))

    def copy_now(self) -> bool:
        return self.random.random() < self.copy_rate

    def pick(self, count: int) -> int:
        return self.random.randrange(count)

    def runs(self, warp: int) -> bool:
        return self.random.random() < self.speeds[warp]

    def steps(self) -> int:
        return self.random.randint(1, MOST_STEPS)
