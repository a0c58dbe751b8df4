"""Direct FlashAttention-4: dense layout, block-sparse forward and backward, no torch.compile."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from blasst.kernels.errors import UnsupportedError
from blasst.kernels.masks.cute_mod import cute_mask_mod
from blasst.kernels.masks.inputs import Inputs, Result
from blasst.kernels.masks.lists import BlockLists, Orientation
from blasst.kernels.types import Geometry

GEOMETRIES = {9: Geometry(128, 128), 10: Geometry(256, 128)}
"""The block size of FA4's lists by compute capability: two query tiles are in flight on SM100."""

HEAD_DIMS = range(8, 129, 8)


class Fa4(NamedTuple):
    """The parts of flash_attn.cute that are used."""

    interface: Any
    block_sparsity: Any


@functools.cache
def fa4_reasons() -> tuple[str, ...]:
    """Why flash_attn.cute cannot be imported, with the remedy; empty: it can."""
    new = _version("flash-attn-4")
    if new is None:
        return ("flash-attn-4 is not installed; install blasst[cuda]",)
    spec = importlib.util.find_spec("flash_attn")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not any((Path(place) / "cute" / "interface.py").exists() for place in places):
        old = _version("flash-attn") or "of another kind"
        return (
            f"flash-attn {old} at {places[0] if places else 'no place'} hides flash_attn.cute of "
            f"flash-attn-4 {new}; run pip uninstall flash-attn",
        )
    return tuple(
        f"flash-attn-4 needs the module {name}; install blasst[cuda]"
        for name in ("cutlass", "quack")
        if importlib.util.find_spec(name) is None
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_fa4() -> Fa4:
    """Raises UnsupportedError with fa4_reasons()."""
    reasons = fa4_reasons()
    if reasons:
        raise UnsupportedError(reasons)
    with warnings.catch_warnings():
        # Its dependencies use names that the installed CUTLASS calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return Fa4(
            importlib.import_module("flash_attn.cute.interface"),
            importlib.import_module("flash_attn.cute.block_sparsity"),
        )


def sparse_tensors(fa4: Fa4, orientation: Orientation, geometry: Geometry, **order: Any) -> Any:
    """FA4's BlockSparseTensorsTorch of one orientation."""
    return fa4.block_sparsity.BlockSparseTensorsTorch(
        mask_block_cnt=orientation.partial_counts,
        mask_block_idx=orientation.partial_indices,
        full_block_cnt=orientation.full_counts,
        full_block_idx=orientation.full_indices,
        block_size=(geometry.tile_m, geometry.tile_n),
        **order,
    )


def backward_tensors(fa4: Fa4, lists: BlockLists, *, deterministic: bool) -> Any:
    """The key-major lists, with the order of dq if deterministic. Raises if they were not built."""
    order: dict[str, Any] = {}
    if deterministic:
        partial, full = lists.write_order
        order = {"dq_write_order": partial, "dq_write_order_full": full, "spt": True}
    return sparse_tensors(fa4, lists.backward, lists.geometry, **order)


def run(x: Inputs, *, lists: BlockLists, deterministic: bool) -> Result:
    """lists: of FA4's geometry on this GPU, with the backward's half if x needs a gradient."""
    fa4 = load_fa4()
    backward = None
    if x.needs_grad:
        backward = backward_tensors(fa4, lists, deterministic=deterministic)
    result: Result = fa4.interface.flash_attn_func(
        x.q,
        x.k,
        x.v,
        softmax_scale=x.softmax_scale,
        mask_mod=cute_mask_mod(x.mask),
        aux_tensors=x.mask.aux_tensors,
        block_sparse_tensors=sparse_tensors(fa4, lists.by_query, lists.geometry),
        block_sparse_tensors_bwd=backward,
        deterministic=deterministic,
        return_lse=x.want_lse,
    )
    return result
