"""Pages of processes that are gone become one, and no counter falls."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from blasst.kernels.exchange.layout import (
    FRONT,
    LAMBDA_CLASSES,
    LENGTH_CLASSES,
    RANK,
    front_fields,
    rank_fields,
)
from blasst.kernels.exchange.pages import CachedPages, model_totals, rank_totals
from blasst.kernels.exchange.retire import retire_dead
from blasst.kernels.exchange.stats import StatsWriter, read_stats, stats_names

CELLS = len(LAMBDA_CLASSES) * len(LENGTH_CLASSES)


def leave(folder: Path, name: str, kind: str, model: str = "m", **arrays: object) -> None:
    """A page as a process that is gone leaves it."""
    fields = rank_fields(2, 1) if kind == RANK else front_fields()
    labels = {"model_name": model, "pid": name, "engine": "0", "rank": "0"}
    writer = StatsWriter(folder, name, kind=kind, labels=labels, fields=fields)
    writer.update(**arrays)  # type: ignore[arg-type]
    writer.detach()


def totals(folder: Path) -> object:
    pages = CachedPages(folder, 0).pages()
    ranks = [(r.tiles, r.counters) for r in rank_totals(pages)]
    return ranks, model_totals(pages)


def test_sums_stay_as_they_are_however_often_and_in_whatever_order(tmp_path: Path) -> None:
    rng = random.Random(0)
    alive = StatsWriter(
        tmp_path, "rank-live", kind=RANK, labels={"model_name": "m"}, fields=rank_fields(2, 1)
    )
    alive.update(tiles=[1, 1, 1, 1])
    for number in range(60):
        model = rng.choice(["m", "n"])
        tiles = [rng.randrange(100) for _ in range(4)]
        leave(tmp_path, f"rank-{number}", RANK, model, tiles=tiles, decode_tokens=number)
        counts = [rng.randrange(3) for _ in range(CELLS)]
        leave(
            tmp_path,
            f"front-{number}",
            FRONT,
            model,
            requests_admitted=counts,
            ttft_count=counts,
            ttft_sum_seconds=[0.25 * n for n in counts],
            requests_rejected=1,
            generation_read=number,
            threshold_lambda=0.5,
        )
        if rng.random() < 0.3:
            before = totals(tmp_path)
            retire_dead(tmp_path, 0.0)
            assert totals(tmp_path) == before
    retire_dead(tmp_path, 0.0)
    left = stats_names(tmp_path)
    assert len(left) == 1 + 2 * 2, left
    assert retire_dead(tmp_path, 0.0) == 0
    fronts = [read_stats(tmp_path / n) for n in left if n.startswith("retired")]
    newest = max(p.scalar("generation_read") for p in fronts if p.kind == FRONT)
    assert newest == 59
    assert all(math.isnan(p.scalar("threshold_lambda")) for p in fronts if p.kind == FRONT)
    assert not any("pid" in p.labels for p in fronts)
    alive.close()


def test_young_living_and_foreign_pages_stay(tmp_path: Path) -> None:
    leave(tmp_path, "front-1", FRONT)
    assert retire_dead(tmp_path, 60.0) == 0
    living = StatsWriter(tmp_path, "front-2", kind=FRONT, labels={}, fields=front_fields())
    other = StatsWriter(tmp_path, "other", kind="other", labels={}, fields=front_fields())
    other.detach()
    (tmp_path / "torn.stats").write_bytes(b"BLASSTS1" + bytes(100))
    assert retire_dead(tmp_path, 0.0) == 1
    names = stats_names(tmp_path)
    assert names[:2] == ["front-2.stats", "other.stats"]
    assert names[-1] == "torn.stats"
    living.close()


def test_damaged_counts_are_added_up_too(tmp_path: Path) -> None:
    for number in range(3):
        leave(tmp_path, f"rank-{number}", RANK, decode_tokens=2**62, prefill_tokens_dense=-(2**62))
    assert retire_dead(tmp_path, 0.0) == 3
    (page,) = CachedPages(tmp_path, 0).pages()
    assert page.scalar("decode_tokens") == 2**63 - 1
    assert page.scalar("prefill_tokens_dense") == -(2**63)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, "rank-1", RANK, tiles=[9, 3, 9, 3])
    before = totals(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        retire_dead(tmp_path, 0.0)
    assert totals(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["rank-1.stats"]


def test_what_is_added_up_says_nothing_of_the_present(tmp_path: Path) -> None:
    labels = {"model_name": "m", "engine": "0", "rank": "0", "impl": "hopper"}
    living = StatsWriter(tmp_path, "rank-live", kind=RANK, labels=labels, fields=rank_fields(2, 1))
    living.update(tiles=[1, 1, 1, 1], layers_voting=2)
    leave(tmp_path, "rank-1", RANK, tiles=[9, 3, 9, 3])
    retire_dead(tmp_path, 0.0)
    (total,) = rank_totals(CachedPages(tmp_path, 0).pages())
    assert (total.impl, total.layers_voting, total.alive) == ("hopper", 2, True)
    assert total.by_layer() == {0: (10, 4), 1: (10, 4)}
    living.close()
