"""One block under the model of time: cycles, a timeline, and what each engine was busy with.

The block executes for real, so its branches are those of the data; only the times are a model.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from blasst.kernels.instruments.timeline import Span, Timeline
from blasst.kernels.verify import steps
from blasst.kernels.verify.block import Block, Setting
from blasst.kernels.verify.costs import MODELS, Cost, Model, cost
from blasst.kernels.verify.errors import DeadlockError, VerifyError
from blasst.kernels.verify.findings import Findings
from blasst.kernels.verify.memory import Memory
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.products import DEPTH, Product
from blasst.kernels.verify.program import BRANCH, EFFECT, SEGMENT, Program, Step
from blasst.kernels.verify.registers import template
from blasst.kernels.verify.schedule import Schedule
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.tensor_effects import Commit, Mma
from blasst.kernels.verify.warp import Warp

CHUNK = 48  # instructions between which another warp may take a pipe
TENSOR_COPIES = ("tcgen05.ld", "tcgen05.st")


@dataclass(frozen=True)
class Chunk:
    """Instructions of one segment. length: cycles if alone; busy: of each pipe; step: its name."""

    length: float
    busy: dict[str, float]
    step: str


@dataclass(frozen=True)
class Timing:
    """cycles: of the block; core_busy: share of them that the tensor core computed."""

    cycles: float
    core_busy: float
    timeline: Timeline


def chunks(program: Program, step: Step) -> list[Chunk]:
    """A segment in pieces. The assembler may reorder it: its length is that of the longest chain
    of dependent instructions, or of the busiest pipe. The pieces share both evenly.
    """
    instructions = program.instructions[step.at : step.end]
    busy: dict[str, float] = defaultdict(float)
    ready: dict[str, float] = {}
    for ins in instructions:
        price = cost(ins)
        targets, *sources = [_registers(o) for o in ins.operands]
        start = max((ready.get(word, 0.0) for group in sources for word in group), default=0.0)
        for word in targets:
            ready[word] = start + price.latency
        for pipe, cycles in _use(price):
            busy[pipe] += cycles
    length = max([*ready.values(), *busy.values()])
    pieces = [instructions[i : i + CHUNK] for i in range(0, len(instructions), CHUNK)]
    share = {pipe: cycles / len(pieces) for pipe, cycles in busy.items()}
    return [Chunk(length / len(pieces), share, steps.of_run(piece)) for piece in pieces]


def _use(price: Cost) -> list[tuple[str, float]]:
    return [] if price.pipe == "none" else [(price.pipe, price.busy), ("issue", 1.0)]


def _registers(operand: str) -> list[str]:
    return [w.strip() for w in operand.strip("{}[]").replace("|", ",").split(",")]


class TimedBlock(Block):
    """A block whose warps and engines act in the order of the model's times."""

    def begin(self, model: Model) -> None:
        self.model = model
        self.now = 0.0
        self.order = itertools.count()
        self.events: list[tuple[float, int, Any]] = []
        self.pipes: dict[tuple[int, str], float] = defaultdict(float)
        self.ready: dict[Warp, dict[int, float]] = {w: {} for w in self.warps}
        self.queued: dict[Warp, list[Chunk]] = {w: [] for w in self.warps}
        self.cached: dict[int, list[Chunk]] = {}
        self.waits: dict[Warp, tuple[float, float]] = {}
        self.spans: dict[Warp, list[tuple[str, float, float]]] = {w: [] for w in self.warps}
        self.core_free = self.copy_free = self.core_busy = 0.0
        self.core_running = False
        self.sleeping: dict[Warp, float] = {}
        self.tensor_done: dict[Warp, float] = dict.fromkeys(self.warps, 0.0)

    def run_timed(self) -> None:
        """To the end of all warps; raises ExecutionError like run()."""
        self.schedule.begin(len(self.warps))
        for warp in self.warps:
            self._at(0.0, warp)
        while self.events:
            self.now, _, actor = heapq.heappop(self.events)
            if isinstance(actor, Warp):
                self._turn(actor)
            else:
                actor.run(self)
                if isinstance(actor, Mma | Commit):
                    self.core_running = False
            self._start_engines()
            self._wake()
        left = [w for w in self.warps if not w.done]
        if left:
            raise DeadlockError(self._stuck(left))
        self._finish()

    def _at(self, time: float, actor: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), actor))

    def _start_engines(self) -> None:
        if self.tensor_queue and not self.core_running:
            job = self.tensor_queue.popleft()
            start = max(self.now, self.core_free)
            length = 0.0
            if isinstance(job, Mma):
                product = Product.decode(job.shape)
                length = product.m * product.n * DEPTH / self.model.fma_per_cycle
                self.core_busy += length
            self.core_free = start + length
            self.core_running = True
            late = self.model.product_latency if isinstance(job, Commit) else 0.0
            # The pipe takes the next product at once; a commit arrives when results are written.
            self._at(self.core_free + late, job)
            if isinstance(job, Commit):
                self.core_running = False
        while self.copies:
            job = self.copies.pop(0)
            size = len(job.target) * job.unit
            start = max(self.now, self.copy_free)
            self.copy_free = start + size / self.model.copy_bytes
            self._at(self.copy_free + self.model.copy_latency, job)

    def _wake(self) -> None:
        """Sleepers whose barrier has completed."""
        for warp in [w for w in self.sleeping if w.parked is None]:
            since = self.sleeping.pop(warp)
            self._wait_ends(warp, since, self.now + self.model.wake)
            self._at(self.now + self.model.wake, warp)

    def _wait_ends(self, warp: Warp, since: float, until: float) -> None:
        """Remembers a wait until the next step gives it a name."""
        began = self.waits.get(warp, (since, until))[0]
        self.waits[warp] = (began, until)

    def _turn(self, warp: Warp) -> None:
        """The next chunk or step of a warp, and when it goes on."""
        if self.queued[warp]:
            self._spend(warp, self.queued[warp].pop(0))
            return
        if warp.done:
            return
        step = self.program.step(warp.current().at)
        start = max([self.now, *(self.ready[warp].pop(r, 0.0) for r in step.reads)])
        if start > self.now:
            self._span(warp, steps.OTHER, self.now, start)
            self.now = start
        if step.kind == SEGMENT:
            if step.at not in self.cached:
                self.cached[step.at] = chunks(self.program, step)
            self.queued[warp] = list(self.cached[step.at])
            self.advance(warp, 1)
            self._spend(warp, self.queued[warp].pop(0))
            return
        ins = self.program.instructions[min(step.at, len(self.program.instructions) - 1)]
        failed = warp.failed
        self.advance(warp, 1)
        self._after_effect(warp, step, ins, failed)

    def _after_effect(self, warp: Warp, step: Step, ins: Instruction, failed: int) -> None:
        price = cost(ins)
        if warp.parked is not None:
            self.sleeping[warp] = self.now
            return
        end = self._occupy(warp, dict(_use(price)), 1.0)
        if ins.opcode.startswith(TENSOR_COPIES):
            self._copy_tensor(warp, step)
        elif ins.opcode.startswith("tcgen05.wait"):
            end = max(end, self.tensor_done[warp])
        elif step.kind == EFFECT and ins.opcode.startswith("ld."):
            for row in step.writes:
                self.ready[warp][row] = self.now + price.latency
        elif step.kind == EFFECT or (step.kind == BRANCH and step.body <= step.at):
            end = max(end, self.now + price.latency)
        if ins.opcode.startswith("mbarrier.try_wait") or warp.failed != failed:
            self._wait_ends(warp, self.now, end)
        else:
            self._span(warp, steps.of_effect(ins), self.now, end)
        self._at(end, warp)

    def _copy_tensor(self, warp: Warp, step: Step) -> None:
        """Between registers and the lanes of the warp's part; the warp itself goes on."""
        columns = max(len(step.reads), len(step.writes))
        done = self._occupy(warp, {"tensor": columns / self.model.tensor_columns}, 1.0)
        self.tensor_done[warp] = done + self.model.tensor_latency
        for row in step.writes:
            self.ready[warp][row] = self.tensor_done[warp]

    def _occupy(self, warp: Warp, busy: dict[str, float], length: float) -> float:
        """Takes pipes of the warp's part of the SM; returns when it is done."""
        part = warp.id % self.model.parts
        end = self.now + length
        for pipe, cycles in busy.items():
            start = max(self.pipes[part, pipe], self.now)
            self.pipes[part, pipe] = start + cycles
            end = max(end, start + cycles)
        return end

    def _spend(self, warp: Warp, chunk: Chunk) -> None:
        end = self._occupy(warp, chunk.busy, chunk.length)
        self._span(warp, chunk.step, self.now, end)
        self._at(end, warp)

    def _span(self, warp: Warp, step: str, start: float, end: float) -> None:
        """Appends to the warp's row; nameless steps lengthen the one before."""
        row = self.spans[warp]
        step = steps.named(step, warp.role)
        if step and warp in self.waits:
            began, until = self.waits.pop(warp)
            row.append((steps.AFTER_WAIT.get(step, steps.WAIT), began, until))
        if row and (not step or row[-1][0] == step) and warp not in self.waits:
            row[-1] = (row[-1][0], row[-1][1], end)
        elif step:
            row.append((step, start, end))


def time_block(
    bench: Workbench,
    case: Case,
    *,
    block: tuple[int, int, int] = (0, 0, 0),
    model: Model | None = None,
) -> Timing:
    """Runs one block of the case under the model of its architecture."""
    case.reset()
    launch = bench.launch(case)
    module = bench.artifact.module
    if module.target not in MODELS:
        raise VerifyError(
            f"there is no model of time for {module.target}, only for {', '.join(MODELS)}"
        )
    setting = Setting(
        bench.program,
        launch,
        Memory(case.buffers, launch.shared_bytes),
        bench.executor.registers(launch.threads // 32),
        template(bench.program.layout, launch.parameters),
        Findings(bench.program.instructions),
    )
    timed = TimedBlock(setting, Schedule(0), block, None)
    timed.begin(model or MODELS[module.target])
    with np.errstate(all="ignore"):
        timed.run_timed()
    lanes = [f"{w.id:2d} {w.role}" for w in timed.warps if timed.spans[w]]
    spans = [
        Span(f"{w.id:2d} {w.role}", step, start, max(start, end))
        for w in timed.warps
        for step, start, end in timed.spans[w]
    ]
    title = f"{bench.subject.name}: {case.name}, block {block}, model of a {timed.model.name}"
    timeline = Timeline(title, "cycles", lanes, spans)
    cycles = timeline.extent[1]
    return Timing(cycles, timed.core_busy / cycles if cycles else 0.0, timeline)
