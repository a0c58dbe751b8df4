"""Happens-before race detection on shared, tensor and global memory.

An access is a race unless it is ordered, by the synchronisation that was executed, after every
conflicting one: it is found whatever the schedule, as long as both accesses are executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blasst.kernels.verify.clocks import Access, Agents, Clock, Conflict, Shadow
from blasst.kernels.verify.evidence import Evidence
from blasst.kernels.verify.mbarrier import Mbarrier
from blasst.kernels.verify.memory import Storage
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.segments import Flow

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

COLUMNS = 512
QUADRANTS = 4
WORD = 4


class GlobalShadow:
    """One buffer over several blocks, which nothing orders. writer, reader: number of the block."""

    def __init__(self, words: int) -> None:
        self.writer = np.full(words, -1, np.int32)
        self.reader = np.full(words, -1, np.int32)
        self.atomic = np.zeros(words, np.bool_)
        self.inside: Shadow | None = None
        self.block = -1


class Races:
    """Clocks and shadows of one block. number: counts blocks over a whole launch."""

    def __init__(self, block: Block, number: int, evidence: Evidence | None = None) -> None:
        self.block = block
        self.evidence = evidence
        self.number = number
        self.agents = Agents()
        self.shared = Shadow(len(block.memory.shared.data) // WORD)
        self.bytes: Shadow | None = None
        self.tensor = Shadow(QUADRANTS * COLUMNS)
        self.core = self.agents.get("core", "the tensor core")
        self.core_clock = Clock()
        self.end = Clock()
        self.last_product = 0
        self.last: dict[int, Instruction] = {}

    def enter(self, warp: Warp) -> None:
        """A new warp: its clock starts."""
        agent = self.agents.get(warp.id, warp.name)
        warp.clock = Clock()
        warp.clock.seen[agent] = self.agents.tick(agent)

    def leave(self, warp: Warp) -> None:
        self.end.join(warp.clock)

    # ---- synchronisation

    def stamp(self, warp: Warp) -> tuple[int, int]:
        """(agent, event) of now; what follows is a later event."""
        agent = self.agents.index[warp.id]
        at = self.agents.now[agent]
        warp.clock.seen[agent] = self.agents.tick(agent)
        return agent, at

    def issue(self, warp: Warp) -> Clock:
        """release() for an asynchronous operation, which touches memory on the warp's behalf."""
        if self.evidence is not None:
            self.evidence.accessed(warp)
        return self.release(warp)

    def release(self, warp: Warp) -> Clock:
        """What whoever acquires it knows of this warp."""
        clock: Clock = warp.clock.copy()
        agent = self.agents.index[warp.id]
        warp.clock.seen[agent] = self.agents.tick(agent)
        return clock

    def acquire(
        self, warp: Warp, clock: Clock | None, ins: Instruction | None = None, initial: bool = False
    ) -> None:
        """ins: the wait; initial: it passed because no phase had completed yet."""
        if self.evidence is not None and ins is not None:
            self.evidence.learned(warp, ins.index, clock, initial)
        if clock is not None:
            warp.clock.join(clock)

    def gather(self, barrier: Any, clock: Clock, ins: Instruction | None = None) -> None:
        """An arrival at an mbarrier or named barrier."""
        if self.evidence is not None and ins is not None:
            self.evidence.arrived(barrier, ins.index)
        barrier.gathered = clock if barrier.gathered is None else barrier.gathered.joined(clock)

    def fence(self, warp: Warp, ins: Instruction) -> None:
        if self.evidence is not None:
            known = Clock(warp.clock.seen, warp.clock.seen)
            self.evidence.learned(warp, ins.index, known)
        np.maximum(warp.clock.fenced, warp.clock.seen, warp.clock.fenced)
        agent = self.agents.index[warp.id]
        warp.clock.seen[agent] = self.agents.tick(agent)

    def use_barrier(
        self, warp: Warp, barrier: Mbarrier, ins: Instruction, asynchronous: bool = False
    ) -> None:
        """A barrier may be used by those who know that it was initialised."""
        agent, at = barrier.made
        known = warp.clock.fenced if asynchronous else warp.clock.seen
        if known[agent] < at:
            how = " and a fence" if asynchronous else ""
            self.block.find(
                f"{barrier.name} is used without an order{how} after its initialisation", warp, ins
            )

    # ---- accesses

    def _report(self, found: list[Conflict], access: Access, what: str) -> None:
        for conflict in found:
            self.block.conflict(
                conflict.relation,
                what,
                self.agents.names[access.agent],
                access.ins,
                self.agents.names[conflict.agent],
                conflict.ins,
            )

    def _shared(self, addresses: Array, size: int, access: Access) -> None:
        base = self.block.memory.shared.base
        at = addresses - base
        what = self.block.region(int(addresses[0]))
        if size < WORD or self.bytes is not None:
            self._shared_bytes(at, size, access, what)
        if size < WORD:
            self._report(self.shared.check(at // WORD, access), access, what)
            return
        words = _words(at, size)
        self._report(self.shared.check(words, access), access, what)
        self.shared.record(words, access)

    def _shared_bytes(self, at: Array, size: int, access: Access, what: str) -> None:
        """Accesses of less than a word, byte by byte; words are compared with them too."""
        if self.bytes is None:
            self.bytes = Shadow(self.shared.cells * WORD)
        cells = (at[:, None] + np.arange(size)).reshape(-1)
        self._report(self.bytes.check(cells, access), access, what)
        if size < WORD:
            self.bytes.record(cells, access)

    def generic(
        self, warp: Warp, storage: Storage, at: Array, size: int, write: bool, ins: Instruction
    ) -> None:
        """A load or store; at: addresses of `size` bytes each."""
        if self.evidence is not None:
            self.evidence.accessed(warp)
        agent = self.agents.index[warp.id]
        access = Access(agent, self.agents.now[agent], warp.clock, write, "generic", ins.index)
        if storage is self.block.memory.shared:
            self._shared(np.asarray(at).reshape(-1), size, access)
        elif storage.writable:
            self._global(storage, _words(at - storage.base, size), access, False)

    def atomic(self, warp: Warp, storage: Storage, at: Array, size: int, ins: Instruction) -> None:
        if self.evidence is not None:
            self.evidence.accessed(warp)
        agent = self.agents.index[warp.id]
        access = Access(agent, self.agents.now[agent], warp.clock, True, "generic", ins.index)
        if storage is self.block.memory.shared:
            self._shared(at, size, access)
        else:
            self._global(storage, _words(at - storage.base, size), access, True)

    def _global(self, storage: Storage, words: Array, access: Access, atomic: bool) -> None:
        shadow = storage.shadow
        if shadow is None:
            shadow = storage.shadow = GlobalShadow(len(storage.data) // WORD + 1)
        if shadow.block != self.number or shadow.inside is None:
            shadow.block, shadow.inside = self.number, Shadow(len(shadow.writer))
        self._other_blocks(storage, shadow, words, access, atomic)
        if not atomic:
            plain = words[~shadow.atomic[words]]
            if len(plain):
                found = shadow.inside.check(plain, access)
                self._report(found, access, f"global memory {storage.name}")
            shadow.inside.record(words, access)
        if access.write:
            shadow.writer[words] = self.number
            shadow.atomic[words] = atomic
        else:
            shadow.reader[words] = self.number

    def _other_blocks(
        self, storage: Storage, shadow: GlobalShadow, words: Array, access: Access, atomic: bool
    ) -> None:
        writer = shadow.writer[words]
        bad = (writer >= 0) & (writer != self.number) & ~(shadow.atomic[words] & atomic)
        if access.write and not atomic:
            reader = shadow.reader[words]
            bad |= (reader >= 0) & (reader != self.number)
        if bad.any():
            self.block.conflict(
                "WAW" if access.write else "RAW",
                f"global memory {storage.name}",
                self.agents.names[access.agent],
                access.ins,
                f"block number {int(writer[bad][0])}",
                -1,
            )

    # ---- copies

    def _channel(self, kind: str, key: Any, name: str, ins: Instruction, clock: Clock,
                 write: bool) -> Access:  # fmt: skip
        agent = self.agents.get((kind, key), name)
        self.last[agent] = ins
        return Access(agent, self.agents.tick(agent), clock, write, "async", ins.index)

    def bulk_load(self, job: Any, barrier: Mbarrier) -> None:
        access = self._channel(
            "load", barrier, f"TMA load to {barrier.name}", job.ins, job.clock, True
        )
        self._shared(_units(job.target, job.unit), WORD, access)
        done = job.clock.copy()
        done.seen[access.agent] = access.epoch
        self.gather(barrier, done)

    def bulk_store(self, job: Any) -> None:
        access = self._channel(
            "store", job.warp, f"bulk store of {job.warp.name}", job.ins, job.clock, False
        )
        self._shared(_units(job.source, job.unit), WORD, access)
        job.epoch = access.epoch

    def bulk_global(self, job: Any, storage: Storage, at: Array, write: bool) -> None:
        if not storage.writable:
            return
        access = self._channel(
            "global", job.warp, f"bulk copy of {job.warp.name}", job.ins, job.clock, write
        )
        words = np.unique((at - storage.base) // WORD)
        self._global(storage, words, access, getattr(job, "reduction", None) is not None)
        job.global_epoch = access.epoch

    def joined_bulk(self, warp: Warp, job: Any, reads_only: bool) -> None:
        self._join(warp, ("store", job.warp), job.epoch)
        if not reads_only and hasattr(job, "global_epoch"):
            self._join(warp, ("global", job.warp), job.global_epoch)

    def lane_copy(self, job: Any) -> None:
        access = self._channel(
            "cp.async", job.warp, f"cp.async of {job.warp.name}", job.ins, job.clock, True
        )
        self._shared(job.target, job.unit, access)
        job.epoch = access.epoch

    def joined_copy(self, warp: Warp, job: Any) -> None:
        self._join(warp, ("cp.async", job.warp), job.epoch)

    def _join(self, warp: Warp, key: Any, epoch: int) -> None:
        agent = self.agents.index[key]
        warp.clock.seen[agent] = max(int(warp.clock.seen[agent]), epoch)

    # ---- products and tensor memory

    def warp_product(self, job: Any, tiles: list[Any]) -> None:
        access = self._channel(
            "wgmma", job.warp, f"wgmma of {job.warp.name}", job.ins, job.clock, False
        )
        for tile in tiles:
            self._shared(tile.words, WORD, access)
        job.epoch = access.epoch

    def joined_product(self, warp: Warp, job: Any) -> None:
        self._join(warp, ("wgmma", warp), job.epoch)

    def _core(self, job: Any) -> None:
        self.core_clock.join(job.clock)
        self.core_clock.seen[self.core] = self.agents.tick(self.core)
        self.last[self.core] = job.ins

    def mma(self, job: Any, columns: int, a: Any, b: Any) -> None:
        self._core(job)
        now = self.last_product = self.agents.now[self.core]
        read = Access(self.core, now, self.core_clock, False, "async", job.ins.index)
        self._shared(b.words, WORD, read)
        if a is not None:
            self._shared(a.words, WORD, read)
        else:
            self._tensor(range(QUADRANTS), job.a, 8, read)
        write = Access(self.core, now, self.core_clock, True, "tensor", job.ins.index)
        self._tensor(range(QUADRANTS), job.d, columns, write)

    def commit(self, job: Any, barrier: Mbarrier) -> None:
        self._core(job)
        self.gather(barrier, self.core_clock.copy(), job.ins)

    def _tensor(self, quadrants: Any, column: int, count: int, access: Access) -> None:
        rows = np.asarray(list(quadrants))[:, None] * COLUMNS
        cells = (rows + np.arange(column, column + count)).reshape(-1)
        found = self.tensor.check(cells, access)
        if found:
            self._report(found, access, f"TMEM columns [{column}, {column + count})")
        self.tensor.record(cells, access)

    def tensor_load(
        self, warp: Warp, column: int, count: int, rows: list[int], ins: Instruction
    ) -> None:
        if self.evidence is not None:
            self.evidence.accessed(warp)
        agent = self.agents.get(("ld", warp.id), f"tcgen05.ld of {warp.name}")
        epoch = self.agents.tick(agent)
        access = Access(agent, epoch, warp.clock, False, "tensor", ins.index)
        self._tensor((warp.id % QUADRANTS,), column, count, access)
        warp.pending.update(dict.fromkeys(rows, epoch))

    def tensor_store(self, warp: Warp, column: int, count: int, ins: Instruction) -> None:
        if self.evidence is not None:
            self.evidence.accessed(warp)
        agent = self.agents.get(("st", warp.id), f"tcgen05.st of {warp.name}")
        access = Access(agent, self.agents.tick(agent), warp.clock, True, "tensor", ins.index)
        self._tensor((warp.id % QUADRANTS,), column, count, access)

    def tensor_wait(self, warp: Warp, stores: bool, ins: Instruction) -> None:
        agent = self.agents.index.get(("st" if stores else "ld", warp.id))
        if self.evidence is not None:
            done = warp.clock.copy()
            if agent is not None:
                done.seen[agent] = self.agents.now[agent]
            self.evidence.learned(warp, ins.index, done)
        if agent is not None:
            warp.clock.seen[agent] = self.agents.now[agent]
        if not stores:
            warp.pending.clear()

    def consumed(self, warp: Warp, flow: Sequence[Flow]) -> bool:
        """A use of registers: the loads that fill them, and earlier ones, have finished.

        A copy is no use: what it makes is not there before the load has finished either. Returns
        whether registers of a load were used that nobody has waited for.
        """
        used = False
        for sources, target, copy, fresh in flow:
            hits = [warp.pending[source] for source in sources if source in warp.pending]
            if hits and copy:
                warp.pending[target] = max(hits)
                continue
            if hits:
                used = True
                latest = max(hits)
                agent = self.agents.index["ld", warp.id]
                warp.clock.seen[agent] = max(int(warp.clock.seen[agent]), latest)
                warp.pending = {r: e for r, e in warp.pending.items() if e > latest}
            if fresh:
                warp.pending.pop(target, None)
        return used

    def tensor_free(self, warp: Warp, column: int, count: int, ins: Instruction) -> None:
        agent = self.agents.index[warp.id]
        access = Access(agent, self.agents.now[agent], warp.clock, True, "tensor", ins.index)
        self._tensor(range(QUADRANTS), column, count, access)

    def unfinished(self) -> list[str]:
        """Channels whose last event no warp has waited for by the end of the block."""
        left = []
        for key, agent in self.agents.index.items():
            channel = key[0] if isinstance(key, tuple) else key
            if channel in ("global", "ld") or isinstance(channel, int):
                continue
            # An arrival of the tensor core may stay unobserved, its products may not.
            latest = self.last_product if agent == self.core else self.agents.now[agent]
            if latest > self.end.seen[agent]:
                last = self.last.get(agent)
                where = f" ({last.opcode} at {last.where})" if last is not None else ""
                left.append(self.agents.names[agent] + where)
        return left


def _words(at: Array, size: int) -> Array:
    """Indices of the words that accesses of `size` bytes at these offsets touch."""
    words = np.asarray(at, np.int64).reshape(-1) // WORD
    return words if size <= WORD else (words[:, None] + np.arange(size // WORD)).reshape(-1)


def _units(at: Array, unit: int) -> Array:
    """Word addresses of a copy's elements, each word once."""
    if unit >= WORD:
        return np.asarray(at[:, None] + np.arange(0, unit, WORD)).reshape(-1)
    return np.asarray(at[:: WORD // unit] & ~(WORD - 1))
