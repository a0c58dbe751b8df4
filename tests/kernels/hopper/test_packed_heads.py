"""Heads of a group as rows of one tile: the oracle of that geometry, the kernel's PTX executed here
against it, and when they are packed."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from blasst.kernels.api import prefill_attention
from blasst.kernels.call import Call, check_call
from blasst.kernels.errors import InvalidInputError, UnsupportedError
from blasst.kernels.hopper import launch
from blasst.kernels.hopper.config import Config
from blasst.kernels.hopper.launch import config_for, geometry_of, packing, problem_reasons
from blasst.kernels.reference import reference_attention
from blasst.kernels.support import unsupported_reasons
from blasst.kernels.testing import block_mask_from, cumulative
from blasst.kernels.types import AttentionSpec, Geometry, Impl, Problem, RaggedKV
from blasst.kernels.verify.subject import Workbench
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.subjects.attention import Shape
from blasst.kernels.verify.witness import witness

VOTING = config_for("bfloat16", 128, causal=True, page_size=0, vote=True, count=True, pack=4)
PAGED = config_for("float16", 64, causal=True, page_size=16, vote=False, count=False, pack=2)
SEQLENS = ((40, 300), (0, 9), (1, 1), (5, 0), (33, 70))
PROBLEM = Problem(128, 32, 8, "bfloat16", "cuda", (9, 0), geometry=Geometry(64, 128, 4))


@functools.cache
def bench(config: Config) -> Workbench:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return Workbench(hopper.subject(config))


def run(config: Config, shape: Shape, seed: int = 0) -> tuple[str, list[int]]:
    """(digest of the outputs, counts visited and skipped), after the comparison."""
    case = hopper.case(config, shape)
    verdict = bench(config).run(case, seed=seed)
    assert verdict.ok, "\n".join(verdict.describe())
    counters = case.outputs.get("counters")
    return verdict.digest, [] if counters is None else counters.sum(0).tolist()


def test_equals_the_oracle_of_its_geometry() -> None:
    """Ragged ends, context, empty requests, two groups, tiles that end within a warpgroup."""
    run(VOTING, Shape(SEQLENS, num_heads=8, num_kv_heads=2))


def test_every_schedule_gives_the_same_bits_and_exact_counts() -> None:
    shape = Shape(((90, 640),), num_heads=8, num_kv_heads=1, mag=2500, seed=6)
    found = [run(VOTING, shape, seed) for seed in range(2)]
    assert found[0] == found[1]
    visited, skipped = found[0][1]
    # Two bundles, of 90 positions 16 a tile, each tile of up to 5 blocks.
    assert 0 < skipped < visited <= 2 * 6 * 5


def test_pages_of_16_and_three_tiles() -> None:
    """Two bundles in a group, tiles of 32 positions in the third warpgroup too."""
    assert PAGED.warpgroups == 3
    run(PAGED, Shape(((110, 300), (3, 40)), num_heads=4, num_kv_heads=1))


@pytest.mark.parametrize("config", [VOTING, PAGED], ids=["vote", "pages"])
def test_the_build_neither_spills_nor_serialises(config: Config) -> None:
    found = witness(bench(config).artifact)
    assert found.problems() == []
    assert sum(n for op, n in found.sass.items() if op.startswith("WARPGROUP.DEPBAR")) < 10


def inputs(
    heads: int, kv_heads: int, queries: int, keys: int
) -> tuple[torch.Tensor, RaggedKV, torch.Tensor]:
    """q, keys with stretches of different levels, ends of the one request."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(queries, heads, 64, generator=draw)
    k, v = (torch.randn(keys, kv_heads, 64, generator=draw) for _ in range(2))
    q[..., 0] = 4.0
    k[..., 0] += (
        8.0 * torch.randn(keys // 64 + 1, kv_heads, generator=draw).repeat_interleave(64, 0)[:keys]
    )
    return q, RaggedKV(k, v, cumulative([keys])), cumulative([queries])


def test_heads_together_skip_what_each_of_them_skips() -> None:
    """The oracle: one tile holds all rows, so a block is skipped iff every head skips it."""
    q, kv, ends = inputs(8, 2, 16, 1000)
    skip_lambda = torch.tensor([0.3])

    def attend(geometry: Geometry) -> list[torch.Tensor]:
        spec = AttentionSpec(geometry=geometry)
        found = reference_attention(q, kv, ends, spec=spec, skip_lambda=skip_lambda)
        return [found.visited[0], found.skipped[0], found.counts(2)]

    visited, skipped, counts = attend(Geometry(64, 128, 4))
    alone = attend(Geometry(64, 128))
    assert visited.shape == (2, 1, 8)
    assert torch.equal(skipped, alone[1].view(2, 4, 1, 8).all(1))
    assert 0 < int(skipped.sum()) < int(alone[1].sum())
    assert torch.equal(counts[:, 0] * 4, alone[2][:, 0])


def test_without_a_vote_the_oracle_does_not_depend_on_it() -> None:
    q, kv, ends = inputs(4, 1, 70, 200)
    one, four = (
        reference_attention(q, kv, ends, spec=AttentionSpec(geometry=Geometry(64, 128, heads)))
        for heads in (1, 4)
    )
    torch.testing.assert_close(one.out, four.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.lse, four.lse, rtol=0, atol=1e-12)
    assert four.visited[0].shape == (1, 5, 2)


def test_the_geometry_says_what_is_packed() -> None:
    assert geometry_of(PROBLEM) == Geometry(64, 128, 4)
    assert problem_reasons(PROBLEM) == []
    assert launch.problem_config(PROBLEM).pack == 4
    assert geometry_of(replace(PROBLEM, geometry=None)) == Geometry(64, 128)
    assert str(Geometry(64, 128, 4)) == "64 x 128, 4 heads together"


def test_every_reason_against_it_is_told() -> None:
    three = replace(PROBLEM, num_heads=24, block_mask=True)
    assert unsupported_reasons(three, Impl.REFERENCE) == [
        "4 heads together do not divide a group of 3 q heads",
        "the lists of a block mask are of one head, not of 4 together",
    ]
    big = replace(PROBLEM, num_heads=128, num_kv_heads=1, geometry=Geometry(128, 128, 128))
    assert problem_reasons(big) == [
        "heads together 128 is not one of 1, 2, 4, 8, 16, 32, 64",
        "it votes on 64 x 128, not on 128 x 128, 128 heads together",
    ]
    on_cpu = replace(PROBLEM, device_type="cpu", capability=None, geometry=Geometry(128, 128, 4))
    alone = "it votes for each head, not for 4 together"
    assert alone in unsupported_reasons(on_cpu, Impl.CPU)
    assert alone in unsupported_reasons(replace(PROBLEM, capability=(8, 0)), Impl.TRITON)
    assert alone in unsupported_reasons(replace(PROBLEM, capability=(10, 0)), Impl.BLACKWELL)
    with pytest.raises(ValueError, match="heads 3 must be a power of two"):
        Geometry(64, 128, 3)
    with pytest.raises(ValueError, match="heads 128 do not fit a tile of 64 rows"):
        Geometry(64, 128, 128)


def test_the_oracle_refuses_what_it_cannot_pack() -> None:
    q, kv, ends = inputs(6, 2, 8, 8)
    with pytest.raises(InvalidInputError, match="4 heads together do not divide a group of 3"):
        reference_attention(q, kv, ends, spec=AttentionSpec(geometry=Geometry(64, 128, 4)))
    spec = AttentionSpec(geometry=Geometry(64, 128, 4))
    with pytest.raises(UnsupportedError, match="4 heads together do not divide"):
        prefill_attention(q, kv, ends, spec=spec, impl="reference")


def call_of(
    queries: list[int], *, vote: bool = False, geometry: Geometry | None = None, heads: int = 32
) -> Call:
    q = torch.zeros(sum(queries), heads, 128, dtype=torch.bfloat16)
    kv = torch.zeros(sum(queries), 8, 128, dtype=torch.bfloat16)
    ends = cumulative(queries)
    lambdas = torch.full((len(queries),), 0.1) if vote else None
    spec = AttentionSpec(geometry=geometry)
    return check_call(q, RaggedKV(kv, kv, ends), ends, spec, lambdas, None, None)


def test_when_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    assert packing(call_of([16] * 8)) == 4  # 256 tiles, 64 packed
    assert packing(call_of([16] * 4)) == 1  # 128 tiles run at once anyway
    assert launch.problem_config(PROBLEM).tile_m == 192
    assert packing(call_of([192] * 8)) == 1  # nothing is empty
    assert packing(call_of([200] * 8)) == 4  # 512 tiles, 320 packed
    assert packing(call_of([330] * 8)) == 4  # 512 and 448
    assert packing(call_of([370] * 8)) == 1  # 512 and 512
    assert packing(call_of([16] * 8, heads=24)) == 1  # a group of 3
    assert packing(call_of([16] * 8, heads=48)) == 2  # of 6
    # What is skipped depends on it, so a vote is packed only on demand.
    assert packing(call_of([16] * 8, vote=True)) == 1
    assert packing(call_of([16] * 8, vote=True, geometry=Geometry(64, 128, 2))) == 2
    assert packing(call_of([16] * 8, geometry=Geometry(64, 128))) == 1


def test_what_is_packed_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[launch.Inputs] = []

    def start(inputs: launch.Inputs) -> torch.Tensor:
        started.append(inputs)
        return torch.empty(0)

    monkeypatch.setattr(launch, "start", start)
    call = call_of([16], vote=True, geometry=Geometry(64, 128, 4))
    launch.run(call, torch.empty_like(call.q), None)
    assert started[0].pack == 4


def test_masks_are_not_packed() -> None:
    q = torch.zeros(300, 8, 128, dtype=torch.bfloat16)
    ends = cumulative([300])
    mask = block_mask_from(lambda b, h, i, j: i >= j, seqlens=((300, 300),), num_heads=8)
    call = check_call(
        q, RaggedKV(q[:, :2], q[:, :2], ends), ends, AttentionSpec(block_mask=mask), None, None,
        None,
    )  # fmt: skip
    assert packing(call) == 1
