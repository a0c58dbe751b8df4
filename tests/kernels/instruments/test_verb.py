"""`blasst trace` without a GPU: drawing again, counters from a stand-in for ncu, refusals."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from blasst.kernels.hopper.config import Config
from blasst.kernels.instruments import capture, verb
from blasst.kernels.instruments.record import Recording
from blasst.kernels.instruments.steps import Step

READS = [
    (4, 0, Step.START, 100), (4, 0, Step.WAIT_SCORES, 150), (4, 0, Step.VOTE, 170),
    (4, 0, Step.EXP2, 300), (4, 1, Step.WAIT_SCORES, 800), (4, 1, Step.VOTE, 820),
]  # fmt: skip

CSV = """
import sys
print("==PROF== Connected")
columns = ["ID", "Kernel Name", "gpu__time_duration.sum", "smsp__inst_executed.sum",
           "smsp__inst_executed_pipe_xu.sum", "sm__inst_executed_pipe_tensor.sum"]
rows = [columns, ["", "", "us", "inst", "inst", "inst"]]
rows += [[str(i), "k", "100", "1,000", "400", "50"] for i in range(LAUNCHES)]
for row in rows:
    print(",".join(f'"{cell}"' for cell in row))
"""


def trace(*argv: str) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verb.configure(parser)
    return verb.run(parser.parse_args(argv))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording.json"
    reads = [(w, v, int(s), c) for w, v, s, c in READS]
    Recording("16k, vote", {4: "group 0 warp 0"}, reads, {}).save(path)
    return path


def test_a_recording_is_drawn_again(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert trace("--from", str(recording), "--out", str(out), "--window", "0,400") == 0
    printed = capsys.readouterr().out
    assert "| wait scores | 2 | 550 | 275 | 76.4% |" in printed
    assert "Scores were there already in 1 of 2 visits; products left out: 1." in printed
    ElementTree.fromstring((out / "trace.svg").read_text())
    assert len(json.loads((out / "trace.json").read_text())["traceEvents"]) == 3 + 5 + 1
    assert Recording.load(out / "recording.json") == Recording.load(recording)


def test_numbers_as_json(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("--from", str(recording), "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["steps"]["wait scores"]["total"] == 550
    assert (numbers["scores_early"], numbers["waits_for_scores"]) == (1, 2)


def fake_ncu(folder: Path, launches: int) -> str:
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\n" + CSV.replace("LAUNCHES", str(launches)))
    path.chmod(0o755)
    return str(path)


def test_counters_of_dense_against_skipping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--counters", "--skip-rate", "0", "--skip-rate", "0.95"]
    assert trace(*argv, "--ncu", fake_ncu(tmp_path, 3)) == 0
    assert "| | dense | vote 0% | vote 95% |" in capsys.readouterr().out
    assert trace(*argv, "--ncu", fake_ncu(tmp_path, 2)) == 1
    error = capsys.readouterr().err
    assert "ncu saw 2 launches, 3 ran: dense, vote 0%, vote 95%" in error


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--visits", "0"), 2, "--visits must be at least 1"),
        (("--problem", "4k"), 2, "problem '4k' is unknown; choose from 8k"),
        (("--skip-rate", "0", "--skip-rate", "0.5"), 2, "one --skip-rate at a time"),
        (("--counters", "--ncu", "/no/ncu"), 1, "Nsight Compute (/no/ncu) is not here"),
        (("--from", "/no/file.json"), 1, "/no/file.json"),
    ],
)
def test_refusals(
    argv: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(*argv) == code
    assert message in capsys.readouterr().err


def test_clocks_need_a_hopper_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("there is one")
    assert trace() == 1
    assert "it needs such a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("--skip-rate", "1"), ("--block", "1"), ("--window", "5,5")])
def test_wrong_usage_exits_2(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        trace(*argv)
    assert caught.value.code == 2


def test_warps_have_names_by_their_role() -> None:
    names = capture.warp_names(Config("bfloat16", 128, True, 0, True, True))
    assert len(names) == 16
    assert (names[0], names[4], names[15]) == ("load warp 0", "group 0 warp 0", "group 2 warp 3")


@pytest.mark.sm90
@pytest.mark.gpu
def test_clocks_of_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    assert trace("--problem", "8k", "--skip-rate", "0.75", "--out", str(tmp_path), "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["waits_for_scores"] > 8
    assert 0 < numbers["products_left_out"] < numbers["waits_for_scores"]
    steps = Recording.load(tmp_path / "recording.json").timeline()
    assert {"wait scores", "vote", "exp2"} <= set(steps.steps)
