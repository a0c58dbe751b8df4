"""Which implementation runs a problem, and why not a better one."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from blasst.kernels.errors import InvalidInputError, UnsupportedError
from blasst.kernels.support import unsupported_reasons
from blasst.kernels.types import Impl, Problem

if TYPE_CHECKING:
    import torch

    from blasst.kernels.call import Call

    Run: TypeAlias = Callable[[Call, torch.Tensor, torch.Tensor | None], torch.Tensor]

logger = logging.getLogger("blasst.kernels")

AUTO = "auto"
_MODULES = {
    Impl.BLACKWELL: "blasst.kernels.blackwell.launch",
    Impl.HOPPER: "blasst.kernels.hopper.launch",
    Impl.TRITON: "blasst.kernels.triton.launch",
    Impl.CPU: "blasst.kernels.cpu",
    Impl.CPU_TORCH: "blasst.kernels.cpu_torch",
    Impl.REFERENCE: "blasst.kernels.reference",
}
_AUTO_ORDER = (Impl.BLACKWELL, Impl.HOPPER, Impl.TRITON, Impl.CPU, Impl.CPU_TORCH)


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and what speaks against each better one."""

    impl: Impl
    reasons: Mapping[Impl, tuple[str, ...]]

    def __str__(self) -> str:
        against = "; ".join(f"not {impl}: {', '.join(r)}" for impl, r in self.reasons.items())
        return f"{self.impl} ({against})" if against else str(self.impl)


@functools.lru_cache(maxsize=256)
def choose(problem: Problem, impl: str = AUTO) -> Choice:
    """The implementation for `impl`, or the best one for "auto" (never the reference).

    Logs each new automatic choice once. Raises InvalidInputError for an unknown name, and
    UnsupportedError with every reason when nothing can run.
    """
    if impl != AUTO:
        if impl not in list(Impl):
            raise InvalidInputError(
                [f"impl {impl!r} is unknown; choose one of {', '.join([AUTO, *Impl])}"]
            )
        named = Impl(impl)
        reasons = unsupported_reasons(problem, named)
        if reasons:
            raise UnsupportedError([f"{named}: {reason}" for reason in reasons])
        return Choice(named, {})
    against: dict[Impl, tuple[str, ...]] = {}
    for candidate in _AUTO_ORDER:
        reasons = unsupported_reasons(problem, candidate)
        if not reasons:
            choice = Choice(candidate, against)
            logger.info("attention runs on %s", choice)
            return choice
        against[candidate] = tuple(reasons)
    raise UnsupportedError(
        [f"{candidate}: {reason}" for candidate, rs in against.items() for reason in rs]
    )


@functools.cache
def implementation(impl: Impl) -> Run:
    """Its `run`: fills the output, adds to the counters, returns lse. Loaded at the first use."""
    run: Run = importlib.import_module(_MODULES[impl]).run
    return run
