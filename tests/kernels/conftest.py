"""The CPU implementations: each test that asks for one runs on both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from blasst.kernels.native import build


@pytest.fixture(scope="session")
def cpu_impls() -> list[str]:
    """Those that can run here."""
    return ["cpu-torch"] if build.reasons() else ["cpu", "cpu-torch"]


@pytest.fixture(params=["cpu", "cpu-torch"])
def cpu_impl(request: pytest.FixtureRequest) -> str:
    return _runnable(request.param)


@pytest.fixture
def attend(cpu_impl: str) -> Callable[..., Any]:
    """prefill_attention by one of the CPU implementations; (out, lse)."""
    from blasst.kernels.api import prefill_attention

    return partial(prefill_attention, impl=cpu_impl)


@pytest.fixture(params=["reference", "cpu", "cpu-torch"])
def host_impl(request: pytest.FixtureRequest) -> str:
    return _runnable(request.param)


def _runnable(impl: str) -> str:
    if impl == "cpu" and build.reasons():
        pytest.skip("; ".join(build.reasons()))
    return impl
