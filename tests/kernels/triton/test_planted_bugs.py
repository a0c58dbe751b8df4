"""Bugs planted in the Triton kernel, one of each kind: the checks of the other tests see them.

Each is a change of the kernel's source, imported from a file of its own and run interpreted.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import blasst.kernels.triton as package
from blasst.kernels.call import check_call
from blasst.kernels.reference import run_reference
from blasst.kernels.testing import block_mask_from, paged
from blasst.kernels.triton import launch
from blasst.kernels.triton.config import Config
from blasst.kernels.triton.launch import run
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry, PagedKV, RaggedKV

pytest.importorskip("triton", reason="the Triton kernel needs triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is interpreted for this"),
]

SOURCE = Path(package.__file__).with_name("device.py")
GEOMETRY = Geometry(32, 32)
SEQLENS = ((70, 150), (33, 64))


@dataclass(frozen=True)
class Bug:
    """old: text that is there once; new: what stands there instead. lists: of block masks; loops:
    in what only contiguous keys, the copy engine and looks at the skips reach."""

    old: str
    new: str
    lists: bool = False
    loops: bool = False


BUGS = {
    "lambda in natural units": Bug(
        "log2_lambda = _log2_or_ninf(tl.load(SkipLambda + request).to(tl.float32))",
        "log2_lambda = _log2_or_ninf(tl.load(SkipLambda + request).to(tl.float32)) * 0.6931",
    ),
    "one lambda for all requests": Bug("tl.load(SkipLambda + request)", "tl.load(SkipLambda)"),
    "scores compared before they are scaled": Bug(
        "below = (block_max - row_max) * scale_log2 < log2_lambda",
        "below = (block_max - row_max) < log2_lambda",
    ),
    # The output stays right: only the skips tell.
    "vote on a maximum that lags by up to 2^8": Bug(
        "new_max = tl.maximum(row_max, block_max)",
        "new_max = tl.where((block_max - row_max) * scale_log2 > 8.0, block_max, row_max)",
    ),
    "a single row is overruled": Bug(
        "tl.max(x.to(tl.int32), 0) > 0", "tl.sum(x.to(tl.int32), 0) > 1"
    ),
    "rows that do not exist veto": Bug("veto = row_exists & (", "veto = (row_exists | True) & ("),
    "diagonal one to the right": Bug("context + row + 1)", "context + row + 2)"),
    "diagonal one to the left": Bug("context + row + 1)", "context + row)"),
    "blocks taken for full one row too early": Bug(
        "context + m * TILE_M + 1))", "context + m * TILE_M + TILE_N))"
    ),
    "skips counted as keeps": Bug("tl.where(keep, 0, 1)", "tl.where(keep, 1, 0)"),
    "skips of all heads counted for one": Bug("Counters + kv_head * 2 + 1", "Counters + 1"),
    "old output not rescaled": Bug("acc * rescale[:, None])", "acc)"),
    "skipped block added to the sum": Bug(
        "    if keep:\n", "    row_sum += tl.where(keep, 0, 1)\n    if keep:\n"
    ),
    "values beyond the end multiplied": Bug(
        "            v = _load(at_v, exists[:, None], MASK)\n        p =",
        "            v = _load(at_v, exists[:, None], False)\n        p =",
    ),
    "first block of a list skipped": Bug("BALLOT) | first |", "BALLOT) |", lists=True),
    "mask of the block before": Bug(
        "tl.load(tiles + at * max_blocks + i)",
        "tl.load(tiles + at * max_blocks + tl.maximum(i - 1, 0))",
        lists=True,
    ),
    "box one key to the right": Bug(
        "row = key_start.to(tl.int32) + n", "row = key_start.to(tl.int32) + 1 + n", loops=True
    ),
    "boxes of the first head for all": Bug(
        "tensor.load([kv_head, row, 0])", "tensor.load([kv_head * 0, row, 0])", loops=True
    ),
    "block after a look at the skips left out": Bug("done = end", "done = end + 1", loops=True),
    "block before a look at the skips visited twice": Bug(
        "done = end", "done = tl.maximum(done + 1, end - 1)", loops=True
    ),
    "by thread: a threshold of unscaled scores": Bug(
        "log2_lambda / scale_log2", "log2_lambda", loops=True
    ),
    "by thread: on the first block's maximum": Bug(
        "tl.maximum(row_max + vote[0], vote[1])",
        'tl.where(threshold > float("-inf"), threshold, tl.maximum(row_max + vote[0], vote[1]))',
        loops=True,
    ),
    "by thread: a row's maximum taken from one": Bug(
        "block_max = tl.max(most, 1)", "block_max = tl.min(most, 1)", loops=True
    ),
    "by thread: rows that do not exist need blocks": Bug(
        "tl.where(row_exists, least, threshold)", "least", loops=True
    ),
    "by thread: a single one is overruled": Bug(
        "x = tl.max(x.to(tl.int32), 1)", "x = tl.sum(x.to(tl.int32), 1) > 1", loops=True
    ),
    "bits read from the top": Bug("word >> (n % 32)", "word >> (31 - n % 32)", lists=True),
}  # fmt: skip


def inputs() -> tuple[torch.Tensor, RaggedKV, torch.Tensor, torch.Tensor]:
    """Blocks of every level between skipped and kept, so that a shift of the vote shows."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(103, 2, 64, generator=generator)
    k, v = (torch.randn(214, 2, 64, generator=generator) for _ in range(2))
    q[..., 0] = 4.0
    level = torch.randn(214 // 16 + 1, 2, generator=generator)
    k[..., 0] += 5.0 * level.repeat_interleave(16, 0)[:214]
    ends_q, ends_k = (torch.tensor([0, *ends]).int() for ends in ((70, 103), (150, 214)))
    kv = RaggedKV(k.half(), v.half(), ends_k)
    return q.half(), kv, ends_q, torch.tensor([0.3, 0.02])


def mask() -> BlockMask:
    """Documents of 50 keys; block 4 of request 0 is listed although nobody sees it."""
    made = block_mask_from(
        lambda b, h, q, k: (q // 50 == k // 50) & (k < 120),
        seqlens=SEQLENS,
        num_heads=2,
        geometry=GEOMETRY,
    )
    counts, indices = made.partial_counts.clone(), made.partial_indices.clone()
    for m in range(counts.shape[2]):
        if not (indices[0, 0, m, : counts[0, 0, m]] == 4).any():
            indices[0, :, m, counts[0, 0, m]] = 4
            counts[0, :, m] += 1
    return BlockMask(made.mask_mod, counts, indices, made.full_counts, made.full_indices)


def check(
    kernel: ModuleType | None, monkeypatch: pytest.MonkeyPatch, *, lists: bool, loops: bool
) -> None:
    """What every other test checks: out and lse in float32's budget, counts equal."""
    if kernel is not None:
        monkeypatch.setitem(sys.modules, "blasst.kernels.triton.device", kernel)
    q, kv, ends_q, skip_lambda = inputs()
    spec = AttentionSpec(block_mask=mask() if lists else None, geometry=GEOMETRY)
    call = check_call(q, kv if loops else poisoned(kv), ends_q, spec, skip_lambda, None, None)
    want = run_reference(call)
    assert want.smallest_margin > 1e-3, "the inputs hold a tie"
    out = torch.full_like(q, torch.nan)
    counters = torch.zeros(2, 2, dtype=torch.int64)
    if loops:
        config = Config(4, 2, True, demand_stages=2, chunk=4, boxes=True)
        monkeypatch.setattr(launch, "config_of", lambda *_, **__: config)
    lse = run(call, out, counters)
    torch.testing.assert_close(counters, want.counts(2))
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want.out, rtol=2e-3, atol=2e-3)


def poisoned(kv: RaggedKV) -> PagedKV:
    """In pages whose unused rows are NaN, and all of page 0, where masked lookups end."""
    pages = paged(kv, 16)
    nan = torch.full_like(pages.k[:1], torch.nan)
    k, v = (torch.cat([nan, t]) for t in (pages.k, pages.v))
    return PagedKV(k, v, pages.page_table + 1, pages.seqlens_k)


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Bug], ModuleType]:
    def make(bug: Bug) -> ModuleType:
        source = SOURCE.read_text()
        assert source.count(bug.old) == 1, f"the kernel holds {bug.old!r} not once"
        path = tmp_path / "planted.py"
        path.write_text(source.replace(bug.old, bug.new))
        spec = importlib.util.spec_from_file_location("planted", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.mark.parametrize(("lists", "loops"), [(False, False), (True, False), (False, True)])
def test_the_kernel_as_it_is_passes(
    monkeypatch: pytest.MonkeyPatch, lists: bool, loops: bool
) -> None:
    check(None, monkeypatch, lists=lists, loops=loops)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[Bug], Any], name: str
) -> None:
    bug = BUGS[name]
    with pytest.raises(AssertionError, match=r"not (equal|close)"):
        check(plant(bug), monkeypatch, lists=bug.lists, loops=bug.loops)
