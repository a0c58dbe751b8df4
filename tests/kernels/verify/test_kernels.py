"""Whole kernels: ours for Hopper as calibration, FA4 and FlashInfer unmodified and broken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from blasst.kernels.hopper.config import Config
from blasst.kernels.verify.build import Artifact
from blasst.kernels.verify.coverage import coverage
from blasst.kernels.verify.mutate import Mutant, candidates, mutants
from blasst.kernels.verify.operands import DONE
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.subjects import fa4, flashinfer, hopper
from blasst.kernels.verify.subjects.attention import Shape

VOTING = Config("bfloat16", 128, True, 0, True, True)
PAGED = replace(VOTING, head_dim=64, dtype="float16", page_size=16)
SKIPPING = Shape(((128, 640),), mag=2500, seed=6)
# Warps vote differently, on blocks judged by all rules and on those where the base is settled.
DIFFERING = [Shape(((192, 700),), num_heads=1, mag=2500, seed=seed) for seed in (6, 9)]
LENGTHS = ((200, 333), (70, 70), (0, 9), (1, 1), (5, 0))


def need(reason: str | None) -> None:
    if reason is not None:
        pytest.skip(reason)


@functools.cache
def hopper_bench(config: Config) -> Workbench:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return Workbench(hopper.subject(config))


@functools.cache
def fa4_bench() -> Workbench:
    need(fa4.missing())
    return Workbench(fa4.subject())


@pytest.mark.parametrize("config", [VOTING, PAGED], ids=["ragged", "pages of 16, 64, float16"])
def test_hopper_kernel_equals_the_oracle_under_every_schedule(config: Config) -> None:
    """Outputs, log-sum-exp and skip counts; the same bits whatever the schedule."""
    bench = hopper_bench(config)
    for shape in (Shape(LENGTHS), SKIPPING):
        case = hopper.case(config, shape)
        digests = set()
        for seed in range(3):
            verdict = bench.run(case, seed=seed)
            assert verdict.ok, "\n".join(verdict.describe())
            digests.add(verdict.digest)
        assert len(digests) == 1
    visited, skipped = case.outputs["counters"].sum(0).tolist()
    assert 0 < skipped < visited


def test_hopper_kernel_reaches_its_instructions() -> None:
    bench = hopper_bench(VOTING)
    shapes = [Shape(LENGTHS), SKIPPING, Shape(((230, 700), (64, 64)), num_heads=1)]
    runs = [bench.run(hopper.case(VOTING, shape)).run.findings for shape in shapes]
    covered = coverage(bench.program, runs)
    assert covered.share > 0.97, covered.missed
    assert covered.count("wgmma.mma") > 0
    assert covered.opcodes["ex2.approx.ftz.f32"] > 0


def mutated(bench: Workbench, cases: list[Case], sample: set[int]) -> list[Mutant]:
    return list(mutants(bench, cases, chosen=lambda index: index in sample))


def test_mutants_of_the_hopper_kernel_are_noticed() -> None:
    """Every fourth synchronisation instruction, several tiles and blocks."""
    bench = hopper_bench(VOTING)
    shape = Shape(((200, 500), (64, 64)), num_heads=1)
    cases = [hopper.case(VOTING, s) for s in (shape, *DIFFERING)]
    total = len(candidates(bench.program.instructions))
    found = mutated(bench, cases, set(range(1, total, 4)))
    assert len(found) >= 8
    survivors = [m for m in found if not m.caught]
    assert not [m for m in survivors if "unexplained" in m.why], [str(m) for m in survivors]
    assert len(survivors) <= len(found) // 3, [str(m) for m in survivors]


@pytest.mark.parametrize("seed", range(3))
def test_fa4_is_clean(seed: int) -> None:
    """Two tiles of each of two heads, on one persistent block."""
    verdict = fa4_bench().run(fa4.case(queries=300, keys=400, heads=2), seed=seed)
    assert verdict.ok, "\n".join(verdict.describe())


@pytest.mark.parametrize(
    ("prefix", "barrier", "expected"),
    [
        ("mbarrier.try_wait", "mbar_load_KV", "race"),
        ("tcgen05.wait::st", "", "race"),
        ("fence.proxy", "", "PROXY"),
    ],
)
def test_fa4_with_a_wait_removed_is_flagged(prefix: str, barrier: str, expected: str) -> None:
    """The first instruction of its kind whose loss is noticed says what it was for."""
    bench = fa4_bench()
    case = fa4.case(queries=256, keys=512)
    found = []
    for ins in candidates(bench.program.instructions):
        if not ins.opcode.startswith(prefix):
            continue
        (mutant,) = mutated_one(bench, case, ins.index)
        found.append(str(mutant))
        if mutant.caught and expected in mutant.caught and barrier in mutant.caught:
            return
        if len(found) == 8:
            break
    pytest.fail("\n".join(found))


def mutated_one(bench: Workbench, case: Case, index: int) -> list[Mutant]:
    order = [ins.index for ins in candidates(bench.program.instructions)]
    return mutated(bench, [case], {order.index(index)})


@pytest.fixture
def flashinfer_bench() -> Callable[[bool], Workbench]:
    need(flashinfer.missing())
    return lambda seeded: Workbench(flashinfer.subject(seeded=seeded))


def test_flashinfer_with_cross_stage_p_is_clean(
    flashinfer_bench: Callable[[bool], Workbench],
) -> None:
    bench = flashinfer_bench(True)
    for seed in range(2):
        verdict = bench.run(flashinfer.case(queries=256, keys=512), seed=seed)
        assert verdict.ok, "\n".join(verdict.describe())


def test_flashinfer_without_its_seed_is_flagged(
    flashinfer_bench: Callable[[bool], Workbench],
) -> None:
    bench = flashinfer_bench(False)
    for seed in range(2):
        found = bench.run(flashinfer.case(queries=256, keys=512), seed=seed).describe()
        assert any("WAW: writes TMEM columns [0, 128)" in line for line in found), found


def test_outputs_are_put_back_before_a_run() -> None:
    bench = hopper_bench(VOTING)
    case = hopper.case(VOTING, Shape(((64, 64),), num_heads=1))
    first = bench.run(case).digest
    for step in bench.program.steps:
        if step is not None and step.at < len(bench.program.instructions):
            ins = bench.program.instructions[step.at]
            if ins.opcode.startswith("cp.async.bulk.tensor") and ".global.shared" in ins.opcode:
                kept, step.body = step.body, lambda block, warp, mask: DONE
                verdict = bench.run(case)
                step.body = kept
                assert any(line.startswith("out:") for line in verdict.wrong)
    assert bench.run(case).digest == first


def test_the_artifact_is_of_the_recipe() -> None:
    artifact: Artifact = hopper_bench(VOTING).artifact
    assert artifact.module.target == "sm_90a"
    assert artifact.module.instructions[-1].source is not None
