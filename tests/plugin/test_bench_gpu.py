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
from blasst.plugin.bench_table import break_even, cells_of, interval, markdown
from blasst.plugin.bench_ttft import contender, sizes
from blasst.plugin.bench_ttft import main as bench_ttft

Environment = Callable[[Mapping[str, str]], dict[str, str]]
SMALL = ["--layers", "2", "--heads", "4,2,64", "--dtype", "float32", "--chunk", "512"]
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


WHERE = {"gpu": "G", "vllm": "1", "torch": "2", "chunk": 512, "large": 2048, "page": None}


def arguments(**changes: Any) -> argparse.Namespace:
    given = {"lengths": "", "batches": "1", "rounds": 3, "more": "", "who": "off+0.5", "page": None}
    return argparse.Namespace(**(given | changes))


def test_contenders_are_what_their_keys_say() -> None:
    named = {key: contender(key) for key in ("off", "dense", "again", "0.5", "large0.5")}
    assert [c.name for c in named.values()] == [
        "ours, no threshold",
        "ours, dense kernel",
        "stock again",
        "ours, skip 50%",
        "ours, skip 50%, large chunks",
    ]
    assert [key for key, c in named.items() if c.vote] == ["dense", "0.5", "large0.5"]
    assert [key for key, c in named.items() if c.engine == "stock"] == ["again"]
    assert [key for key, c in named.items() if c.large] == ["large0.5"]
    assert named["large0.5"].rate == 0.5


def test_the_table_shows_ratios_within_rounds() -> None:
    times = {
        "stock": {0: [0.1], 1: [0.2], 2: [0.1]},
        "ours, skip 50%": {0: [0.08], 1: [0.16], 2: [0.09]},
        "ours, skip 50%, large chunks": {1: [0.1]},
        "ours, skip 75%": {3: [0.1]},  # in no round of stock
    }
    rates = {"ours, skip 50%": 0.498, "ours, skip 50%, large chunks": 0.498}
    cells = cells_of((4096, 1, 16), times, rates)
    lines = markdown(cells, WHERE).splitlines()
    assert lines[0].endswith(
        "(large ones: 2048), pages of the default size where no other is named"
    )
    assert lines[4:7] == [
        "| 4096 | 1 | 16 | stock |  | 100.0 | 1.0000 | 1.0000 to 1.0000 | | | 3 |",
        "| 4096 | 1 | 16 | ours, skip 50% | 49.8% | 90.0 | 0.8000 | 0.8000 to 0.9000 | | | 3 |",
        "| 4096 | 1 | 16 | ours, skip 50%, large chunks | 49.8% | 100.0 | 0.5000 | "
        "0.5000 to 0.5000 | | | 1 |",
    ]
    assert lines[-1] == "| 4096 | 1 | 16 | 50% | -20.0% at 50% | -20.0% at 50% |"
    picture = svg(cells)
    assert "4096 tokens, pages of 16" in picture
    assert picture.count("<circle") == 1  # neither stock nor other chunks than stock's


def test_of_several_prompts_the_mean_counts_and_the_last_is_shown() -> None:
    times = {"stock": {0: [0.1, 0.3]}, "ours, skip 0%": {0: [0.05, 0.25]}}
    stock, ours = cells_of((4096, 2, None), times, {"ours, skip 0%": 0.0})
    assert (stock.ttft_s, stock.last_s) == pytest.approx((0.2, 0.3))
    assert (ours.over_stock, ours.last_over_stock) == pytest.approx((0.75, 0.25 / 0.3))
    shown = markdown([ours], WHERE)
    assert "| 4096 | 2 |  | ours, skip 0% | 0.0% | 150.0 | 0.7500 |" in shown
    assert "| 250.0 | 0.833 | 1 |" in shown
    assert "4096 tokens x 2" in svg([stock, ours])


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(1, (0, 0)), (2, (0, 1)), (5, (0, 4)), (6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (20, (5, 14))],
)
def test_the_interval_is_that_of_the_sign_test(count: int, wanted: tuple[int, int]) -> None:
    assert interval([float(x) for x in range(count)][::-1]) == wanted


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
    more = "2048:8:1,4096:1:1:0.7,4096:1:2::128"
    found = sizes(arguments(lengths="512,1024", batches="1,2", more=more, page=16))
    assert [(s.tokens, s.batch, s.rounds, s.page) for s in found] == [
        (512, 1, 3, 16),
        (512, 2, 3, 16),
        (1024, 1, 3, 16),
        (1024, 2, 3, 16),
        (2048, 8, 1, 16),
        (4096, 1, 1, 16),
        (4096, 1, 2, 128),
    ]
    assert [[c.key for c in s.who] for s in found[3:]] == [
        ["off", "0.5"], ["off", "0.5"], ["0.7"], ["off", "0.5"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("2048:8", "is not TOKENS:BATCH:ROUNDS"),
        ("1:0:1", "must be 1 or more"),
        ("8:1:1:of", "of is neither stock, again, off, dense nor a rate"),
        ("8:1:1:1.5", "the skip rate 1.5 is not in 0..1"),
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
            "blasst.plugin.bench_ttft", "--lengths", "1024", "--batches", "2", "--rounds", "1",
            "--who", "off+dense+0+0.7", "--large", "1024", "--out", str(tmp_path), *SMALL,
            "--more", "1024:2:1:0.7,1024:1:1:largestock+large0.7:32",
        ],
        clean_environment,
    )  # fmt: skip
    found = json.loads((tmp_path / "ttft.json").read_text())["cells"]
    cells = {c["contender"]: c for c in found if c["page"] is None}
    rates = {name: c["skip_rate"] for name, c in cells.items()}
    assert rates["stock"] is rates["ours, no threshold"] is None
    assert rates["ours, dense kernel"] is None  # no vote, so nothing is counted
    assert rates["ours, skip 0%"] == 0
    assert rates["ours, skip 70%"] == pytest.approx(0.7, abs=0.1)
    assert all(0 < c["ttft_s"] <= c["last_s"] for c in found)
    assert [len(c["times_s"]) for c in cells.values()] == [2, 1, 1, 1, 2]
    large = {c["contender"]: c for c in found if c["page"] == 32}
    assert list(large) == ["stock", "stock, large chunks", "ours, skip 70%, large chunks"]
    assert large["ours, skip 70%, large chunks"]["skip_rate"] == pytest.approx(0.7, abs=0.1)
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
            "--lora-in-order", "--another", "CPU_ATTN",
            "--options", '{"enable_prefix_caching": true}',
            "--steps", "tokens,counts,skips,waits,prefix",
        ],
        clean_environment,
    )  # fmt: skip
    found = json.loads((tmp_path / "check.json").read_text())
    steps = ("tokens", "counts", "skips", "waits", "prefix")
    assert all(found[f"{step}, eager"]["held"] for step in steps)
    differ = found["tokens, eager"]["differ"]
    assert differ["without the adapter"] > 0
    assert differ["CPU_ATTN"] == differ["CPU_ATTN, one by one"] == 0
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
