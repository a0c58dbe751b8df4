"""A ring of shared-memory stages, guarded by full and empty mbarriers; visit i uses i % stages."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from blasst.kernels.cute.barrier import is_complete


@dataclass(frozen=True)
class Ring:
    """barriers: 2 * stages mbarriers, the full ones first. Visits count from 0 on both sides.

    bytes_per_producer: what each of the producer warps announces. before: visits of earlier work,
    None without any.
    """

    barriers: cute.Pointer
    stages: int
    bytes_per_producer: int
    before: Any = None

    def count(self, visit: Int32) -> Int32:
        return visit if self.before is None else self.before + visit

    def init(self, producer_warps: int, consumer_warps: int) -> None:
        """By one thread, before a fence and a barrier of the block."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.barriers + stage, producer_warps)
            cute.arch.mbarrier_init(self.empty(stage), consumer_warps)

    def stage(self, visit: Int32) -> Int32:
        visit = self.count(visit)
        if self.stages & (self.stages - 1):
            return visit % self.stages
        return visit & (self.stages - 1)

    def round(self, visit: Int32) -> Int32:
        """Parity of how often the ring has been gone through; shifts, because visits are signed."""
        visit = self.count(visit)
        if self.stages & (self.stages - 1):
            return visit // self.stages & 1
        return visit >> (self.stages.bit_length() - 1) & 1

    def full(self, visit: Int32) -> cute.Pointer:
        return self.barriers + self.stage(visit)

    def empty(self, visit: Int32) -> cute.Pointer:
        return self.barriers + self.stages + self.stage(visit)

    def acquire(self, visit: Int32) -> cute.Pointer:
        """Producer warp: waits for the empty stage, announces its bytes; returns its barrier."""
        cute.arch.mbarrier_wait(self.empty(visit), self.round(visit) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(visit), self.bytes_per_producer)
        return self.full(visit)

    def wait(self, visit: Int32) -> None:
        """Consumer: until the stage is full."""
        cute.arch.mbarrier_wait(self.full(visit), self.round(visit))

    def arrived(self, visit: Int32) -> Boolean:
        """Consumer: whether the stage is full by now; does not wait."""
        return is_complete(self.full(visit), self.round(visit))

    def release(self, visit: Int32) -> None:
        """Consumer warp: done with the stage, which it has waited for."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty(visit))
