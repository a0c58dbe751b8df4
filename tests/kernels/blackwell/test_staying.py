"""Thread blocks that go through many items: phases go on, and nothing of the result changes."""

from __future__ import annotations

import functools

import pytest

from blasst.kernels.blackwell.config import Config
from blasst.kernels.blackwell.problems import DIVERSE, EDGES, STAYING, VOTING
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.subjects.attention import Shape

pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
from blasst.kernels.verify.subject import Verdict, Workbench

SHAPE = Shape(((512, 640), (130, 300)), mag=2500, seed=DIVERSE)


@functools.lru_cache(maxsize=2)
def bench(config: Config) -> Workbench:
    return Workbench(blackwell.subject(config))


def run(config: Config, shape: Shape, seed: int) -> tuple[Verdict, list[int]]:
    case = blackwell.case(config, shape)
    verdict = bench(config).run(case, seed=seed)
    assert verdict.ok, "\n".join(verdict.describe())
    return verdict, case.outputs["counters"].sum(0).tolist()


def test_items_with_and_without_visits_under_two_schedules() -> None:
    """One of the requests has no key, one no row; some second tiles have no row."""
    assert len({run(STAYING, Shape(EDGES), seed)[0].digest for seed in range(2)}) == 1


def test_it_changes_no_bit_and_no_count() -> None:
    staying, counts = run(STAYING, SHAPE, 1)
    apart, expected = run(VOTING, SHAPE, 1)
    assert staying.digest == apart.digest
    assert counts == expected
    assert counts[1] > 0


def test_two_thread_blocks_share_six_items() -> None:
    """Two items of each head of the first request and one of the second."""
    launched = [bench(config).launch(blackwell.case(config, SHAPE)) for config in (STAYING, VOTING)]
    assert [launch.grid for launch in launched] == [(2, 1, 1), (2, 2, 2)]
