"""The program for a B200, with the oracle in the kernel's place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from blasst.kernels.blackwell import hardware_steps, on_hardware
from blasst.kernels.blackwell.config import ROWS, Config
from blasst.kernels.reference import reference_attention
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, RaggedKV

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def oracle(config: Config) -> Callable[..., Any]:
    """The arguments of the compiled kernel, computed by the reference."""

    def run(*arguments: Any) -> None:
        q, k, v, out, lse, cu_q, lengths, table, skip_lambda, counters, *_ = arguments
        kv = RaggedKV(k, v, lengths) if table is None else PagedKV(k, v, table, lengths)
        spec = AttentionSpec(causal=config.causal, geometry=Geometry(ROWS, config.tile_n))
        want = reference_attention(q, kv, cu_q, spec=spec, skip_lambda=skip_lambda)
        out.copy_(want.out)
        lse.copy_(want.lse)
        if counters is not None:
            counters += want.counts(counters.shape[0])

    return run


@pytest.fixture
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [p for p in hardware_steps.parts() if p.name in ("schedules", "pages of 48")]
    assert len(chosen) == 2
    monkeypatch.setattr(hardware_steps, "parts", lambda: chosen)


@pytest.mark.usefixtures("few_parts")
def test_what_is_right_is_called_right() -> None:
    assert list(hardware_steps.correctness(oracle, "cpu")) == []
    assert list(hardware_steps.soak(oracle, hardware_steps.SOAKED[:1], 9, "cpu")) == []


@pytest.mark.usefixtures("few_parts")
def test_what_is_wrong_is_told() -> None:
    def off(config: Config) -> Callable[..., Any]:
        def run(*arguments: Any) -> None:
            oracle(config)(*arguments)
            arguments[3][0] += 1.0

        return run

    lines = list(hardware_steps.correctness(off, "cpu"))
    assert len(lines) == 2
    assert all("out" in line for line in lines)


@pytest.mark.usefixtures("few_parts")
def test_what_changes_between_launches_is_told() -> None:
    launches = 0

    def unstable(config: Config) -> Callable[..., Any]:
        def run(*arguments: Any) -> None:
            nonlocal launches
            launches += 1
            oracle(config)(*arguments)
            if launches > 8:
                arguments[3][0] += 1.0

        return run

    lines = list(hardware_steps.soak(unstable, hardware_steps.SOAKED[:1], 8, "cpu"))
    assert any("changed in 8 launches" in line for line in lines)


@pytest.mark.skipif(BLACKWELL, reason="this is such a GPU")
def test_elsewhere_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_hardware.main(["correctness"]) == 2
    said = capsys.readouterr().err
    assert "compute capability 10.0 or 10.3" in said or "install blasst[cuda]" in said
    with pytest.raises(SystemExit):
        on_hardware.main(["nothing"])


def test_without_torch_it_says_what_to_install() -> None:
    """Nothing but the wheel: no traceback."""
    hide = "import sys; sys.modules['torch'] = None\n"
    module = "from blasst.kernels.blackwell.on_hardware import main\nsys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", hide + module], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("install blasst[cuda]")
    assert "Traceback" not in done.stderr


def test_another_gpu_is_told_that_its_build_was_not_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware_steps, "SOAKED", hardware_steps.SOAKED[:1])
    monkeypatch.setattr(hardware_steps, "compiled", lambda config: (config, "0" * 64))
    (first, second) = hardware_steps.proved((10, 3))
    assert "gets another build" in first
    assert second.startswith("vote: the PTX is 0000")
    assert len(list(hardware_steps.proved((10, 0)))) == 1


@pytest.mark.sm100
@pytest.mark.skipif(not BLACKWELL, reason="needs a GPU of compute capability 10.0 or 10.3")
def test_on_the_gpu() -> None:
    assert list(hardware_steps.correctness(hardware_steps.compile_for)) == []
    assert list(hardware_steps.soak(hardware_steps.compile_for)) == []
