"""The program for a B200, with the oracle in the kernel's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blasst.kernels.blackwell import on_hardware
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
    chosen = [p for p in on_hardware.parts() if p.name in ("schedules", "pages of 48")]
    assert len(chosen) == 2
    monkeypatch.setattr(on_hardware, "parts", lambda: chosen)


@pytest.mark.usefixtures("few_parts")
def test_what_is_right_is_called_right() -> None:
    assert list(on_hardware.correctness(oracle, "cpu")) == []
    assert list(on_hardware.soak(oracle, on_hardware.SOAKED[:1], 9, "cpu")) == []


@pytest.mark.usefixtures("few_parts")
def test_what_is_wrong_is_told() -> None:
    def off(config: Config) -> Callable[..., Any]:
        def run(*arguments: Any) -> None:
            oracle(config)(*arguments)
            arguments[3][0] += 1.0

        return run

    lines = list(on_hardware.correctness(off, "cpu"))
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

    lines = list(on_hardware.soak(unstable, on_hardware.SOAKED[:1], 8, "cpu"))
    assert any("changed in 8 launches" in line for line in lines)


@pytest.mark.skipif(BLACKWELL, reason="this is such a GPU")
def test_elsewhere_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_hardware.main(["correctness"]) == 2
    assert "compute capability 10.0 or 10.3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        on_hardware.main(["nothing"])


@pytest.mark.sm100
@pytest.mark.skipif(not BLACKWELL, reason="needs a GPU of compute capability 10.0 or 10.3")
def test_on_the_gpu() -> None:
    assert list(on_hardware.correctness(on_hardware.compile_for)) == []
    assert list(on_hardware.soak(on_hardware.compile_for)) == []
