"""Block masks of attention problems by name: those of packed training, and hostile ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blasst.kernels.masks import Segments, bind
from blasst.kernels.masks.expr import Mask
from blasst.kernels.masks.mods import (
    Role,
    causal,
    document,
    shared_prefix,
    sliding_window,
    strip_history_thinking,
)
from blasst.kernels.testing import block_mask_from
from blasst.kernels.types import BlockMask, Geometry, MaskMod

DOCUMENT, TURN, SUFFIX, WINDOW = 150, 90, 110, 100  # tokens
NOBODY = 128  # query positions [NOBODY, 3 * NOBODY) see nothing under "blind tiles"


def segments(lengths: Sequence[int]) -> Segments:
    """One row a request, padded to the longest: short documents, turns that begin with thinking,
    and suffixes behind a prefix that takes a third."""
    length = max([*lengths, 1])
    token = torch.arange(length)
    rows: dict[str, list[torch.Tensor]] = {"document": [], "segment": [], "turn": [], "role": []}
    for n in lengths:
        prefix = n // 3
        rows["document"].append(token // DOCUMENT)
        rows["segment"].append(((token - prefix) // SUFFIX + 1).clamp(min=0))
        rows["turn"].append(token // TURN)
        thinks = token % TURN < TURN // 2
        rows["role"].append(torch.where(thinks, int(Role.THINK), int(Role.ANSWER)))
    documents, segment, turns, roles = (torch.stack(row).int() for row in rows.values())
    positions = token.expand(len(lengths), length).int().contiguous()
    return Segments(documents, segment, turns, roles, positions)


TRAINING: dict[str, Callable[[], Mask]] = {
    "shared_prefix": shared_prefix,
    "strip_history_thinking": strip_history_thinking,
    "document": document,
    "causal & document": lambda: causal() & document(),
    "sliding window": lambda: causal() & sliding_window(WINDOW),
}


def _hash(*values: Any) -> Any:
    """A number of 16 bits that looks random; values: integers or tensors of them."""
    mixed: Any = 0x9E37
    for value in values:
        mixed = (mixed ^ (value + 0x79B9)) * 40503 % 65521
        mixed = (mixed ^ (mixed >> 7)) * 30013 % 65521
    return mixed


def random_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Blocks of 128 x 128 that all, half or none of the rows see, other ones for each head."""
    state = _hash(b, h, q // 128, k // 128) % 4
    return (state == 0) | ((state == 1) & (_hash(b, h, q, k) % 2 == 0))


def blind_rows(b: Any, h: Any, q: Any, k: Any) -> Any:
    """One row in three sees nothing, and half of the others nothing of every fifth block."""
    return (q % 3 != 1) & ((k // 128 % 5 != 4) | (q % 2 == 0)) & (h >= 0)


def blind_tiles(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Two tiles of query rows visit nothing, every second block is for the others alone."""
    blind = (q >= NOBODY) & (q < 3 * NOBODY)
    return ~blind & ((k // 128 + q // 128) % 2 == 0)


HOSTILE: dict[str, MaskMod] = {
    "random blocks": random_blocks,
    "blind rows": blind_rows,
    "blind tiles": blind_tiles,
}
MASKS = (*TRAINING, *HOSTILE)
ONE_FOR_ALL = (*TRAINING, "blind tiles")  # lists that do not tell heads apart


def block_mask(
    name: str, seqlens: Sequence[tuple[int, int]], num_heads: int, geometry: Geometry
) -> BlockMask:
    """seqlens: (queries, keys) of each request."""
    if name in TRAINING:
        mod = bind(TRAINING[name](), segments([keys for _, keys in seqlens])).mask_mod
    else:
        mod = HOSTILE[name]
    heads = 1 if name in ONE_FOR_ALL else num_heads
    return block_mask_from(mod, seqlens=seqlens, num_heads=heads, geometry=geometry)
