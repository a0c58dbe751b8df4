"""Vector clocks, and who touched which cell of a memory last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.registers import Array

MAX_AGENTS = 192
Cells = Any  # slice or index array


class Clock:
    """seen[agent]: its last event known to have happened; fenced: visible to the async proxy."""

    __slots__ = ("fenced", "seen")

    def __init__(self, seen: Array | None = None, fenced: Array | None = None) -> None:
        self.seen = np.zeros(MAX_AGENTS, np.int32) if seen is None else seen
        self.fenced = np.zeros(MAX_AGENTS, np.int32) if fenced is None else fenced

    def copy(self) -> Clock:
        return Clock(self.seen.copy(), self.fenced.copy())

    def join(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, self.seen)
        np.maximum(self.fenced, other.fenced, self.fenced)

    def joined(self, other: Clock) -> Clock:
        result = self.copy()
        result.join(other)
        return result


@dataclass
class Agents:
    """Sequential actors: warps, and one for each asynchronous channel. now: events of each."""

    names: list[str] = field(default_factory=list)
    index: dict[Any, int] = field(default_factory=dict)
    now: list[int] = field(default_factory=list)

    def get(self, key: Any, name: str) -> int:
        """The agent of this key, created on first use."""
        at = self.index.get(key)
        if at is None:
            at = len(self.names)
            if at == MAX_AGENTS:
                raise VerifyError(f"more than {MAX_AGENTS} concurrent agents; raise MAX_AGENTS")
            self.index[key] = at
            self.names.append(name)
            self.now.append(0)
        return at

    def tick(self, agent: int) -> int:
        self.now[agent] += 1
        return self.now[agent]


@dataclass(frozen=True)
class Access:
    """One access. agent's event number `epoch`; clock: what happened before it.

    kind: "generic" (ordinary instructions), "async" (copies, products) or "tensor".
    ins: index of the instruction.
    """

    agent: int
    epoch: int
    clock: Clock
    write: bool
    kind: str
    ins: int


@dataclass(frozen=True)
class Conflict:
    """relation: RAW, WAR, WAW or PROXY, with the earlier access's agent and instruction."""

    relation: str
    agent: int
    ins: int


class Shadow:
    """History of `cells` equal cells: the last write, and each agent's last read."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.writer = np.zeros(cells, np.int16)
        self.epoch = np.zeros(cells, np.int32)
        self.by = np.full(cells, -1, np.int32)
        self.generic = np.zeros(cells, np.bool_)
        self.reads: dict[int, Array] = {}
        self.reader_ins: dict[int, int] = {}

    def check(self, cells: Cells, access: Access) -> list[Conflict]:
        """What of the history the access is not ordered after."""
        found = []
        writer, epoch = self.writer[cells], self.epoch[cells]
        seen = access.clock.seen
        bad = (epoch > seen[writer]) & (writer != access.agent)
        if bad.any():
            at = int(bad.argmax())
            relation = "WAW" if access.write else "RAW"
            found.append(Conflict(relation, int(writer[at]), int(self.by[cells][at])))
        elif access.kind == "async":
            bad = self.generic[cells] & (epoch > access.clock.fenced[writer])
            if bad.any():
                at = int(bad.argmax())
                found.append(Conflict("PROXY", int(writer[at]), int(self.by[cells][at])))
        if access.write:
            for reader, epochs in self.reads.items():
                if reader != access.agent and int(epochs[cells].max()) > seen[reader]:
                    found.append(Conflict("WAR", reader, self.reader_ins[reader]))
        return found

    def record(self, cells: Cells, access: Access) -> None:
        if access.write:
            self.writer[cells] = access.agent
            self.epoch[cells] = access.epoch
            self.by[cells] = access.ins
            self.generic[cells] = access.kind == "generic"
            return
        epochs = self.reads.get(access.agent)
        if epochs is None:
            epochs = self.reads[access.agent] = np.zeros(self.cells, np.int32)
        epochs[cells] = access.epoch
        self.reader_ins[access.agent] = access.ins
