"""The eager vote: what orders its marks, and what happens without it. The PTX runs here, under the
race detector of `blasst verify`, which follows mbarriers; racecheck on a card does not."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from blasst.kernels.hopper.launch import config_for
from blasst.kernels.verify.execute import Run
from blasst.kernels.verify.operands import DONE, Operands
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.subjects.attention import Shape

CONFIG = config_for("bfloat16", 128, causal=True, page_size=0, vote=True, count=True)
# Warps of a tile disagree, and there are more votes than slots for marks.
SHAPE = Shape(((128, 1500),), num_heads=1, seed=3)
SEEDS = 6


@functools.cache
def bench() -> Workbench:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return Workbench(hopper.subject(CONFIG))


def of_the_ballot(opcode: str) -> list[Instruction]:
    """Its instructions of the source file of the vote."""
    return [
        ins
        for ins in bench().program.instructions
        if ins.opcode.startswith(opcode) and (ins.source or "").startswith("ballot.py")
    ]


def run_without(ins: Instruction, passes: bool, case: Case) -> Run:
    """A run in which the instruction does nothing; passes: it answers true."""
    step = bench().program.step(ins.index)
    answer = Operands(ins, bench().program.layout, frozenset()).write(0, "pred") if passes else None

    def nothing(block: Any, warp: Any, mask: Any) -> int:
        if answer is not None:
            answer(warp, mask, np.ones(32, np.bool_))
        return DONE

    kept, step.body = step.body, nothing
    try:
        return bench().run(case, seed=0).run
    finally:
        step.body = kept


def test_the_marks_are_ordered_under_every_schedule() -> None:
    case = hopper.case(CONFIG, SHAPE)
    (read,), (write,) = of_the_ballot("ld.shared"), of_the_ballot("st.shared")
    digests = set()
    for seed in range(SEEDS):
        verdict = bench().run(case, seed=seed)
        assert verdict.ok, "\n".join(verdict.describe())
        executed = verdict.run.findings.executed
        # A warp that needs the block writes a mark and reads none; slots are used again.
        assert 0 < executed[read.index] < executed[write.index]
        assert executed[write.index] > 8 * 2 * 2
        digests.add(verdict.digest)
    assert len(digests) == 1


def test_a_wait_that_is_missing_is_a_race_on_the_marks() -> None:
    """And warps that then disagree wait for each other in vain."""
    (wait,) = of_the_ballot("mbarrier.try_wait")
    run = run_without(wait, True, hopper.case(CONFIG, SHAPE))
    races = [str(finding) for finding in run.findings.counts if finding.kind == "race"]
    assert races
    assert any("RAW" in race and "ld.shared" in race for race in races), races
    assert all("ballot.py" in race for race in races), races
    assert run.error is not None
    assert "deadlock" in run.error


def test_an_arrival_that_is_missing_is_a_deadlock() -> None:
    (arrive,) = of_the_ballot("mbarrier.arrive")
    run = run_without(arrive, False, hopper.case(CONFIG, SHAPE))
    assert run.error is not None
    assert "deadlock" in run.error
