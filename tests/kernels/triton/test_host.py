"""What holds of the Triton kernel's host side without triton or a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from blasst.kernels.support import own_geometry
from blasst.kernels.triton.config import (
    MIN_SHARED_MEMORY,
    SHARED_MEMORY,
    SLACK,
    Config,
    buffers,
    config_for,
    shared_bytes,
)
from blasst.kernels.triton.launch import problem_reasons
from blasst.kernels.types import Geometry, Impl, Problem

PROBLEM = Problem(128, 32, 8, "bfloat16", "cuda", (8, 0), vote=True)
LIMITS = (101376, 166912, 232448)


@pytest.mark.parametrize("shared_memory", LIMITS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_config_fits_and_is_as_deep_as_it_can_be(head_dim: int, shared_memory: int) -> None:
    for tile_m, tile_n, paged in product((16, 32, 64, 128), (16, 32, 64, 128), (True, False)):
        geometry = Geometry(tile_m, tile_n)
        config = config_for(geometry, head_dim, paged=paged, shared_memory=shared_memory)
        assert shared_bytes(geometry, head_dim, config, paged) <= shared_memory
        if config.max_registers is None and config.num_stages < 3:
            deeper = Config(config.num_warps, 3, True)
            assert shared_bytes(geometry, head_dim, deeper, paged) > shared_memory


@pytest.mark.parametrize(
    ("capability", "head_dim", "tile_n"),
    [((8, 0), 128, 128), ((8, 6), 128, 64), ((8, 6), 64, 128), ((9, 0), 128, 64),
     ((9, 0), 64, 128), ((12, 0), 128, 64), (None, 128, 64)],
)  # fmt: skip
def test_blocks_are_narrow_where_two_wide_ones_do_not_fit_or_two_programs_do(
    capability: tuple[int, int] | None, head_dim: int, tile_n: int
) -> None:
    for page_size in (None, 16):
        problem = replace(PROBLEM, capability=capability, head_dim=head_dim, page_size=page_size)
        geometry = own_geometry(problem, Impl.TRITON)
        assert geometry == Geometry(128, tile_n)
        limit = SHARED_MEMORY.get(capability or (9, 0), MIN_SHARED_MEMORY)
        config = config_for(geometry, head_dim, paged=page_size is not None, shared_memory=limit)
        assert config.v_ahead


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_programs_share_a_multiprocessor_of_hopper(head_dim: int, paged: bool) -> None:
    geometry = Geometry(128, 8192 // head_dim)
    limit = SHARED_MEMORY[9, 0]
    config = config_for(geometry, head_dim, paged=paged, shared_memory=limit)
    assert config.max_registers == 65536 // 2 // (32 * config.num_warps)
    # The bound counts room for P, which stays in registers there, and slack for other paths.
    more = SLACK + 128 * max(0, geometry.tile_n - head_dim) * 2
    assert 2 * (shared_bytes(geometry, head_dim, config, paged) - more + 1024) <= limit + 1024
    assert config.boxes is not paged


def test_page_numbers_take_every_second_stage() -> None:
    assert [buffers(s, paged=False) for s in (1, 2, 3)] == [1, 2, 3]
    assert [buffers(s, paged=True) for s in (1, 3, 4, 5)] == [1, 2, 2, 3]


def test_every_reason_is_told() -> None:
    assert problem_reasons(PROBLEM) == []
    bad = Problem(96, 32, 8, "float32", "cuda", (8, 0), block_mask=True, geometry=Geometry(256, 16))
    assert problem_reasons(bad) == [
        "dtype float32 is not one of bfloat16, float16",
        "head_dim 96 is not one of 64, 128",
        "tile_m 256 is not one of 16, 32, 64, 128",
        "tile_n 16 with a block mask must be at least 32",
    ]
