"""The GPU's benchmark and checks, rehearsed on a CPU: what they print is what they measured."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from blasst.kernels.testing import DialOptions, dialled_inputs, low_blocks
from blasst.kernels.types import Geometry
from blasst.plugin.bench_plot import svg
from blasst.plugin.bench_ttft import Cell, break_even, chosen, contenders, markdown, sizes
from blasst.plugin.bench_ttft import main as bench_ttft

Environment = Callable[[Mapping[str, str]], dict[str, str]]
SMALL = ["--layers", "2", "--heads", "4,2,64", "--dtype", "float32", "--chunk", "512"]
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


def arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"rates": "0,0.5", "no_dense": False} | changes))


def test_contenders_in_the_order_of_the_table() -> None:
    names = [c.name for c in contenders(arguments())]
    assert names == [
        "stock", "ours, no threshold", "ours, dense kernel", "ours, skip 0%", "ours, skip 50%",
    ]  # fmt: skip
    assert [c.name for c in contenders(arguments(no_dense=True))] == [*names[:2], *names[3:]]
    assert [(c.rate, c.vote) for c in contenders(arguments())][-1] == (0.5, True)


def test_the_table_shows_ratios_and_skip_rates() -> None:
    where = {"gpu": "G", "vllm": "1", "torch": "2", "chunk": 512, "block_size": None}
    cells = [
        Cell(4096, 1, "stock", 0.1, 1.0, None, [0.1, 0.1], 0.1, 1.0),
        Cell(4096, 2, "ours, skip 50%", 0.0825, 0.825, 0.498, [0.08, 0.0825, 0.09], 0.06, 0.9),
    ]
    lines = markdown(cells, where).splitlines()
    assert lines[0].endswith("chunks of 512 tokens, pages of the default size")
    assert lines[4] == "| 4096 | 1 | stock |  | 100.0 | 1.000 | | | 2 |"
    assert lines[5] == "| 4096 | 2 | ours, skip 50% | 49.8% | 82.5 | 0.825 | 60.0 | 0.900 | 3 |"
    assert lines[-1] == "| 4096 | 2 | 50% | -10.0% at 50% skipped |"
    picture = svg(cells)
    assert "4096 tokens x 2" in picture
    assert picture.count("<circle") == 1  # stock has no skip rate


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        ([(0.0, 0.98), (0.5, 0.9)], "0%"),
        ([(0.0, 1.02), (0.5, 0.98)], "25%"),
        ([(0.0, 1.02), (0.4, 0.99), (0.6, 1.01), (0.8, 0.97)], "65%"),
        ([(0.0, 1.02), (0.95, 1.01)], "none up to 95%"),
    ],
)
def test_a_vote_pays_where_the_line_crosses_stock(
    points: list[tuple[float, float]], wanted: str
) -> None:
    assert break_even(points) == wanted


def test_sizes_are_lengths_times_batches_and_more() -> None:
    given = arguments(lengths="512,1024", batches="1,2", rounds=3, more="2048:8:1,4096:1:1:0.5")
    found = [(s.tokens, s.batch, s.rounds) for s in sizes(given)]
    assert found[:4] == [(512, 1, 3), (512, 2, 3), (1024, 1, 3), (1024, 2, 3)]
    assert found[4:] == [(2048, 8, 1), (4096, 1, 1)]
    few = [c.name for c in chosen(given, sizes(given)[-1])]
    assert few == ["stock", "ours, skip 50%"]
    assert chosen(given, sizes(given)[0]) == contenders(given)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("2048:8", "is not TOKENS:BATCH:ROUNDS"),
        ("1:0:1", "must be 1 or more"),
        ("8:1:1:0.3", "skip 30% is not in --rates"),
    ],
)
def test_bad_sizes_are_refused_and_leave_no_folder(
    more: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_ttft(["--more", more, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_low_blocks_are_those_of_dialled_inputs() -> None:
    geometry = Geometry(64, 128)
    x = dialled_inputs(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        seqlen=2000,
        skip_rate=0.6,
        options=DialOptions(geometry=geometry, seed=3),
    )
    assert torch.equal(low_blocks(2000, 2, 0.6, geometry, seed=3), x.low)
    assert x.low.any()


@pytest.mark.vllm
@pytest.mark.slow
def test_a_rehearsal_reaches_the_dialled_rates(
    tmp_path: Path, clean_environment: Environment
) -> None:
    run(
        [
            "blasst.plugin.bench_ttft", "--lengths", "1024", "--batches", "2", "--rates", "0,0.7",
            "--rounds", "1", *SMALL, "--out", str(tmp_path),
        ],
        clean_environment,
    )  # fmt: skip
    cells = json.loads((tmp_path / "ttft.json").read_text())["cells"]
    rates = {c["contender"]: c["skip_rate"] for c in cells}
    assert rates["stock"] is rates["ours, no threshold"] is None
    assert rates["ours, dense kernel"] is None  # no vote, so nothing is counted
    assert rates["ours, skip 0%"] == 0
    assert rates["ours, skip 70%"] == pytest.approx(0.7, abs=0.1)
    assert all(0 < c["mean_ttft_s"] <= c["ttft_s"] for c in cells)
    assert all(len(c["times_s"]) == 1 for c in cells)
    assert "ours, skip 70%" in (tmp_path / "ttft.md").read_text()


@pytest.mark.vllm
@pytest.mark.slow
def test_the_checks_hold_on_a_cpu(
    tmp_path: Path, tiny_model: Path, clean_environment: Environment
) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, lengths in (("short", (300, 900)), ("long", (1500,))):
        lines = [
            json.dumps({"prompt": torch.randint(3, 250, (n,), generator=generator).tolist()})
            for n in lengths
        ]
        (tmp_path / name).write_text("\n".join(lines))
    run(
        [
            "blasst.plugin.check_gpu", str(tiny_model), "--short", str(tmp_path / "short"),
            "--long", str(tmp_path / "long"), "--mags", "4500,1000", "--graphs", "eager",
            "--dtype", "float32", "--chunk", "512", "--out", str(tmp_path), "--lora",
            "--options", '{"enable_prefix_caching": true}',
            "--steps", "tokens,counts,skips,waits,prefix",
        ],
        clean_environment,
    )  # fmt: skip
    found = json.loads((tmp_path / "check.json").read_text())
    steps = ("tokens", "counts", "skips", "waits", "prefix")
    assert all(found[f"{step}, eager"]["held"] for step in steps)
    assert found["tokens, eager"]["differ"]["without the adapter"] > 0
    assert found["counts, eager"]["largest_share_apart"] == 0
    assert found["waits, eager"]["forward"] > 0


def run(arguments: list[str], clean_environment: Environment) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", *arguments],
        env=clean_environment(CPU),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-4000:]
