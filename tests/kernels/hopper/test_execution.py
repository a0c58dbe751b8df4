"""What `test_prefill.py` asks of a card, asked of the kernel's PTX executed here: lengths, launches
in a row, a lambda changed in place, and faults planted in its synchronisation."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from blasst.kernels.hopper.config import Config
from blasst.kernels.hopper.launch import config_for
from blasst.kernels.reference import reference_attention
from blasst.kernels.types import AttentionSpec, Geometry, RaggedKV
from blasst.kernels.verify.mutate import Mutant, candidates, mutants
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.subjects.attention import Shape

VOTING = config_for("bfloat16", 128, causal=True, page_size=0, vote=True, count=True)
# Three tiles of one thread block that see more and more; warps vote differently on blocks that
# are judged by all rules and on those where only what is not negative counts.
FAULTY = Shape(((192, 700),), num_heads=1, mag=2500, seed=9)


@functools.cache
def bench(config: Config = VOTING) -> Workbench:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return Workbench(hopper.subject(config))


def run(shape: Shape, seed: int = 0) -> Case:
    """The case after a run that equals the oracle."""
    case = hopper.case(VOTING, shape)
    verdict = bench().run(case, seed=seed)
    assert verdict.ok, "\n".join(verdict.describe())
    return case


@pytest.mark.parametrize("skip_rate", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("missing", [0, 45])
@pytest.mark.parametrize("n_blocks", [1, 2, 5, 8, 63, pytest.param(127, marks=pytest.mark.slow)])
def test_counts_are_exact(n_blocks: int, missing: int, skip_rate: float) -> None:
    """The last tile of query rows of a dialled prompt; missing: keys of the last block."""
    keys = 128 * n_blocks - missing
    shape = Shape(((64 - missing, keys),), num_heads=1, skip_rate=skip_rate, seed=n_blocks)
    visited, skipped = run(shape).outputs["counters"].sum(0).tolist()
    assert visited == n_blocks
    assert (skipped > 0) == (skip_rate > 0 and n_blocks > 1)


def test_launches_in_a_row_equal_isolated_ones() -> None:
    """Nothing of a launch stays: other inputs between two of them change no bit."""
    cases = [hopper.case(VOTING, replace(FAULTY, seed=seed)) for seed in (6, 9)]
    found = [[bench().run(case, seed=turn).digest for case in cases] for turn in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]


def test_a_lambda_changed_in_place_is_read_by_the_next_launch() -> None:
    case = hopper.case(VOTING, FAULTY)
    q, k, v, ends, keys = (
        case.inputs[name] for name in ("q", "k", "v", "cu_seqlens_q", "key_lengths")
    )
    spec = AttentionSpec(geometry=Geometry(64, 128))
    skips = []
    for value in (0.0, 2.0**-2.5, 0.9):
        case.inputs["skip_lambda"].fill_(value)
        assert bench().run(case).run.clean
        want = reference_attention(
            q, RaggedKV(k, v, keys), ends, spec=spec, skip_lambda=torch.tensor([value])
        )
        assert torch.equal(case.outputs["counters"], want.counts(1))
        skips.append(int(case.outputs["counters"][0, 1]))
    assert 0 == skips[0] < skips[1] < skips[2]


@pytest.mark.parametrize("page_size", [16, 32])
def test_page_numbers_are_read_for_several_blocks_at_once(page_size: int) -> None:
    """A warp holds those of 4 or 8 blocks: of 1 to 11 blocks, with and without a ragged end."""
    config = replace(VOTING, page_size=page_size)
    lengths = ((64, 128), (20, 512), (3, 513), (64, 1300))
    verdict = bench(config).run(hopper.case(config, Shape(lengths, num_heads=1, mag=2500)))
    assert verdict.ok, "\n".join(verdict.describe())


@pytest.mark.parametrize(
    ("dtype", "mag", "skips"),
    [
        ("bfloat16", 0.01, True),
        ("bfloat16", 1.2e5, False),
        ("float16", 9e3, True),
        ("float16", 16e3, True),
    ],
)
def test_thresholds_within_and_beyond_the_margin(dtype: str, mag: float, skips: bool) -> None:
    """Bases are as far below the maximum as the threshold reaches, up to what P can hold; beyond
    it every visit compares what is negative too."""
    config = replace(VOTING, dtype=dtype)
    case = hopper.case(config, replace(FAULTY, mag=mag))
    verdict = bench(config).run(case)
    assert verdict.ok, "\n".join(verdict.describe())
    assert (int(case.outputs["counters"][0, 1]) > 0) == skips


def without(file: str, opcode: str) -> list[Mutant]:
    """Each instruction of this kind of a source file ("": of any) left out in turn, if the case
    reaches it."""
    wanted = {
        number
        for number, ins in enumerate(candidates(bench().program.instructions))
        if ins.opcode.startswith(opcode) and (ins.source or "").startswith(file)
    }
    found = mutants(bench(), [hopper.case(VOTING, FAULTY)], chosen=lambda number: number in wanted)
    return [mutant for mutant in found if "not reached" not in mutant.why]


@pytest.mark.parametrize(
    ("file", "opcode", "how"),
    [
        ("ring.py", "mbarrier.arrive", "deadlock"),  # a stage that is never released
        ("ring.py", "mbarrier.try_wait", "race"),  # keys or values read too early
        ("", "bar.red", "wrong result"),  # warps that skip each for themselves
        ("consume.py", "wgmma.wait_group", "unfinished wgmma"),  # scores that are not there yet
        ("epilogue.py", "fence.proxy", "race"),  # output that the copy engine does not see
    ],
)
def test_a_fault_of_each_kind_is_seen(file: str, opcode: str, how: str) -> None:
    found = without(file, opcode)
    assert found
    assert any(how in mutant.caught for mutant in found), [str(mutant) for mutant in found]
    unexplained = [m for m in found if not m.caught and "unexplained" in m.why]
    assert not unexplained, [str(mutant) for mutant in unexplained]
