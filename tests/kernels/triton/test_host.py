"""What holds of the Triton kernel's host side without triton or a GPU."""

from __future__ import annotations

from itertools import product

import pytest

from blasst.kernels.triton.config import Config, buffers, config_for, shared_bytes
from blasst.kernels.triton.launch import problem_reasons
from blasst.kernels.types import Geometry, Problem

PROBLEM = Problem(128, 32, 8, "bfloat16", "cuda", (8, 0), vote=True)
SHARED_MEMORY = (101376, 166912, 232448)


@pytest.mark.parametrize("shared_memory", SHARED_MEMORY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_config_fits_and_is_as_deep_as_it_can_be(head_dim: int, shared_memory: int) -> None:
    for tile_m, tile_n, paged in product((16, 32, 64, 128), (16, 32, 64, 128), (True, False)):
        geometry = Geometry(tile_m, tile_n)
        config = config_for(geometry, head_dim, paged=paged, shared_memory=shared_memory)
        assert shared_bytes(geometry, head_dim, config, paged) <= shared_memory
        if config.num_stages < 3:
            deeper = Config(config.num_warps, 3, True)
            assert shared_bytes(geometry, head_dim, deeper, paged) > shared_memory


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
