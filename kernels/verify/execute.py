"""Runs all blocks of a launch, one after the other, under one seeded schedule."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from blasst.kernels.verify.block import Block, Setting
from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.evidence import Evidence
from blasst.kernels.verify.findings import Findings
from blasst.kernels.verify.launch import Launch
from blasst.kernels.verify.memory import Memory, Storage
from blasst.kernels.verify.program import Program
from blasst.kernels.verify.registers import RegisterFile, template
from blasst.kernels.verify.schedule import Schedule


@dataclass
class Run:
    """What happened. error: why it ended early; steps: warp instructions; products: MMAs.

    seconds: of wall time. tensor_columns: the most that were allocated.
    """

    findings: Findings
    error: str | None = None
    steps: int = 0
    products: int = 0
    seconds: float = 0.0
    tensor_columns: int = 0
    warp_steps: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return self.error is None and not self.findings.counts

    def describe(self, limit: int = 12) -> list[str]:
        """One line each: the error, then findings with counts."""
        lines = [self.error] if self.error else []
        for finding, count in self.findings.counts.most_common(limit):
            lines.append(f"{finding} ({count} times)")
        left = len(self.findings.counts) - limit
        return [*lines, f"and {left} more findings"] if left > 0 else lines


class Executor:
    """A program with reusable registers. One at a time: its state is not shared."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.files: list[RegisterFile] = []

    def registers(self, warps: int) -> list[RegisterFile]:
        """Of that many warps, made when they are first needed."""
        while len(self.files) < warps:
            self.files.append(RegisterFile(self.program.layout))
        return self.files[:warps]

    def run(
        self,
        launch: Launch,
        buffers: Sequence[Storage],
        *,
        seed: int = 0,
        races: bool = False,
        evidence: Evidence | None = None,
        blocks: Sequence[tuple[int, int, int]] | None = None,
    ) -> Run:
        """Executes the blocks (default: all) in a seeded order; errors end up in the result.

        evidence: filled with what each synchronisation did, when races are looked for.
        """
        findings = Findings(self.program.instructions)
        run = Run(findings)
        started = time.perf_counter()
        setting = Setting(
            self.program,
            launch,
            Memory(list(buffers), launch.shared_bytes),
            self.registers(launch.threads // 32),
            template(self.program.layout, launch.parameters),
            findings,
        )
        for buffer in buffers:
            buffer.shadow = None
        schedule = Schedule(seed)
        order = list(launch.blocks if blocks is None else blocks)
        schedule.random.shuffle(order)
        with np.errstate(all="ignore"):
            for number, cta in enumerate(order):
                block = Block(setting, schedule, cta, (number, evidence) if races else None)
                try:
                    block.run()
                except ExecutionError as e:
                    run.error = f"block {cta}: {e}"
                run.products += block.products
                run.tensor_columns = max(run.tensor_columns, block.tensor_columns)
                for warp in block.warps:
                    run.steps += warp.steps
                    steps = run.warp_steps.get(warp.name, 0)
                    run.warp_steps[warp.name] = steps + warp.steps
                if run.error:
                    break
        run.seconds = time.perf_counter() - started
        return run
