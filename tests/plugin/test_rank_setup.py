"""The worker's start: kernels are tried before any request, and a failure is one clear error."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from blasst.kernels.errors import UnsupportedError
from blasst.kernels.plan import Plan, plan
from blasst.kernels.types import Problem
from blasst.plugin import rank_setup
from blasst.plugin.rank_setup import KernelError

PROBLEM = Problem(128, 8, 2, "bfloat16", "cuda", (9, 0), page_size=16)


class CompilerError(Exception):
    """As those of a compiler: no RuntimeError, several coloured lines."""

    def __str__(self) -> str:
        return f"\n\x1b[91m{super().__str__()}\x1b[0m\n"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    rank_setup._try_out.cache_clear()
    calls: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(Plan, "rehearse", lambda self, device: calls.append((self.impl, device)))
    return calls


def test_a_kernel_is_tried_once_for_all_its_layers(
    tried: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.blasst"):
        for _ in range(3):
            rank_setup._try_out(plan(PROBLEM, "triton", 0.1), torch.device("cuda"))
    assert tried == [("triton", torch.device("cuda"))]
    assert sum("the triton kernel is ready after" in m for m in caplog.messages) == 1


def test_nothing_is_tried_on_a_cpu(tried: list[Any]) -> None:
    rank_setup._try_out(plan(PROBLEM, "cpu", 0.1), "cpu")
    assert tried == []


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError(["k has stride 2"]),
        RuntimeError("CUDA out of memory"),
        ImportError("cutlass"),
        CompilerError("ptxas ended with 255"),
    ],
)
def test_a_kernel_that_fails_stops_the_start(
    tried: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: Plan, device: Any) -> None:
        raise error

    monkeypatch.setattr(Plan, "rehearse", fail)
    with pytest.raises(KernelError) as caught:
        rank_setup._try_out(plan(PROBLEM, "triton", 0.1), "cuda")
    message = str(caught.value)
    assert "the triton kernel does not run for head_dim 128, bfloat16, pages of 16" in message
    assert str(error.args[0]) in message
    assert "\n" not in message
    assert "\x1b" not in message
    assert "--attention-backend" in message


def test_the_rehearsal_is_one_row_over_one_page() -> None:
    problem = Problem(64, 4, 2, "float32", page_size=16)
    plan(problem, "cpu-torch", 0.1).rehearse("cpu")
    plan(problem, "reference", 0.1).rehearse("cpu")
