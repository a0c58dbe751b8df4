"""Compiles the kernel for a Config, once per process; needs no GPU."""

from __future__ import annotations

import functools
from typing import Any

from blasst.kernels.blackwell.config import Config
from blasst.kernels.blackwell.prefill import BlackwellPrefill
from blasst.kernels.cute.compile import compile_kernel


@functools.cache
def compile_prefill(config: Config) -> Any:
    """The function of BlackwellPrefill.__call__ without its stream: the current one is used."""
    return compile_kernel(BlackwellPrefill(config))
