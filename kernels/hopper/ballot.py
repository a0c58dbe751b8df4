"""Votes of a consumer warpgroup on a block: is there a row that needs it?"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32

from blasst.kernels.cute.vote import any_thread
from blasst.kernels.hopper.config import SLOTS, WARP, WARPGROUP, Config

WARPS = WARPGROUP // WARP


@dataclass(frozen=True)
class Ballot:
    """Of one warpgroup. marks: uint8 [slots, warps]; counts: an mbarrier for each slot.

    A warp is never two votes ahead of another: it waits for values that the other has released.
    """

    config: Config
    group: Int32
    warp: Int32
    marks: cute.Tensor
    counts: cute.Pointer

    @cute.jit
    def together(self, veto: Boolean) -> Boolean:
        """All wait for all: the shortest way for a block that nobody needs."""
        barrier = self.config.group_barrier(self.group)
        # The vote of the warp tells the compiler that the branches on it are uniform.
        return cute.arch.vote_any_sync(any_thread(veto, barrier, WARPGROUP))

    @cute.jit
    def eager(self, kept: Boolean, vote: Int32) -> Boolean:
        """A warp that needs the block goes on at once. kept: of the warp; vote: its number."""
        slot = vote & SLOTS - 1
        with cute.arch.elect_one():
            self.marks[slot, self.warp] = Uint8(Int32(kept))
            cute.arch.mbarrier_arrive(self.counts + slot)
        if not kept:
            cute.arch.mbarrier_wait(self.counts + slot, vote // SLOTS & 1)
            marks = cute.recast_tensor(self.marks, Uint32)[slot, 0]
            cute.arch.sync_warp()
            kept = cute.arch.vote_any_sync(marks != 0)
        return kept


@cute.jit
def make_ballot(
    config: cutlass.Constexpr[Config],
    group: Int32,
    warp: Int32,
    marks: cute.Pointer,
    counts: cute.Pointer,
) -> Ballot:
    """warp: of the warpgroup; marks and counts: of all warpgroups."""
    layout = cute.make_layout((SLOTS, WARPS), stride=(WARPS, 1))
    own = cute.make_tensor(marks + group * SLOTS * WARPS, layout)
    return Ballot(config, group, warp, own, counts + group * SLOTS)


def slots(config: Config) -> int:
    """Of all warpgroups."""
    return config.warpgroups * SLOTS if config.vote else 0


def allocate_ballots(config: Config, smem: Any) -> tuple[cute.Pointer, cute.Pointer]:
    """marks and counts of all Ballots; init_ballots makes them ready."""
    marks = smem.allocate_array(Uint8, slots(config) * WARPS)
    return marks, smem.allocate_array(Int64, slots(config))


def init_ballots(config: Config, counts: cute.Pointer) -> None:
    """By one thread, before a fence and a barrier of the block."""
    for slot in range(slots(config)):
        cute.arch.mbarrier_init(counts + slot, WARPS)
