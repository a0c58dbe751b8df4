"""Groups of asynchronous jobs that a warp commits and waits for: copies, bulk copies, wgmma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blasst.kernels.verify.operands import DONE, Effect, Mask, Operands

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp


@dataclass
class Groups:
    """closed: groups of jobs in order; open: jobs that the next commit closes."""

    closed: list[list[Any]] = field(default_factory=list)
    open: list[Any] = field(default_factory=list)

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = []

    def jobs(self) -> list[Any]:
        """All of them, in order."""
        return [job for group in (*self.closed, self.open) for job in group]

    def but_last(self, groups: int) -> list[Any]:
        """Jobs of all closed groups but the last ones."""
        end = max(len(self.closed) - groups, 0)
        return [job for group in self.closed[:end] for job in group]

    def forget(self, groups: int) -> None:
        """Drops all closed groups but the last ones."""
        self.closed = self.closed[max(len(self.closed) - groups, 0) :]


def committing(groups: Callable[[Warp], Groups], *modifiers: str) -> Callable[[Operands], Effect]:
    """A commit_group of the warp's groups."""

    def decode(ops: Operands) -> Effect:
        ops.allow(*modifiers)

        def run(block: Block, warp: Warp, mask: Mask) -> int:
            groups(warp).commit()
            return DONE

        return run

    return decode
