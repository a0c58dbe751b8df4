"""The eager vote: what orders its marks, and what happens without it. The PTX runs here, under the
race detector of `blasst verify`, which follows mbarriers; racecheck on a card does not."""

from __future__ import annotations

import functools

import pytest

from blasst.kernels.hopper.launch import config_for
from blasst.kernels.verify.mutate import Mutant, candidates, mutants
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


def without(ins: Instruction, case: Case) -> Mutant:
    order = [c.index for c in candidates(bench().program.instructions)]
    (mutant,) = mutants(bench(), [case], chosen=lambda number: number == order.index(ins.index))
    return mutant


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
    (wait,) = of_the_ballot("mbarrier.try_wait")
    caught = without(wait, hopper.case(CONFIG, SHAPE)).caught
    assert "RAW" in caught, caught
    assert "ld.shared" in caught, caught
    assert "ballot.py" in caught, caught


def test_an_arrival_that_is_missing_is_a_deadlock() -> None:
    (arrive,) = of_the_ballot("mbarrier.arrive")
    assert without(arrive, hopper.case(CONFIG, SHAPE)).caught.startswith("deadlock")
