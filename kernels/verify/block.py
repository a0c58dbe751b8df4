"""One thread block: its warps, barriers and asynchronous engines under an adversarial schedule."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from blasst.kernels.verify.errors import DeadlockError, ExecutionError
from blasst.kernels.verify.evidence import Evidence
from blasst.kernels.verify.findings import Findings
from blasst.kernels.verify.launch import Launch
from blasst.kernels.verify.mbarrier import Mbarrier, NamedBarrier
from blasst.kernels.verify.memory import Memory
from blasst.kernels.verify.operands import CONVERGE, DONE, PARKED, RETRY, SPIN, Operands
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.program import BRANCH, EXIT, SEGMENT, Program, Step
from blasst.kernels.verify.races import Races
from blasst.kernels.verify.register_pool import RegisterPool
from blasst.kernels.verify.registers import SHARED_BASE, SPECIALS, Array, RegisterFile
from blasst.kernels.verify.schedule import Schedule
from blasst.kernels.verify.tensor_effects import TensorMemory
from blasst.kernels.verify.warp import Group, Warp

IDLE_ROUNDS = 24
MOST_STEPS = 100_000_000


class Setting(NamedTuple):
    """What all blocks of a launch share. files: registers, one a warp; template: their contents."""

    program: Program
    launch: Launch
    memory: Memory
    files: list[RegisterFile]
    template: dict[int, Array]
    findings: Findings


class Block:
    """State of one block while it runs. cta: its index in the grid; races: its number, or None."""

    def __init__(
        self,
        setting: Setting,
        schedule: Schedule,
        cta: tuple[int, int, int],
        races: tuple[int, Evidence | None] | None,
    ) -> None:
        self.program, self.launch, self.memory = setting.program, setting.launch, setting.memory
        self.findings, self.schedule, self.cta = setting.findings, schedule, cta
        self.tensor = TensorMemory()
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.tensor_queue: deque[Any] = deque()
        self.copies: list[Any] = []
        self.drained: dict[Warp, int] = {}
        self.products = 0
        self.tensor_columns = 0
        self.registers = RegisterPool(self.launch.threads // 32)
        self.memory.clear()
        self.races = None if races is None else Races(self, *races)
        self.warps = [self._warp(i, file, setting.template) for i, file in enumerate(setting.files)]

    def _warp(self, number: int, file: RegisterFile, template: dict[int, Array]) -> Warp:
        file.reset(template)
        for name, row in self.program.layout.specials.items():
            file.arrays[32][row] = SPECIALS[name](self, number)
        warp = Warp(number, self.launch.role(number), file)
        warp.dirty |= self.program.product_rows
        if self.races is not None:
            self.races.enter(warp)
        return warp

    # ---- what instructions use

    def region(self, address: int) -> str:
        """Name of a place in shared memory."""
        return self.launch.region(address - SHARED_BASE)

    def mbarrier(self, ops: Operands, warp: Warp, address: int) -> Mbarrier:
        found = self.mbarriers.get(address)
        if found is None:
            raise ops.error(warp, f"no mbarrier was initialised at {self.region(address)}")
        return found

    @contextlib.contextmanager
    def guard(self, ops: Operands, warp: Warp) -> Iterator[None]:
        """Adds warp, instruction and line to an error."""
        try:
            yield
        except ExecutionError as e:
            raise ops.error(warp, str(e)) from None

    def find(self, what: str, warp: Warp, ins: Instruction) -> None:
        self.findings.add("misuse", what, f"{warp.name} at {ins.where}", ins.index)

    def conflict(self, relation: str, what: str, agent: str, ins: int, other: str, by: int) -> None:
        self.findings.race(relation, what, agent, ins, other, by)

    def meet(
        self,
        ops: Operands,
        warp: Warp,
        number: int,
        active: int,
        threads: int,
        arrives_only: bool,
        true_lanes: int = 0,
        deliver: Callable[[int, int], None] | None = None,
    ) -> int:
        """A warp at a named barrier; deliver(true lanes, lanes): the result of a reduction."""
        barrier = self.named.setdefault(number, NamedBarrier(number))
        if self.races is not None:
            self.races.gather(barrier, self.races.release(warp), ops.ins)
        with self.guard(ops, warp):
            last = barrier.arrive(active, threads, true_lanes)
        if not arrives_only:
            warp.meet()
            barrier.sleepers.append((warp, deliver, ops.ins))
        if last:
            for sleeper, hand, ins in barrier.sleepers:
                sleeper.parked = None
                if self.races is not None:
                    self.races.acquire(sleeper, barrier.clock, ins)
                    if self.races.evidence is not None:
                        self.races.evidence.observed(barrier)
                if hand is not None:
                    hand(*barrier.result)
            barrier.sleepers.clear()
            return DONE
        if arrives_only:
            return DONE
        warp.parked = barrier
        return PARKED

    # ---- scheduling

    def run(self) -> None:
        """To the end of all warps and engines; raises ExecutionError."""
        self.schedule.begin(len(self.warps))
        live = list(self.warps)
        idle = 0
        while live:
            if sum(warp.steps for warp in live) > MOST_STEPS:
                raise ExecutionError(f"no end after {MOST_STEPS} instructions of a block")
            moved = self._engines()
            for warp in self.schedule.random.sample(live, len(live)):
                if warp.parked is None and self.schedule.runs(warp.id):
                    moved |= self.advance(warp, self.schedule.steps())
            live = [w for w in live if not w.done]
            idle = 0 if moved else idle + 1
            if idle > IDLE_ROUNDS and live:
                self._force(live)
                idle = 0
        while self._step_engine():
            pass
        self._finish()

    def _engines(self) -> bool:
        """Random progress of the tensor core, the copies and the warps' products."""
        moved = False
        for _ in range(self.schedule.products(len(self.tensor_queue))):
            self.tensor_queue.popleft().run(self)
            moved = True
        while self.copies and self.schedule.copy_now():
            self.copies.pop(self.schedule.pick(len(self.copies))).run(self)
            moved = True
        for warp in self.warps:
            if warp.products.jobs() and self.schedule.copy_now():
                self._product(warp)
        return moved

    def _product(self, warp: Warp) -> None:
        """The next product of a warp, in order."""
        for job in warp.products.jobs():
            if not job.done:
                job.run(self)
                return

    def _step_engine(self) -> bool:
        if self.tensor_queue:
            self.tensor_queue.popleft().run(self)
        elif self.copies:
            self.copies.pop(0).run(self)
        else:
            return False
        return True

    def _force(self, live: list[Warp]) -> None:
        """Nothing moved at random rates: run everything that can, or it is a deadlock."""
        moved = False
        for warp in live:
            for _ in range(3):
                if warp.parked is None and not warp.done:
                    moved |= self.advance(warp, 64)
        live[:] = [w for w in live if not w.done]
        if not moved and not self._step_engine():
            raise DeadlockError(self._stuck(live))

    def _stuck(self, live: list[Warp]) -> str:
        lines = ["deadlock: no warp can go on and nothing is in flight"]
        for warp in live:
            at = min(group.at for group in warp.groups)
            ins = self.program.instructions[min(at, len(self.program.instructions) - 1)]
            waits = warp.parked.state() if warp.parked is not None else str(ins)[:80]
            lines.append(f"  {warp.name} waits for {waits} at {self._line(warp)}")
        return "\n".join(lines)

    def _line(self, warp: Warp) -> str:
        """Where the warp waits: a failed test lies before the branch that repeats it."""
        at = warp.failed if warp.failed >= 0 else min(group.at for group in warp.groups)
        return self.program.instructions[min(at, len(self.program.instructions) - 1)].where

    def advance(self, warp: Warp, budget: int) -> bool:
        """Runs up to `budget` instructions; whether that was more than a failed test."""
        program, counts = self.program, self.findings.executed
        moved = False
        while budget > 0 and warp.parked is None:
            group = warp.current()
            step = program.step(group.at)
            counts[step.at] += 1
            size = max(step.end - step.at, 1)
            budget -= size
            warp.steps += size
            if step.kind == SEGMENT:
                if warp.pending or warp.in_flight or step.dirties:
                    self._touch(warp, step)
                if group.mask is None:
                    step.body.full(*warp.banks)
                else:
                    step.body.masked(group.mask, *warp.banks)
                group.at = step.end
                moved = True
                continue
            if step.kind == BRANCH:
                self._branch(warp, group, step)
                moved |= warp.failed < 0
                continue
            if step.kind == EXIT:
                moved = True
                if self._exit(warp, group, step):
                    return True
                continue
            outcome = self._effect(warp, group, step)
            if outcome == SPIN:
                return moved
            if outcome == RETRY:
                return moved
            moved = True
        return moved

    def _branch(self, warp: Warp, group: Group, step: Step) -> None:
        if step.guard < 0:
            group.at = step.body
            return
        taken = warp.banks[0][step.guard]
        if step.negated:
            taken = ~taken
        if group.mask is not None:
            taken = taken & group.mask
        count, lanes = int(taken.sum()), 32 if group.mask is None else int(group.mask.sum())
        if count == lanes:
            group.at = step.body
        elif count == 0:
            group.at = step.end
        else:
            warp.branch(group, taken, step.body, step.end)

    def _exit(self, warp: Warp, group: Group, step: Step) -> bool:
        """Whether the warp has ended."""
        if step.guard < 0:
            warp.leave(group, None)
        else:
            leaving = warp.banks[0][step.guard]
            leaving = ~leaving if step.negated else leaving
            leaving = leaving if group.mask is None else leaving & group.mask
            group.at = step.end
            lanes = 32 if group.mask is None else int(group.mask.sum())
            if int(leaving.sum()) == lanes:
                warp.leave(group, None)
            elif leaving.any():
                warp.leave(group, leaving.copy())
        if warp.done and self.races is not None:
            self.races.leave(warp)
        return warp.done

    def _effect(self, warp: Warp, group: Group, step: Step) -> int:
        mask = group.mask
        if step.guard >= 0:
            guard = warp.banks[0][step.guard]
            guard = ~guard if step.negated else guard
            mask = guard.copy() if mask is None else guard & mask
            if not mask.any():
                group.at = step.end
                return DONE
            if mask.all():
                mask = None
        if warp.pending or warp.in_flight:
            self._touch(warp, step)
        outcome: int = step.body(self, warp, mask)
        if outcome == CONVERGE:
            group.waits = True
        elif outcome != RETRY:
            group.at = step.end
            if outcome != SPIN:
                warp.failed = -1
        return outcome

    def _touch(self, warp: Warp, step: Step) -> None:
        """Registers of unfinished loads and products that a step uses."""
        if warp.pending and self.races is not None:
            used = self.races.consumed(warp, step.flow)
            if used and not self.launch.scoreboard:
                ins = self.program.instructions[step.at]
                self.find("a register of tcgen05.ld is used before tcgen05.wait::ld", warp, ins)
        warp.dirty |= step.dirties
        if step.kind == SEGMENT and (step.reads | step.writes) & warp.in_flight:
            ins = self.program.instructions[step.at]
            self.find("a register of an unfinished wgmma is used", warp, ins)

    def _finish(self) -> None:
        """What must hold when all warps have ended."""
        for warp in self.warps:
            if len(warp.bulk.jobs()) > self.drained.get(warp, 0):
                self.findings.add(
                    "misuse",
                    "ends while a bulk store may still read shared memory",
                    warp.name,
                    -1,
                )
        if self.tensor.allocated:
            self.findings.add("misuse", "TMEM is still allocated", "the end of the block", -1)
        for message in self.registers.problems():
            self.findings.add("misuse", message, "the block", -1)
        if self.races is not None:
            for channel in self.races.unfinished():
                self.findings.add("misuse", "is not waited for before the block ends", channel, -1)
