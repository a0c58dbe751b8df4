"""Runs the CuTe DSL form of a mask on the CPU: the DSL compiles host functions too."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.cute_mod import cute_mask_mod

# Read by triton.jit when the kernel's module is imported, so before any test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


class CuteRunner:
    """run(bound) -> bool [batch, seqlen_q, seqlen_k]; `traces` counts how often a mod is traced."""

    def __init__(self) -> None:
        self.traces = 0
        self._fills: dict[Any, Any] = {}

    def __call__(self, bound: AttentionMask) -> torch.Tensor:
        from cutlass.cute.runtime import from_dlpack

        mod = cute_mask_mod(bound)
        out = torch.zeros(bound.batch, bound.seqlen_q, bound.seqlen_k, dtype=torch.int32)
        tensors = [
            from_dlpack(t.contiguous()).mark_layout_dynamic(t.dim() - 1) for t in bound.aux_tensors
        ]
        arguments = from_dlpack(out).mark_layout_dynamic(2), tensors
        if mod not in self._fills:
            import cutlass.cute as cute

            self._fills[mod] = cute.compile(self._fill(mod), *arguments)
        self._fills[mod](*arguments)
        return out.bool()

    def _fill(self, mod: Callable[..., Any]) -> Any:
        import cutlass
        import cutlass.cute as cute

        def vector(value: Any) -> Any:
            held = cute.make_rmem_tensor(1, cutlass.Int32)
            held[0] = value
            return held.load()

        def traced(*arguments: Any) -> Any:
            self.traces += 1
            return mod(*arguments)

        @cute.jit
        def fill(out: cute.Tensor, aux_tensors: list):  # type: ignore[no-untyped-def, type-arg]
            for b in range(out.shape[0]):
                for q in range(out.shape[1]):
                    for k in range(out.shape[2]):
                        place = vector(b), vector(cutlass.Int32(0)), vector(q), vector(k)
                        seen = cutlass.Boolean(traced(*place, None, aux_tensors)[0])
                        out[b, q, k] = cutlass.Int32(1) if seen else cutlass.Int32(0)

        return fill


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors of these tests are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def run_cute() -> CuteRunner:
    return CuteRunner()
