"""The command, the model of time, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blasst.kernels.verify import costs, plans, timing, verb
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.program import Program
from blasst.kernels.verify.subjects import fa4


@pytest.fixture
def command() -> Callable[..., int]:
    def run(*words: str) -> int:
        parser = argparse.ArgumentParser()
        verb.configure(parser)
        return verb.run(parser.parse_args(words))

    return run


@pytest.mark.parametrize(
    "words",
    [("sm90", "--shape", "5"), ("sm90", "--shape", "4,4,3,2"), ("sm90", "--seeds", "0"),
     ("sm80",), ("sm90", "--mag", "x"), ("sm90", "--mag", "nan"), ("sm90", "--seeds", "2.5"),
     ("sm90", "--shape", "4,4", "--skip-rate", "1.5")],
)  # fmt: skip
def test_wrong_usage(words: tuple[str, ...], command: Callable[..., int]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(*words)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sm90", "--skip-rate", "0.5"), "--skip-rate needs --shape"),
        (("fa4", "--mag", "2500"), "are of our own kernels"),
        (("sm90", "--own-p"), "--own-p is of sm100"),
        (("sm90", "--dense", "--mag", "5"), "leave out --dense or --mag"),
        (("sm90", "--timeline", "t.svg"), "SM100 kernels only"),
        (("sm100", "--timeline", "/no/such/folder/t.svg"), "does not exist"),
        (("fa4", "--mask", "document"), "are of our own kernels"),
        (("sm90", "--mask", "x"), "'x' is not one of shared_prefix, "),
    ],
)
def test_options_that_do_not_fit(
    words: tuple[str, ...],
    message: str,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if plans.missing(words[0]):
        pytest.skip(plans.missing(words[0]) or "")
    assert command(*words) == 2
    assert message in capsys.readouterr().err


def test_report_and_timeline(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if fa4.missing():
        pytest.skip(fa4.missing() or "")
    picture = tmp_path / "fa4.svg"
    words = ("fa4", "--shape", "256,512", "--seeds", "1", "--timeline", str(picture), "--json")
    assert command(*words) == 0
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert report["ok"]
    assert report["witness"]["spills"] == 0
    assert report["witness"]["tensor_columns"] == 512
    assert report["coverage"]["reached"] > 0.85 * report["coverage"]["total"]
    assert len(report["cases"][0]["digests"]) == 1
    assert len(report["witness"]["fingerprint"]) == 64
    (case,) = report["cases"]
    assert case["problems"] == []
    assert case["shared_bytes"] == 232448
    assert case["exp2"] > 4 * 128 * 8
    assert "cycles in the model" in out.err
    drawn = picture.read_text()
    for lane in ("0 softmax 0", "12 mma", "14 load"):
        assert lane in drawn
    for step in ("exp2", "issue QK", "issue PV", "wait scores"):
        assert step in drawn


def test_pieces_of_a_segment_share_its_time(kernel: Callable[..., Any]) -> None:
    """32 exponentials, then 160 sums: together as long as the busiest pipe, and no longer."""
    body = [f" ex2.approx.ftz.f32 %r{i}, %r{i};" for i in range(32)]
    body += [f" add.f32 %r{40 + i % 160}, %r1, %r2;" for i in range(160)]
    program = Program.from_text(kernel("\n".join(body), {}).text())
    (segment,) = [s for s in program.steps if s is not None and s.end - s.at == 192]
    pieces = timing.chunks(program, segment)
    assert len(pieces) == 4
    assert sum(p.length for p in pieces) == pytest.approx(32 * 8)
    assert sum(p.busy["mufu"] for p in pieces) == pytest.approx(32 * 8)
    assert sum(p.busy["issue"] for p in pieces) == pytest.approx(192)
    assert len({p.length for p in pieces}) == 1


def test_every_cost_is_reachable() -> None:
    """No entry stands behind a shorter prefix that takes its place."""
    for at, (prefix, price) in enumerate(costs.COSTS):
        ins = Instruction(0, prefix, (), None, False, (0,), None, 1)
        assert costs.cost(ins) == price, prefix
        assert prefix not in [p for p, _ in costs.COSTS[:at]]
