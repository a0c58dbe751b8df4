"""Recordings and their comparison, without the GPU that would record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from blasst.kernels.verify import calibrate, numerics, recording
from blasst.kernels.verify.calibrate import agreement, units_apart
from blasst.kernels.verify.float_ops import TABLE
from blasst.kernels.verify.recording import Device, Problem
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.subjects import hopper


def interpreted(problem: Problem, case: Case) -> None:
    assert Workbench(hopper.subject(problem.config)).run(case, seed=9).ok


def test_a_recording_is_compared_by_units_in_the_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    problems = {"vote": recording.PROBLEMS["vote"]}
    for module in (calibrate, recording):
        monkeypatch.setattr(module, "PROBLEMS", problems)
    monkeypatch.setattr(recording, "FUNCTIONS", ("rcp.approx.ftz.f32",))
    monkeypatch.setattr(recording, "MANTISSAS", 1 << 12)
    lines: list[str] = []
    target = tmp_path / "same.npz"
    device = Device("interpreter", lambda opcode, x: 1 / x, interpreted)
    assert recording.record(target, device, lines.append) == 0
    assert lines[-1] == "vote: equals the oracle"
    assert calibrate.main(["compare", str(target)]) == 0
    out = capsys.readouterr().out
    assert out.count("100.000% of") == 4
    with np.load(target) as kept:
        values = dict(kept)
    values["vote/outputs/out"][::128] ^= 12  # the low bytes of every 64th value
    np.savez(tmp_path / "off.npz", **values)
    assert calibrate.main(["compare", str(tmp_path / "off.npz")]) == 1
    (line,) = [t for t in capsys.readouterr().out.splitlines() if t.startswith("vote, out")]
    assert line.endswith("at most 12")


def test_what_fails_is_counted_and_the_rest_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(problem: Problem, case: Case) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(recording, "PROBLEMS", {})
    monkeypatch.setattr(recording, "FUNCTIONS", ("rcp.approx.ftz.f32", "ex2.approx.ftz.f32"))
    monkeypatch.setattr(recording, "MANTISSAS", 1 << 12)

    def unary(opcode: str, x: torch.Tensor) -> torch.Tensor:
        if opcode.startswith("ex2"):
            raise RuntimeError("no device")
        return torch.nextafter(1 / x, torch.tensor(9e9))

    lines: list[str] = []
    target = tmp_path / "half.npz"
    assert recording.record(target, Device("none", unary, broken), lines.append) == 1
    assert lines[-1] == "ex2.approx.ftz.f32: FAILED: RuntimeError: no device"
    with np.load(target) as kept:
        assert set(kept) == {"device", "functions/rcp.approx.ftz.f32"}
        found = agreement("rcp", kept["functions/rcp.approx.ftz.f32"])
    assert found.by_units == (0.0, 1.0, 0.0, 0.0)
    assert str(found).startswith("rcp: 0.000% of ")
    assert str(found).endswith("off 100.000% by 1; at most 1")


def test_units() -> None:
    a = torch.tensor([1.0, -0.0, 1e-8, -2.0, float("-inf")])
    b = torch.tensor([1.0 + 2**-22, 0.0, -1e-8, -2.0 + 2**-22, float("-inf")])
    assert units_apart(a, b).tolist() == [-2, 0, 0, -2, 0]
    c = torch.tensor([1.0, -1.0, 0.0], dtype=torch.bfloat16)
    d = torch.tensor([1 + 2**-7, -1 + 2**-8, -0.0], dtype=torch.bfloat16)
    assert units_apart(c, d).tolist() == [-1, -1, 0]
    assert units_apart(torch.tensor([5, 2]), torch.tensor([3, 2])).tolist() == [2, 0]


def test_sums_as_hopper_makes_them() -> None:
    """Terms are cut 25 bits below the largest exponent, products by that of their factors."""
    a, b = np.zeros((1, 16), np.float32), np.zeros((3, 16), np.float32)
    a[0, :3] = 1.5, 1.0, 1.0
    b[0, :2] = 1.5, 2.0**-25  # 2.25: its exponent counts as 0
    b[1, :2] = 1.5, 2.0**-26
    b[2, :3] = 1.5, 2.0**-24, 2.0**-24  # 2.25 + 2**-23 is cut to float32
    before = np.array([[0.0, 0.0, 0.0]], np.float32)
    assert numerics.aligned_sum(a, b, before).tolist() == [[2.25, 2.25, 2.25]]
    b[:, 0] = 0.0
    small = [2.0**-25, 2.0**-26, 2.0**-23]
    assert numerics.aligned_sum(a, b, None).tolist() == [small]
    one = np.ones((1, 3), np.float32)
    assert numerics.aligned_sum(a, b, one).tolist() == [[1.0, 1.0, 1.0 + 2.0**-23]]
    assert numerics.aligned_sum(a, b, -one).tolist()[0][1] == -1.0
    assert numerics.float32_sum(a, b, one).tolist() == [[1.0, 1.0, 1.0 + 2.0**-23]]


def test_products_and_differences_are_fused_as_the_assembler_does() -> None:
    text = """
    mul.f32 %r1, %r2, %r3;
    sub.f32 %r4, %r1, %r5;
    mul.f32 %r6, %r2, %r3;
    sub.f32 %r7, %r6, %r5;
    add.f32 %r8, %r6, %r6;
    sub.f32 %r9, %r2, %r3;"""
    fused = numerics.contracted(text)
    assert "fma.rn.f32 %r4, %r2, %r3, %r1;" in fused
    assert "neg.f32 %r1, %r5;" in fused
    assert "sub.f32 %r7, %r6, %r5;" in fused  # %r6 has another use
    assert "sub.f32 %r9, %r2, %r3;" in fused


def test_rounding_as_hopper_ends_with_its_block() -> None:
    """Tables of exact results, a unit up: the instructions follow them, and only inside."""
    m = np.arange(numerics.MANTISSA, dtype=np.float64) / numerics.MANTISSA
    up = np.float32(np.inf)
    exp2 = np.nextafter(np.exp2(-(1 + m)).astype(np.float32), up)
    rcp = np.nextafter((1 / (1 + m)).astype(np.float32), up)
    x = np.array([-1.5, -0.25, -30.125, -np.inf, -2.0], np.float32)
    out = np.empty_like(x)
    before = dict(TABLE)
    with numerics.hopper(exp2, rcp):
        assert numerics.product is numerics.aligned_sum
        TABLE["ex2.approx.ftz.f32"].function(x, out)
        want = np.nextafter(np.exp2(x.astype(np.float64)).astype(np.float32), up)
        want[3] = 0.0
        assert out.tolist() == want.tolist()
        TABLE["rcp.approx.ftz.f32"].function(-x, out)
        want = np.nextafter((1 / -x.astype(np.float64)).astype(np.float32), up)
        want[3] = 0.0
        assert out.tolist() == want.tolist()
    assert numerics.product is numerics.float32_sum
    assert before == TABLE
