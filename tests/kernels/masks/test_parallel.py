"""Sequences split between processes (gloo): forward and backward equal to one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blasst.kernels.masks.parallel import Order, Shard

RANK = Path(__file__).parent / "scripts" / "parallel_rank.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_the_whole(ranks: int, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(ranks), str(tmp_path / "store")],
            env={**os.environ, "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    for way in ("ulysses contiguous", "gathered zigzag", "ring contiguous", "ring zigzag"):
        assert said[0].count(f"same: {way}") == 2


def test_zigzag_gives_each_rank_both_ends() -> None:
    assert Shard(1, 2, "zigzag").places(16).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert Shard(0, 2, "zigzag").places(16).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    orders: tuple[Order, ...] = ("contiguous", "zigzag")
    for order in orders:
        held = torch.cat([shard.places(48) for shard in Shard(0, 4, order).others()])
        assert held.sort().values.tolist() == list(range(48))
