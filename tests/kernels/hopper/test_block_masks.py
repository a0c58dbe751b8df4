"""Block masks in the Hopper kernel, its PTX executed here: oracle, exact counts, races, build."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from blasst.kernels.block_lists import group_lists
from blasst.kernels.call import check_call
from blasst.kernels.hopper import launch
from blasst.kernels.hopper.config import ROWS, WARP, Config
from blasst.kernels.hopper.launch import config_for, geometry_of, problem_reasons
from blasst.kernels.testing import cumulative
from blasst.kernels.types import AttentionSpec, Geometry, Problem, RaggedKV
from blasst.kernels.verify.subject import Workbench
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.subjects.attention import Shape
from blasst.kernels.verify.subjects.masks import block_mask
from blasst.kernels.verify.witness import witness

VOTING = config_for(
    "bfloat16", 128, causal=True, page_size=0, vote=True, count=True, block_mask=True
)
PAGED = config_for(
    "float16", 64, causal=True, page_size=16, vote=False, count=False, block_mask=True
)
NARROW = config_for(
    "bfloat16", 64, causal=True, page_size=0, vote=True, count=True, block_mask=True
)
DENSE = config_for(
    "bfloat16", 128, causal=True, page_size=0, vote=False, count=False, block_mask=True
)
SEQLENS = ((200, 600), (70, 70), (0, 9), (1, 1), (5, 0))
SKIPS = ("strip_history_thinking", "random blocks", "blind rows", "blind tiles")


@functools.cache
def bench(config: Config) -> Workbench:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return Workbench(hopper.subject(config))


def run(
    config: Config, mask: str, seed: int = 0, seqlens: Any = SEQLENS, **shape: Any
) -> tuple[str, list[int]]:
    """(digest of the outputs, counts visited and skipped), after the comparison."""
    case = hopper.case(config, Shape(seqlens, mask=mask, **shape))
    verdict = bench(config).run(case, seed=seed)
    assert verdict.ok, "\n".join(verdict.describe())
    counters = case.outputs.get("counters")
    return verdict.digest, [] if counters is None else counters.sum(0).tolist()


@pytest.mark.parametrize(
    "mask", ["shared_prefix", "document", "sliding window", "random blocks", "blind tiles"]
)
def test_equals_the_oracle(mask: str) -> None:
    """Out, log-sum-exp, exact counts; rows and tiles that see nothing give 0 and -inf."""
    _, (visited, skipped) = run(VOTING, mask)
    assert visited > 0
    assert (skipped > 0) == (mask in SKIPS)


def test_a_tile_that_visits_nothing_lets_the_blocks_of_others_pass() -> None:
    """More of them than there are stages: the producer waits for both tiles."""
    seqlens = ((704, 768),)  # the second tile is the first blind one
    call_mask = block_mask("blind tiles", seqlens, 1, Geometry(ROWS, 128))
    visits = (call_mask.partial_counts + call_mask.full_counts)[0, 0, :2].tolist()
    assert visits[0] > VOTING.value_stages
    assert visits[1] == 0
    run(VOTING, "blind tiles", seqlens=seqlens, num_heads=1)


def test_more_visits_than_a_warp_has_lanes() -> None:
    """A lane holds the code of one visit; the codes of the next visits are fetched in time."""
    seqlens = ((64, 5200),)
    mask = block_mask("blind rows", seqlens, 1, Geometry(ROWS, 128))
    assert int(mask.partial_counts.sum() + mask.full_counts.sum()) > WARP
    _, (visited, skipped) = run(VOTING, "blind rows", seqlens=seqlens, num_heads=1, mag=2500)
    assert visited > skipped > 0


def test_every_schedule_gives_the_same_bits() -> None:
    found = [run(VOTING, "strip_history_thinking", seed=seed) for seed in range(3)]
    assert len({digest for digest, _ in found}) == 1
    assert found[0][1][1] > 0


def test_small_pages_and_three_tiles() -> None:
    assert PAGED.warpgroups == 3
    for mask in ("blind tiles", "blind rows"):
        run(PAGED, mask, num_heads=1)


def test_without_a_vote() -> None:
    run(DENSE, "random blocks")


@pytest.mark.parametrize(
    "config",
    [VOTING, DENSE, PAGED, pytest.param(NARROW, marks=pytest.mark.slow)],
    ids=["vote", "dense", "pages", "narrow"],
)
def test_the_build_neither_spills_nor_serialises(config: Config) -> None:
    """Products that ptxas serialises wait after each: with these registers it has not."""
    found = witness(bench(config).artifact)
    assert found.problems() == []
    products = sum(n for op, n in found.sass.items() if op.startswith("HGMMA"))
    assert products == config.head_dim // 16 + config.tile_n // 16
    assert sum(n for op, n in found.sass.items() if op.startswith("WARPGROUP.DEPBAR")) < 10


def test_causality_is_in_the_lists() -> None:
    """One build serves both."""
    mask = {"page_size": 0, "vote": True, "count": True, "block_mask": True}
    config = config_for("bfloat16", 128, causal=True, **mask)  # type: ignore[arg-type]
    assert not config.causal
    assert config == config_for("bfloat16", 128, causal=False, **mask)  # type: ignore[arg-type]


def test_lists_are_made_for_the_tiles_of_a_thread_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `run` hands to the kernel."""
    started: list[Any] = []
    monkeypatch.setattr(launch, "start", lambda inputs: started.append(inputs) or torch.empty(0))
    for head_dim, lambdas in ((128, torch.tensor([0.1])), (128, None), (64, None)):
        q = torch.zeros(300, 2, head_dim, dtype=torch.bfloat16)
        mask = block_mask("document", ((300, 300),), 2, Geometry(ROWS, 128))
        spec = AttentionSpec(block_mask=mask, geometry=Geometry(ROWS, 128))
        ends = cumulative([300])
        call = check_call(q, RaggedKV(q, q, ends), ends, spec, lambdas, None, None)
        launch.run(call, torch.empty_like(q), None)
        assert started[-1].lists is group_lists(call, 3, ROWS)
        assert started[-1].choices()["block_mask"]


def test_which_lists_it_takes() -> None:
    """Of its own tiles; where nothing votes, of larger ones too."""
    problem = Problem(128, 8, 2, "bfloat16", "cuda", (9, 0), block_mask=True)
    assert geometry_of(problem) == Geometry(64, 128)
    assert problem_reasons(problem) == []
    default = replace(problem, geometry=Geometry())
    (reason,) = problem_reasons(default)
    assert reason == "it visits the lists of a block mask on 64 x 128, not on 128 x 128"
    assert problem_reasons(replace(default, vote=False)) == []
    other = replace(problem, vote=False, geometry=Geometry(128, 64))
    assert problem_reasons(other) == [reason.replace("not on 128 x 128", "not on 128 x 64")]
