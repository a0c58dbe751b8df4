"""Every mbarrier between two roles: who arrives, who waits, how often, in how many slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from blasst.kernels.blackwell.config import TILES, WARPS, Config
from blasst.kernels.cute.barrier import wait_with
from blasst.kernels.cute.tmem import fence_after_sync, fence_before_sync


@dataclass(frozen=True)
class EdgeSpec:
    """One edge of each tile. arrivals: that complete a phase; slots: phase i uses i % slots.

    A slot is used again only when its last phase was waited for: `why` says who sees to it.
    phases: one a "visit", one an "item" (all visits of the 256 rows), or one for "both".
    """

    name: str
    producer: str
    consumer: str
    arrivals: int
    slots: int
    why: str
    cross_only: bool = False
    phases: str = "visit"
    stays_only: bool = False


EDGES = (
    EdgeSpec("q_full", "keys warp (TMA)", "MMA warp", 1, 1, "once an item", phases="item"),
    EdgeSpec("s_full", "MMA warp (commit)", "softmax", 1, 1, "the next one waits for s_free"),
    EdgeSpec(
        "s_free",
        "softmax",
        "MMA warp; softmax of the other tile, whose P goes there",
        WARPS,
        4,
        "at most 1 ahead: the next s_full is behind a P @ V whose P waited for it",
        True,
    ),
    EdgeSpec("p_full", "softmax", "MMA warp", WARPS, 1, "behind the next s_full or s_free"),
    EdgeSpec(
        "scale", "softmax", "correction", WARPS, 2, "S(i + 2) is behind o_ready of i", phases="both"
    ),
    EdgeSpec("o_ready", "correction", "MMA warp", WARPS, 2, "scale(i + 2) is behind P @ V of i"),
    EdgeSpec("o_full", "MMA warp (commit)", "correction", 1, 1, "the next waits for o_ready"),
    EdgeSpec("o_done", "MMA warp (commit)", "correction", 1, 1, "once an item", phases="item"),
    EdgeSpec(
        "q_free",
        "correction",
        "keys warp; softmax, if the next item has no visit",
        WARPS,
        1,
        "the next o_done is behind queries, a normaliser without visits behind this wait",
        phases="item",
        stays_only=True,
    ),
)


def edge_specs(config: Config) -> tuple[EdgeSpec, ...]:
    """The edges of a build."""
    return tuple(
        e
        for e in EDGES
        if (config.cross_p or not e.cross_only) and (config.grid or not e.stays_only)
    )


def barrier_count(config: Config) -> int:
    """mbarriers of all edges."""
    return sum(TILES * e.slots for e in edge_specs(config))


class Edge(NamedTuple):
    """An edge of one tile on the device. before: phases of earlier items, None without any."""

    barriers: cute.Pointer
    slots: int
    before: Any = None

    def phase(self, visit: Int32) -> Int32:
        return visit if self.before is None else self.before + visit

    def slot(self, visit: Int32) -> Int32:
        return self.phase(visit) % self.slots

    def parity(self, visit: Int32) -> Int32:
        return (self.phase(visit) // self.slots) & 1

    def at(self, visit: Int32) -> cute.Pointer:
        return self.barriers + self.slot(visit)

    def wait(self, visit: Int32) -> None:
        """Consumer: until the visit's phase is complete."""
        cute.arch.mbarrier_wait(self.at(visit), self.parity(visit))
        fence_after_sync()

    def wait_with(self, visit: Int32, value: Float32) -> Float32:
        """wait(), and `value`, which depends on the wait."""
        value = wait_with(self.at(visit), self.parity(visit), value)
        fence_after_sync()
        return value

    def arrive(self, visit: Int32) -> None:
        """Producer: once a warp, after all that its lanes did."""
        fence_before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.at(visit))

    def commit(self, visit: Int32) -> None:
        """MMA warp: arrives when all products issued so far are complete."""
        with cute.arch.elect_one():
            cute.nvgpu.tcgen05.commit(self.at(visit))


@dataclass(frozen=True)
class Edges:
    """All edges of both tiles; init() by one thread, before a fence and a barrier of the block.

    visits, items: of the thread block so far, where it stays; None where it has one item.
    """

    config: Config
    barriers: cute.Pointer
    visits: Any = None
    items: Any = None

    def before(self, phases: str) -> Any:
        if self.items is None:
            return None
        both = self.visits + self.items
        return {"visit": self.visits, "item": self.items, "both": both}[phases]

    def edge(self, name: str, tile: int) -> Edge:
        first = 0
        for spec in edge_specs(self.config):
            if spec.name == name:
                at = self.barriers + first + tile * spec.slots
                return Edge(at, spec.slots, self.before(spec.phases))
            first += TILES * spec.slots
        raise KeyError(name)

    def init(self) -> None:
        for spec in edge_specs(self.config):
            for tile in range(TILES):
                edge = self.edge(spec.name, tile)
                for slot in range(spec.slots):
                    cute.arch.mbarrier_init(edge.barriers + slot, spec.arrivals)
