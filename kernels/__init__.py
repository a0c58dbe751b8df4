"""Attention that skips blocks: reference, CPU and GPU kernels behind one call, `prefill_attention`.

Nothing is imported until it is used: `blasst.kernels.threshold` and `blasst.kernels.exchange` need
the standard library alone, everything else needs torch, device code also its own tool chain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blasst.kernels.api import prefill_attention as prefill_attention
    from blasst.kernels.types import AttentionSpec as AttentionSpec
    from blasst.kernels.types import BlockMask as BlockMask
    from blasst.kernels.types import Geometry as Geometry
    from blasst.kernels.types import Impl as Impl
    from blasst.kernels.types import PagedKV as PagedKV
    from blasst.kernels.types import RaggedKV as RaggedKV

_HOME = {
    "prefill_attention": "api",
    **dict.fromkeys(
        ("AttentionSpec", "BlockMask", "Geometry", "Impl", "PagedKV", "RaggedKV"), "types"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
