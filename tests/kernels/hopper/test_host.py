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
] + [Config("bfloat16", 64, True, page, True, True, warpgroups=3) for page in PAGE_SIZES]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_config_fits_the_chip(config: Config) -> None:
    tiles = config.warpgroups * config.query_bytes + 2 * config.stages * config.bytes_per_stage
    barriers = 8 * (config.warpgroups + 4 * config.stages)
    assert tiles + 1024 + barriers <= SHARED_MEMORY
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
from blasst.kernels.hopper.compile import compile_prefill
from blasst.kernels.hopper.launch import config_for
vote = sys.argv[1] == "vote"
compile_prefill(
    config_for("bfloat16", 128, causal=True, page_size=int(sys.argv[2]), vote=vote, count=vote)
)
"""


def sass(folder: Path, vote: str, page_size: int) -> str:
    """SASS of a build for compute capability 9.0, made here."""
    environment = {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "sass,cubin",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE, vote, str(page_size)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (text,) = folder.glob("*.sass")
    return text.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [0, 16])
def test_compiles_without_a_gpu_and_the_vote_is_compile_time(
    tmp_path: Path, page_size: int
) -> None:
    pytest.importorskip("cutlass", reason="the Hopper kernel needs nvidia-cutlass-dsl")
    builds = {}
    for name in ("vote", "dense", "again"):
        folder = tmp_path / name
        folder.mkdir()
        builds[name] = sass(folder, "vote" if name == "vote" else "dense", page_size)
    for text in builds.values():
        # Spills to local memory; products that ptxas serialised wait after each of the 48.
        assert "LDL" not in text
        assert "STL" not in text
        assert text.count("HGMMA.64x128x16") == 48
        assert text.count("WARPGROUP.DEPBAR") < 16
    assert builds["vote"].count("BAR.RED") == 2
    assert "BAR.RED" not in builds["dense"]
    assert builds["dense"] == builds["again"]
