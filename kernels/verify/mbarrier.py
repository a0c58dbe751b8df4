"""mbarrier objects with transaction counts, and named barriers with reductions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blasst.kernels.verify.errors import ExecutionError


@dataclass(eq=False)
class Mbarrier:
    """phase: completed phases. sleepers: warps; clock: what waiting for the last phase gives."""

    name: str
    count: int
    pending: int = 0
    transactions: int = 0
    phase: int = 0
    gathered: Any = None
    clock: Any = None
    made: Any = None
    sleepers: list[Any] = field(default_factory=list)
    watchers: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        if self.pending < 0:
            raise ExecutionError(
                f"{self.name} got {-self.pending} arrivals more than its count {self.count}"
            )
        self._complete()

    def expect(self, size: int) -> None:
        self.transactions += size

    def transfer(self, size: int) -> None:
        """Bytes that a copy has brought."""
        self.transactions -= size
        self._complete()

    def passed(self, parity: int) -> bool:
        """try_wait.parity: whether the phase of this parity has completed."""
        return self.phase & 1 != parity & 1

    def _complete(self) -> None:
        if self.pending or self.transactions:
            return
        self.phase += 1
        self.pending = self.count
        if self.gathered is not None:
            self.clock = self.gathered if self.clock is None else self.clock.joined(self.gathered)
            self.gathered = None
        for warp in self.sleepers:
            warp.parked = None
        self.sleepers.clear()
        for warp, phase in self.watchers.items():
            if self.phase - phase > 1:
                raise ExecutionError(
                    f"{warp.name} still waits for phase {phase} of {self.name}, which has "
                    f"completed phase {self.phase - 1}: the parity that it waits for came and went"
                )

    def state(self) -> str:
        return (
            f"{self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals missing, "
            f"{self.transactions} bytes missing)"
        )


@dataclass(eq=False)
class NamedBarrier:
    """One of the block's 16 hardware barriers. results: reduction per generation."""

    number: int
    threads: int = 0
    arrived: int = 0
    generation: int = 0
    gathered: Any = None
    clock: Any = None
    votes: list[int] = field(default_factory=lambda: [0, 0])
    result: tuple[int, int] = (0, 0)
    sleepers: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"named barrier {self.number}"

    def arrive(self, lanes: int, threads: int, true_lanes: int = 0) -> bool:
        """Whether this arrival was the last of its generation."""
        if self.arrived and threads != self.threads:
            raise ExecutionError(
                f"{self.name} is used with {threads} threads while {self.arrived} of "
                f"{self.threads} have arrived"
            )
        if threads % 32 or not 32 <= threads <= 1024:
            raise ExecutionError(f"{self.name}: {threads} threads is not a multiple of 32")
        self.threads = threads
        self.arrived += lanes
        self.votes[0] += true_lanes
        self.votes[1] += lanes
        if self.arrived > threads:
            raise ExecutionError(f"{self.name} got {self.arrived} arrivals, its count is {threads}")
        if self.arrived < threads:
            return False
        self.arrived = 0
        self.generation += 1
        self.result = (self.votes[0], self.votes[1])
        self.votes = [0, 0]
        self.clock, self.gathered = self.gathered, None
        return True

    def state(self) -> str:
        return f"{self.name} ({self.arrived} of {self.threads} threads have arrived)"
