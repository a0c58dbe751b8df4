"""The PTX of the Blackwell kernel, executed: a seeded part of `kernels.blackwell.proof`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from blasst.kernels.blackwell.config import CROSS, Config
from blasst.kernels.blackwell.problems import CORNERS, DENSE, DIVERSE, EDGES, VOTING, Part, parts
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.subjects.attention import Shape

pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
from blasst.kernels.verify.mutate import REDUCTIONS, candidates, mutants
from blasst.kernels.verify.subject import Verdict, Workbench

BUFFERING = replace(VOTING, schedule=replace(CROSS, buffered=(4, 2)))
PAGED = replace(VOTING, head_dim=64, dtype="float16", page_size=16)
OWN_P = replace(VOTING, cross_p=False)


@functools.lru_cache(maxsize=2)
def bench(config: Config) -> Workbench:
    return Workbench(blackwell.subject(config))


def verdicts(config: Config, shape: Shape, seeds: range) -> Iterator[Verdict]:
    case = blackwell.case(config, shape)
    for seed in seeds:
        verdict = bench(config).run(case, seed=seed)
        assert verdict.ok, "\n".join(verdict.describe())
        yield verdict


def counts(config: Config, shape: Shape) -> tuple[str, int, int]:
    """Bits of the outputs, blocks visited and skipped."""
    case = blackwell.case(config, shape)
    verdict = bench(config).run(case, seed=1)
    assert verdict.ok, "\n".join(verdict.describe())
    visited, skipped = case.outputs["counters"].sum(0).tolist()
    return verdict.digest, visited, skipped


@pytest.mark.parametrize(
    ("config", "shape", "seeds"),
    [
        (VOTING, Shape(EDGES), range(2)),
        (VOTING, Shape(((256, 640),), mag=2500, seed=DIVERSE), range(8)),
        (VOTING, Shape(((130, 400),), num_heads=4, num_kv_heads=2), range(1)),
        (OWN_P, Shape(EDGES), range(1)),
        (PAGED, Shape(EDGES), range(2)),
        (BUFFERING, Shape(((256, 640),), mag=2500, seed=DIVERSE), range(4)),
        (DENSE, Shape(((256, 640),), num_heads=1), range(4)),
        (DENSE, Shape(((1, 1), (130, 129)), num_heads=1), range(1)),
    ],
    ids=[
        "edges",
        "mag",
        "heads",
        "own P",
        "pages of 16, head_dim 64, float16",
        "buffering",
        "dense",
        "one row",
    ],
)
def test_equals_the_oracle_without_a_race_under_every_schedule(
    config: Config, shape: Shape, seeds: range
) -> None:
    assert len({verdict.digest for verdict in verdicts(config, shape, seeds)}) == 1


SHAPES = [Shape(((256, 2560),), skip_rate=rate) for rate in (0.0, 0.51, 0.95)] + [
    Shape(((256, 1024),), mag=mag, seed=DIVERSE) for mag in (14000, 4500, 1000)
]


def test_the_place_of_p_changes_no_bit_and_no_count() -> None:
    found = {config: [counts(config, shape) for shape in SHAPES] for config in (VOTING, OWN_P)}
    assert found[VOTING] == found[OWN_P]
    skipped = [skips for _, _, skips in found[VOTING]]
    assert skipped[0] == 0 < skipped[1] < skipped[2]
    assert skipped[3] < skipped[4] < skipped[5]


def test_a_skipped_block_loses_its_product_and_nothing_else() -> None:
    products = []
    for rate in (0.0, 0.95):
        case = blackwell.case(VOTING, Shape(((256, 1024),), num_heads=1, skip_rate=rate))
        verdict = bench(VOTING).run(case, seed=3)
        skips = int(case.outputs["counters"][:, 1].sum())
        products.append(verdict.run.products + skips * VOTING.tile_n // 16)
    assert products[0] == products[1]


def test_every_vote_is_needed() -> None:
    """Warps that go by their own vote are noticed, on blocks with a mask too."""
    found = bench(VOTING)
    votes = {
        number
        for number, ins in enumerate(candidates(found.program.instructions))
        if ins.opcode.startswith(REDUCTIONS)
    }
    cases = [
        blackwell.case(VOTING, shape)
        for shape in (CORNERS[1], Shape(((256, 640),), mag=2500, seed=DIVERSE))
    ]
    survivors = mutants(found, cases, chosen=lambda number: number in votes)
    assert [m.caught.split(":")[0] for m in survivors] == ["wrong result"] * 4


def test_the_whole_proof_has_what_was_promised() -> None:
    found = {part.name: part for part in parts()}
    assert len(found) == len(parts())
    for name in ("schedules", "schedules, dense", "schedules, own P"):
        assert found[name].seeds >= 200
    rates = [s.skip_rate for s in found["vote"].shapes if s.skip_rate is not None]
    assert rates == [0.0, 0.51, 0.76, 0.89, 0.95]
    assert {s.mag for s in found["vote"].shapes} >= {14000, 10000, 7000, 4500, 2500, 1500, 1000}
    keys = {k // 128 for part in found.values() for s in part.shapes for _, k in s.seqlens}
    assert {1, 2, 5, 8, 63} <= keys
    pages = {part.config.page_size for part in found.values()}
    assert {0, 16, 64, 128} <= pages
    assert all(isinstance(part, Part) and part.seeds > 0 for part in found.values())
