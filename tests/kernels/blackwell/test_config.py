"""What holds of the Blackwell kernel's numbers, before anything is compiled."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from blasst.kernels.blackwell.config import (
    ALIGNMENT,
    CROSS,
    OWN,
    ROWS,
    SHARED_MEMORY,
    TILES,
    WARPGROUP,
    Config,
)
from blasst.kernels.blackwell.launch import config_reasons, order_reasons, prefill
from blasst.kernels.cute.host import Inputs
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.testing import cumulative
from blasst.kernels.types import RaggedKV

REGISTERS = 65536  # of a multiprocessor
CONFIGS = [
    Config(dtype, head_dim, True, page, vote, vote, cross_p=cross_p)
    for dtype, head_dim, page, vote, cross_p in product(
        ("bfloat16", "float16"), (64, 128), (0, 16, 48, 256), (True, False), (True, False)
    )
]
CONFIGS += [replace(config, grid=148) for config in CONFIGS[:2]]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: repr(c)[:110])
def test_a_config_fits_the_chip(config: Config) -> None:
    pytest.importorskip("cutlass", reason="the table of barriers needs nvidia-cutlass-dsl")
    from blasst.kernels.blackwell.edges import barrier_count

    stages = config.key_stages + config.value_stages
    tiles = TILES * config.query_bytes + stages * config.bytes_per_stage
    messages = 8 * (barrier_count(config) + 2 * stages) + TILES * 4 + 4 + TILES * 2 * ROWS * 4
    assert -(-messages // ALIGNMENT) * ALIGNMENT + tiles <= SHARED_MEMORY
    registers = config.registers
    used = TILES * registers.softmax + registers.correction + registers.other
    assert used * WARPGROUP <= REGISTERS
    assert config.windows * config.window == config.tile_n
    assert not config.page_size or config.page_size % config.window == 0
    named = {0, *config.vote_barriers, config.correction_barrier, config.teardown_barrier}
    assert len(named) == 5
    assert max(named) < 16
    assert config_reasons(config) == []


@pytest.mark.parametrize("config", CONFIGS[::2], ids=lambda c: repr(c)[:110])
def test_tensor_memory_holds_each_thing_once(config: Config) -> None:
    spans = [range(c, c + config.tile_n) for c in config.tmem.scores]
    spans += [range(c, c + config.head_dim) for c in config.tmem.out]
    assert sum(map(len, spans)) == len(set().union(*spans)) <= 512
    for tile, column in enumerate(config.p_columns):
        home = spans[1 - tile if config.cross_p else tile]
        assert {*range(column, column + config.tile_n // 2)} <= {*home}


def test_warps_have_one_role_each() -> None:
    roles = CONFIGS[0].roles
    warps = [*range(TILES * 4), *range(roles.correction, roles.correction + 4)]
    warps += [roles.mma, roles.keys, roles.values]
    assert len(set(warps)) == len(warps)
    assert max(warps) < roles.warps


BOTH_QK_FIRST = (("qk", 0), ("qk", 1), ("pv", 0), ("pv", 1))


@pytest.mark.parametrize(
    ("cross_p", "order", "reason"),
    [
        (True, BOTH_QK_FIRST, "overwrites a P in the other tile's scores"),
        (True, OWN.order, "overwrites a P in the other tile's scores"),
        (False, CROSS.order, "overwrites a P in its own scores"),
        (True, (("qk", 1), ("pv", 1), ("qk", 0), ("pv", 0)), "stages are released by tile 1"),
        (True, CROSS.order[:3], "does not name each product"),
    ],
)
def test_orders_that_lose_a_p_are_refused(
    cross_p: bool, order: tuple[tuple[str, int], ...], reason: str
) -> None:
    schedule = replace(CROSS if cross_p else OWN, order=order)
    config = replace(CONFIGS[0], cross_p=cross_p, schedule=schedule)
    assert any(reason in r for r in order_reasons(config))
    assert config_reasons(config)


def test_every_reason_is_told() -> None:
    config = Config("float32", 96, True, 24, True, True)
    assert config_reasons(config) == [
        "dtype float32 is not one of bfloat16, float16",
        "head_dim 96 is not one of 64, 128",
        "page_size 24 is not a multiple of 16",
    ]


def test_refused_before_anything_runs() -> None:
    q = torch.zeros(4, 2, 68, dtype=torch.bfloat16)[..., :64]
    ends = cumulative([4])
    inputs = Inputs(q, RaggedKV(q, q, ends), ends, torch.empty_like(q), 4, 1.0, True, None, None)
    with pytest.raises(UnsupportedError, match="copy engine"):
        prefill(inputs)
