"""What holds of the Hopper kernel without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from blasst.kernels.cute.host import layout_reasons
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.hopper.config import ROWS, WARPGROUP, Config
from blasst.kernels.hopper.launch import config_for, config_reasons, prefill
from blasst.kernels.types import RaggedKV

SHARED_MEMORY = 232448  # bytes of a block on compute capability 9.0
REGISTERS = 65536  # of a multiprocessor
PAGE_SIZES = (0, 16, 32, 64, 128, 256)
CONFIGS = [
    config_for("bfloat16", head_dim, causal=True, page_size=page, vote=vote, count=vote)
    for head_dim, page, vote in product((64, 128), PAGE_SIZES, (True, False))
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_config_fits_the_chip(config: Config) -> None:
    stages = config.key_stages + config.value_stages
    tiles = config.warpgroups * config.query_bytes + stages * config.bytes_per_stage
    assert tiles + 1024 + 8 * config.barriers <= SHARED_MEMORY
    used = config.producer_registers + config.warpgroups * config.consumer_registers
    assert used * WARPGROUP <= REGISTERS
    assert config.windows * config.window == config.tile_n
    assert config.windows % config.loaders == 0
    assert 2 * config.loaders <= WARPGROUP // 32
    assert config.tile_m == ROWS * config.warpgroups
    assert len({0, *map(config.group_barrier, range(config.warpgroups))}) == 1 + config.warpgroups


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_fits_is_not_refused(config: Config) -> None:
    assert config_reasons(config) == []


def test_every_reason_is_told() -> None:
    config = config_for("float32", 96, causal=True, page_size=48, vote=True, count=True)
    assert config_reasons(config) == [
        "dtype float32 is not one of bfloat16, float16",
        "head_dim 96 is not one of 64, 128",
        "page_size 48 is not one of 16, 32, 64, 128, 256",
    ]


def test_what_the_copy_engine_cannot_reach() -> None:
    whole = torch.zeros(4, 2, 72, dtype=torch.bfloat16)
    assert layout_reasons({"q": whole[..., :64]}) == []
    (odd_row,) = layout_reasons({"k": torch.zeros(4, 2, 68, dtype=torch.bfloat16)[..., :64]})
    assert "k has strides (136, 68, 1)" in odd_row
    (odd_address,) = layout_reasons({"v": whole[..., 4:68]})
    assert "multiples of 16 bytes" in odd_address
    (transposed,) = layout_reasons({"out": torch.zeros(4, 64, 64).bfloat16().transpose(1, 2)})
    assert "stride 64 along head_dim, it must be 1" in transposed


def test_refused_before_anything_runs() -> None:
    q = torch.zeros(4, 2, 68, dtype=torch.bfloat16)[..., :64]
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="copy engine"):
        prefill(
            q,
            RaggedKV(q, q, ends),
            ends,
            torch.empty_like(q),
            max_seqlen_q=4,
            softmax_scale=1.0,
            causal=True,
            skip_lambda=None,
            counters=None,
        )


COMPILE = """
import sys

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from blasst.kernels.cute import arrays, load, softmax, tile
from blasst.kernels.cute.mma import issue
from blasst.kernels.hopper import consume, epilogue, prefill
from blasst.kernels.hopper.compile import compile_prefill
from blasst.kernels.hopper.launch import config_for

mode, page_size = sys.argv[1], int(sys.argv[2])


@cute.jit
def attend(self) -> Int32:
    lead = self.visits - self.tile.n_blocks
    for i in cutlass.range(lead, unroll=1):
        self.pass_by(i)
    self.operands.acc.fill(0.0)
    if self.tile.n_blocks > 0:
        self.keys.wait(lead)
        whole = self.visits - self.tile.n_full
        settled = cutlass.min(cutlass.max(whole, lead) + 1, self.visits)
        for i in cutlass.range(lead, settled, unroll=1):
            self.visit(i, lead, False)
        for i in cutlass.range(settled, self.visits, unroll=1):
            self.visit(i, lead, True)
        self.values.wait(self.visits - 1)
    return Int32(0)


@cute.jit
def visit(self, i: Int32, lead: Int32, settled: cutlass.Constexpr[bool]) -> None:
    o = self.operands
    issue(o.mma_qk, o.scores, o.q, o.k[None, None, None, self.keys.stage(i)], False)
    if i > lead:
        self.values.wait(i - 1)
        self.values.release(i - 1)
    if i + 1 < self.visits:
        self.keys.wait(i + 1)
    warpgroup.wait_group(0)
    self.keys.release(i)
    if cutlass.const_expr(not settled):
        n = self.visits - 1 - i
        if n >= self.tile.n_full:
            self.hide_beyond(n)
    self.softmax.shift(o.scores)
    bits = self.softmax.greatest_bits(o.scores)
    if cute.arch.vote_any_sync(self.softmax.outgrown(bits, settled)):
        self.rebase(settled)
    self.multiply(i)
    warpgroup.wait_group(0)


if mode == "source without an option":
    Consumer = consume.Consumer
    del Consumer.visit_all, Consumer.settled_from, Consumer.needed, Consumer.mask, Consumer.look_up
    del softmax.Threshold, softmax.least_bits, prefill.visits_at, prefill.Seen
    Consumer.attend, Consumer.visit = attend, visit
    # And without heads that share a tile.
    for module in (consume, epilogue, load, tile):
        module.position_of = lambda row, pack: row
    for module in (arrays, tile):
        module.rows_of = lambda positions, pack: positions
    arrays.packed = lambda rows, pack: rows
vote = mode == "vote"
config = config_for("bfloat16", 128, causal=True, page_size=page_size, vote=vote, count=vote)
compile_prefill(config)
"""


def sass(folder: Path, mode: str, page_size: int) -> str:
    """SASS of a build for compute capability 9.0, made here."""
    folder.mkdir()
    program = folder / "build.py"
    program.write_text(COMPILE)
    environment = {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "sass,cubin",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", program, mode, str(page_size)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (text,) = folder.glob("*.sass")
    return text.read_text()


def check_build(text: str, products: int) -> None:
    """No spills to local memory; no products that ptxas serialised: they wait after each."""
    assert "LDL" not in text
    assert "STL" not in text
    assert text.count("HGMMA.64x128x16") == 8 * products
    assert text.count("WARPGROUP.DEPBAR") < 10


@pytest.mark.slow
def test_without_an_option_the_build_is_that_of_a_source_without_it(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the Hopper kernel needs nvidia-cutlass-dsl")
    modes = ("vote", "dense", "source without an option")
    vote, dense, without = (sass(tmp_path / mode, mode, 0) for mode in modes)
    check_build(vote, products=4)
    check_build(dense, products=4)
    assert vote.count("BAR.RED") == 2
    assert "BAR.RED" not in dense
    assert dense == without


@pytest.mark.slow
def test_small_pages_take_one_copy_each(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the Hopper kernel needs nvidia-cutlass-dsl")
    text = sass(tmp_path / "paged", "vote", 16)
    check_build(text, products=4)
    # Keys and values, 8 windows each: one copy, or 4 where rows are missing.
    assert text.count("UTMALDG.5D") == 2 * 8 * (1 + 4)
