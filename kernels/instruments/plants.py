"""Faults for compute-sanitizer to find, planted in the device code of the Hopper kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from blasst.kernels.cute.load import Source
from blasst.kernels.hopper import compile as hopper_compile
from blasst.kernels.hopper import consume, launch, prefill
from blasst.kernels.hopper.config import WARP, WARPGROUP, Config
from blasst.kernels.hopper.epilogue import store_output
from blasst.kernels.verify.subjects.configs import rebuild

rebase = consume.Consumer.rebase


@cute.jit
def rebase_behind_a_wait(self: consume.Consumer, settled: cutlass.Constexpr[bool]) -> cute.Tensor:
    """Single warps of a group wait for its products: all of them have to, or none."""
    warpgroup.wait_group(0)
    return rebase(self, settled)


@cute.jit
def store_unordered(
    consumer: consume.Consumer, target: Source, smem: cute.Tensor, lse: cute.Tensor, head: Int32
) -> None:
    """Before the output, each thread leaves a value for the next warp, and nobody waits for it."""
    values = cute.make_tensor(smem.iterator, cute.make_layout(cute.size(smem)))
    thread = consumer.thread
    values[thread] = smem.element_type(1.0)
    values[thread + WARPGROUP] = values[(thread + WARP) % WARPGROUP]
    store_output(consumer, target, smem, lse, head)


def _branch() -> None:
    consume.Consumer.rebase = rebase_behind_a_wait  # type: ignore[method-assign]


def _order() -> None:
    prefill.store_output = store_unordered  # type: ignore[attr-defined]


FAULTS: dict[str, Callable[[], None]] = {"branch": _branch, "order": _order}


def plant(name: str) -> None:
    """One of FAULTS, into the kernels that this process compiles from now on; none is kept."""
    FAULTS[name]()
    launch._compiled = functools.cache(hopper_compile.compile_prefill.__wrapped__)


def build(options: dict[str, Any]) -> Any:
    """In the compiling process of `blasst verify`. options: of a Config, and the plant's name."""
    plant(options.pop("plant"))
    return hopper_compile.compile_prefill(rebuild(Config, options))
