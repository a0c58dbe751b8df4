"""What compute-sanitizer says is read fail-closed; the runs themselves need a GPU and the tool."""

from __future__ import annotations

import shutil
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from blasst.kernels.instruments import sanitize

CLEAN = f"{sanitize.RAN}\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CLEAN, 0),
        (f"{sanitize.RAN}\n========= ERROR SUMMARY: 12 errors\n", 12),
        (f"{sanitize.RAN}\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)\n", 3),
        ("========= ERROR SUMMARY: 0 errors\n", None),  # not every problem ran
        (f"{sanitize.RAN}\n========= Error: Device not supported\n", None),
    ],
)
def test_no_summary_is_no_verdict(text: str, found: int | None) -> None:
    assert sanitize.errors_found(text) == found


def fake(folder: Path, says: str) -> str:
    program = folder / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\ncase "$*" in {says} esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def summary(count: int) -> str:
    return f"echo {sanitize.RAN!r}; echo '========= ERROR SUMMARY: {count} errors';;"


def test_planted_faults_must_be_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = fake(tmp_path, f"*everything) {summary(0)} *) {summary(1)}")
    assert sanitize.main(["--sanitizer", good]) == 0
    assert capsys.readouterr().out.count("as it should be") == 8
    assert sanitize.main(["--sanitizer", good, "--impl", "triton"]) == 0
    assert capsys.readouterr().out.count("as it should be") == 6
    blind = fake(tmp_path, f"*) {summary(0)}")
    assert sanitize.main(["--sanitizer", blind, "--tool", "memcheck"]) == 1
    assert "planted: rows: 0 found, WRONG" in capsys.readouterr().out


def test_a_missing_tool_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--sanitizer", "no-such-sanitizer"]) == 2
    assert "no-such-sanitizer is not here" in capsys.readouterr().out


def test_what_is_read_without_a_barrier_is_a_race_here_too() -> None:
    """The fault that racecheck has to find, under the race detector of `blasst verify`."""
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    from blasst.kernels.hopper.launch import config_for
    from blasst.kernels.verify.build import Recipe
    from blasst.kernels.verify.subject import Workbench
    from blasst.kernels.verify.subjects import hopper
    from blasst.kernels.verify.subjects.attention import Shape

    config = config_for("bfloat16", 64, causal=True, page_size=0, vote=False, count=False)
    builder = "blasst.kernels.instruments.plants:build"
    recipe = Recipe.of("sm_90a", builder, **asdict(config), plant="order")
    bench = Workbench(replace(hopper.subject(config), recipe=recipe))
    case = hopper.case(config, Shape(((130, 130),), num_heads=1))
    races = [finding for finding in bench.run(case).run.findings.counts if finding.kind == "race"]
    assert any("RAW" in str(race) and "plants.py" in str(race) for race in races), races


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cuda.is_available() or not shutil.which("compute-sanitizer"),
    reason="needs an NVIDIA GPU and compute-sanitizer",
)
def test_kernels_under_the_sanitizer() -> None:
    assert sanitize.main(["--impl", "triton", "--tool", "memcheck"]) == 0
