"""Block masks in the Blackwell kernel: its PTX, executed, against the oracle and the others."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import blasst.kernels.blackwell
from blasst.kernels import cpu_torch
from blasst.kernels.blackwell import launch
from blasst.kernels.blackwell.config import ROWS, TILES, Config
from blasst.kernels.blackwell.problems import MASKED, masked_parts
from blasst.kernels.block_lists import ALL, NONE, WORD, group_lists
from blasst.kernels.call import Call, check_call
from blasst.kernels.reference import run_reference
from blasst.kernels.testing import cumulative
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, Problem, RaggedKV
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.subjects.attention import Shape
from blasst.kernels.verify.subjects.masks import MASKS, block_mask

GEOMETRY = Geometry(ROWS, MASKED.tile_n)
PAGED = replace(MASKED, head_dim=64, dtype="float16", page_size=16)
OWN_P = replace(MASKED, cross_p=False)
SEQLENS = ((256, 640), (130, 300), (0, 7))
SKIPS = {"strip_history_thinking", "shared_prefix", "random blocks", "blind rows", "blind tiles"}


@functools.lru_cache(maxsize=3)
def bench(config: Config) -> Workbench:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return Workbench(blackwell.subject(config))


def run(config: Config, shape: Shape, seed: int = 0) -> tuple[str, list[int]]:
    """Digest of the outputs and blocks visited and skipped, after the comparison."""
    case = blackwell.case(config, shape)
    verdict = bench(config).run(case, seed=seed)
    assert verdict.ok, "\n".join(verdict.describe())
    counters = case.outputs.get("counters")
    return verdict.digest, [] if counters is None else counters.sum(0).tolist()


@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_oracle_without_a_race(mask: str) -> None:
    """Out, lse and exact counts; also of tiles and thread blocks that visit nothing."""
    _, (visited, skipped) = run(MASKED, Shape(SEQLENS, mask=mask, mag=500.0), seed=1)
    assert 0 < visited <= 2 * (4 + 5 + 3 + 3)
    assert skipped > 0 or mask not in SKIPS


def test_every_schedule_gives_the_same_bits() -> None:
    shape = Shape(((256, 640),), mask="blind rows", mag=500.0)
    assert len({run(MASKED, shape, seed)[0] for seed in range(4)}) == 1


def test_lambda_0_skips_not_even_a_block_that_nobody_sees() -> None:
    """Rows that have seen nothing and see nothing have no score to vote with."""
    case = blackwell.case(MASKED, Shape(((256, 640),), num_heads=1, mask="document", mag=math.inf))
    codes = case.inputs["codes"][0, 0, 0, :, 1]
    second = codes[codes != NONE].long()
    assert len(second) == 2
    # The second tile visits two blocks, and now it sees nothing of either.
    case.inputs["bits"][second] = 0
    assert bench(MASKED).run(case, seed=0).run.clean
    assert case.outputs["counters"][0].tolist() == [
        int(case.inputs["spans"][0, 0, 0, 2::2].sum()),
        0,
    ]
    assert case.outputs["lse"][0, ROWS:].tolist() == [-math.inf] * ROWS


@pytest.mark.parametrize("part", ["a block too many", "first visit", "bits", "order"])
def test_wrong_lists_are_noticed(part: str) -> None:
    """So a kernel that read its lists wrongly would be."""
    case = blackwell.case(MASKED, Shape(((256, 640),), num_heads=1, mask="causal & document"))
    spans, blocks, codes = (case.inputs[name] for name in ("spans", "blocks", "codes"))
    if part == "a block too many":
        codes[codes == NONE] = ALL
    if part == "first visit":
        spans[..., 1] += 1
    if part == "bits":
        codes[codes >= 0] = ALL
    if part == "order":
        blocks.copy_(blocks.flip(-1))
    verdict = bench(MASKED).run(case, seed=0)
    assert not verdict.ok


def one_hot_values(case: Case) -> None:
    """Key blocks at a few levels; values name the block, so that the output shows what is kept."""
    q, k, v, table = (case.inputs[name] for name in ("q", "k", "v", "page_table"))
    page_size, tile_n = k.shape[1], GEOMETRY.tile_n
    q[..., 1:] *= 0.25
    levels = torch.tensor([0.0, -6.0, -12.0, -3.0, -9.0, -4.0])
    for request, length in enumerate(case.inputs["key_lengths"].tolist()):
        key = torch.arange(length)
        at = table[request, key // page_size].long(), key % page_size
        rows = k[at]
        rows[..., 1:] *= 0.25
        rows[..., 0] = levels[(key // tile_n + request) % 6, None].to(k.dtype)
        k[at] = rows
        v[at] = torch.nn.functional.one_hot(key // tile_n, v.shape[-1])[:, None].to(v.dtype)


def dropped(call: Call, out: torch.Tensor) -> list[torch.Tensor]:
    """bool [num_heads, m_blocks, n_blocks] a request: blocks that no row has anything of."""
    found = []
    for r in call.requests:
        rows = out[r.q_start : r.q_start + r.seqlen_q]
        tiles = torch.split(rows != 0, GEOMETRY.tile_m)
        n_blocks = -(-r.seqlen_k // GEOMETRY.tile_n)
        found += [torch.stack([~t.any(0)[:, :n_blocks] for t in tiles], 1)] if len(rows) else []
    return found


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("mask", ["strip_history_thinking", "random blocks"])
def test_reference_cpu_triton_and_this_kernel_skip_the_same_blocks(mask: str) -> None:
    pytest.importorskip("triton", reason="the Triton kernel needs triton")
    from blasst.kernels.triton import launch as triton

    case = blackwell.case(PAGED, Shape(((256, 640), (130, 300)), mask=mask, mag=300.0))
    one_hot_values(case)
    verdict = bench(PAGED).run(case, seed=2)
    assert verdict.ok, "\n".join(verdict.describe())
    x = case.inputs
    kv = PagedKV(x["k"], x["v"], x["page_table"], x["key_lengths"])
    spec = AttentionSpec(
        None, True, block_mask(mask, ((256, 640), (130, 300)), 2, GEOMETRY), GEOMETRY
    )
    call = check_call(x["q"], kv, x["cu_seqlens_q"], spec, x["skip_lambda"], None, None)
    want = run_reference(call)
    assert not want.smallest_margin < 1e-3, "the inputs hold a tie"
    assert sum(int(s.sum()) for s in want.skipped) > 0
    shown = dropped(call, want.out)
    for at, skipped, visited in zip(shown, want.skipped, want.visited, strict=True):
        # Beyond these there are only blocks that are kept because they come first.
        assert at[skipped | ~visited].all()
    outputs = {"reference": want.out, "blackwell": case.outputs["out"]}
    for name, implementation in (("cpu", cpu_torch.run), ("triton", triton.run)):
        outputs[name] = torch.full_like(x["q"], torch.nan)
        counters = torch.zeros(1, 2, dtype=torch.int64)
        implementation(call, outputs[name], counters)
        assert torch.equal(counters, case.outputs["counters"]), name
    for name, out in outputs.items():
        for got, expected in zip(dropped(call, out), shown, strict=True):
            assert torch.equal(got, expected), name


def test_a_call_hands_over_the_lists_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Config] = []
    handed: list[Any] = []

    def fake(config: Config) -> Any:
        compiled.append(config)
        return lambda *arguments: handed.extend(arguments)

    monkeypatch.setattr(launch, "_compiled", fake)
    q = torch.zeros(300, 4, 64, dtype=torch.bfloat16)
    ends, kv = cumulative([300]), RaggedKV(q[:, :2], q[:, :2], cumulative([300]))
    mask = block_mask("causal & document", ((300, 300),), 4, GEOMETRY)
    call = check_call(q, kv, ends, AttentionSpec(None, True, mask), None, None, None)
    launch.run(call, torch.empty_like(q), None)
    # The lists hide what causality hides: one build for both.
    assert compiled == [Config("bfloat16", 64, False, 0, False, False, block_mask=True)]
    lists = next(a for a in handed if isinstance(a, tuple))
    for name, tensor in group_lists(call, TILES)._asdict().items():
        shape = tensor.shape if name == "bits" else (1, 4, *tensor.shape[2:])
        assert torch.equal(getattr(lists, name), tensor.expand(shape)), name
    # Rows 0 to 127 visit block 0, 128 to 255 blocks 1 and 0, 256 to 299 blocks 2 and 1.
    assert lists.spans[0, 3].tolist() == [[2, 1, 1, 0, 2], [2, 0, 2, 0, 0]]
    assert lists.bits.shape[1:] == (ROWS, MASKED.tile_n // WORD)


def test_without_a_vote_larger_tiles_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA4's lists are of 256 rows."""
    handed: list[Any] = []
    monkeypatch.setattr(launch, "_compiled", lambda config: lambda *given: handed.extend(given))
    large = Geometry(2 * ROWS, MASKED.tile_n)
    q = torch.zeros(300, 2, 64, dtype=torch.bfloat16)
    ends, kv = cumulative([300]), RaggedKV(q, q, cumulative([300]))
    mask = block_mask("causal & document", ((300, 300),), 2, large)
    call = check_call(q, kv, ends, AttentionSpec(None, False, mask, large), None, None, None)
    assert launch.problem_reasons(replace(call.problem, capability=(10, 0))) == []
    launch.run(call, torch.empty_like(q), None)
    lists = next(a for a in handed if isinstance(a, tuple))
    # Rows 0 to 255 visit blocks 1 and 0; rows 256 to 299 blocks 2 and 1, and no row is left.
    assert lists.spans[0, 0].tolist() == [[2, 0, 2, 0, 2], [2, 0, 2, 0, 2]]
    assert lists.bits.shape[1:] == (ROWS, MASKED.tile_n // WORD)


def test_masks_are_no_reason_against_it() -> None:
    problem = Problem(
        128, 8, 2, "bfloat16", "cuda", (10, 0), 16, block_mask=True, geometry=GEOMETRY
    )
    assert launch.problem_reasons(problem) == []


def test_a_build_and_a_problem_agree_on_masks() -> None:
    with pytest.raises(ValueError, match="block_mask True, but mask ''"):
        blackwell.case(MASKED, Shape(SEQLENS))


def test_the_proof_has_every_mask() -> None:
    for part in masked_parts():
        assert part.config.block_mask
        if not part.name.startswith("schedules"):
            assert {shape.mask for shape in part.shapes} == {*MASKS}
    assert {part.seeds for part in masked_parts()} >= {200}


@pytest.mark.slow
def test_the_place_of_p_changes_no_bit_and_no_count_under_masks() -> None:
    for mask in ("blind tiles", "random blocks"):
        shape = Shape(SEQLENS, mask=mask, mag=500.0)
        assert run(OWN_P, shape) == run(MASKED, shape)


def mutated(tmp_path: Path, name: str, old: str, new: str) -> Iterator[str]:
    """What is noticed of a kernel with a line of it changed."""
    from blasst.kernels.verify.build import compile_in_process

    source = Path(blasst.kernels.blackwell.__file__).parent
    copy = tmp_path / "source" / "blackwell"
    copy.mkdir(parents=True)
    for path in source.glob("*.py"):
        text = path.read_text()
        if path.name == name:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (copy / path.name).write_text(text)
    subject = blackwell.subject(MASKED)
    recipe = replace(subject.recipe, overlay=(("blasst.kernels.blackwell", str(copy)),))
    changed = Workbench(subject, compile_in_process(recipe, tmp_path))
    for mask in ("blind tiles", "blind rows", "random blocks"):
        for mag in (None, math.inf):
            case = blackwell.case(MASKED, Shape(((256, 640),), mask=mask, mag=mag))
            yield from changed.run(case, seed=0).describe()


@pytest.mark.slow
def test_a_mutant_of_the_mask_code_is_caught(tmp_path: Path) -> None:
    """One that looks at the wrong visit; docs/measurements/sm100-proof.md has more of them."""
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    right, wrong = (f"self.codes.entry({at}, tile) != NONE" for at in ("offset", "0"))
    assert any(mutated(tmp_path, "mma.py", right, wrong))
