"""The mask_mod of FlashAttention-4 and of our CuTe kernels, from the same expression."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.expr import Mask
from blasst.kernels.masks.program import build_program

CuteMaskMod = Callable[..., Any]

_MODS: dict[tuple[str, bool], CuteMaskMod] = {}


def cute_mask_mod(bound: AttentionMask) -> CuteMaskMod:
    """(batch, head, query, key, seqlen_info, aux_tensors) over Int32 vectors of one element ->
    Boolean vector. Read it with bound.aux_tensors; one function object per structure."""
    key = bound.mask.text(), bound.explicit_index
    if key not in _MODS:
        _MODS[key] = _make(bound.mask, bound.explicit_index)
    return _MODS[key]


def _make(mask: Mask, explicit_index: bool) -> CuteMaskMod:
    program = build_program(mask, _load, explicit_index=explicit_index)

    def mask_mod(
        batch: Any, head: Any, query: Any, key: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        return program(batch, query, key, aux_tensors)

    # FA4 keys compiled kernels by a callable's source, which is the same for all of ours.
    text = f"{mask.text()} explicit_index={explicit_index}"
    mask_mod.__cute_hash__ = hashlib.sha256(text.encode()).hexdigest()  # type: ignore[attr-defined]
    return mask_mod


def _load(tensor: Any, *at: Any) -> Any:
    """One element as a vector of one, as mask_mods compute."""
    import cutlass
    from cutlass import cute

    place = tuple(i if isinstance(i, int) else i[0] for i in at)
    vector = cute.make_rmem_tensor(1, cutlass.Int32)
    vector[0] = tensor[place if len(place) > 1 else place[0]]
    return vector.load()
