"""A warp: registers, and groups of lanes at different addresses that join where they meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.groups import Groups
from blasst.kernels.verify.operands import Mask
from blasst.kernels.verify.registers import LANES, Array, RegisterFile


@dataclass(slots=True)
class Group:
    """Lanes that run together from address `at`; mask None = all. waits: for other groups."""

    at: int
    mask: Mask
    waits: bool = False


@dataclass(eq=False)
class Warp:
    """State of one warp. parked: what it sleeps on; failed: address of its last failed test.

    touched: lanes that used shared memory since the warp met. pending: keys of registers that
    unfinished tcgen05.ld fill, with the load's epoch.
    """

    id: int
    role: str
    file: RegisterFile
    groups: list[Group] = field(default_factory=lambda: [Group(0, None)])
    parked: Any = None
    failed: int = -1
    waiting_for: tuple[int, int] | None = None
    done: bool = False
    steps: int = 0
    clock: Any = None
    tensor_stores: list[Any] = field(default_factory=list)
    bulk: Groups = field(default_factory=Groups)
    copies: Groups = field(default_factory=Groups)
    products: Groups = field(default_factory=Groups)
    pending: dict[int, int] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    dirty: set[int] = field(default_factory=set)
    touched: Array = field(default_factory=lambda: np.zeros(LANES, np.bool_))

    def __post_init__(self) -> None:
        self.banks = self.file.banks

    def touch(self, mask: Mask) -> None:
        """Lanes that access shared memory: until the warp meets, another cannot answer for them."""
        self.touched |= True if mask is None else mask

    def meet(self) -> None:
        """All lanes are in step: bar.warp.sync or a barrier of the block."""
        self.touched[:] = False

    @property
    def name(self) -> str:
        return f"warp {self.id} ({self.role})"

    def current(self) -> Group:
        """The group at the lowest address, joined with those at the same one."""
        groups = self.groups
        if len(groups) == 1:
            return groups[0]
        groups.sort(key=lambda g: g.at)
        i = 0
        while i + 1 < len(groups):
            a, b = groups[i], groups[i + 1]
            if a.at == b.at:
                assert a.mask is not None
                assert b.mask is not None
                groups[i] = Group(a.at, a.mask | b.mask)
                del groups[i + 1]
            else:
                i += 1
        if len(groups) == 1:
            only = groups[0]
            if only.mask is not None and only.mask.all():
                only.mask = None
            return only
        for group in groups:
            if not group.waits:
                return group
        where = ", ".join(str(g.at) for g in groups)
        raise ExecutionError(f"{self.name}: lanes wait for each other at addresses {where}")

    def branch(self, group: Group, taken: Any, target: int, after: int) -> None:
        """Splits the group: lanes of `taken` go to target."""
        mask = np.ones(LANES, np.bool_) if group.mask is None else group.mask
        self.groups.remove(group)
        self.groups.append(Group(after, mask & ~taken))
        self.groups.append(Group(target, mask & taken))

    def leave(self, group: Group, lanes: Mask) -> None:
        """Lanes that have ended; None: the whole group."""
        if lanes is None:
            self.groups.remove(group)
        else:
            mask = np.ones(LANES, np.bool_) if group.mask is None else group.mask
            group.mask = mask & ~lanes
        self.done = not self.groups

    def converged(self, mask: Mask) -> bool:
        """Whether these are all lanes of the warp that have not ended."""
        return mask is None or (len(self.groups) == 1 and bool((mask == self.groups[0].mask).all()))
