"""A mask bound to a layout: token tensors on a device, block lists on demand, and its forms."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks.expr import INDEX, Mask, field_names, parameters
from blasst.kernels.masks.lists import BlockLists, Tokens, build_lists
from blasst.kernels.masks.program import inputs, torch_program
from blasst.kernels.masks.segments import Segments
from blasst.kernels.types import BlockMask, Geometry

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

Fields = Mapping[str, torch.Tensor]
"""int32 [batch, seqlen] by field name; "index" only when tokens are not in their places."""

MaskMod = Callable[[Any, Any, Any, Any], torch.Tensor]


class AttentionMask:
    """Which keys the queries of one layout see. Make it with `bind`; it is immutable.

    query, key: the fields of each side; with "index" in both, tokens compare by that index and not
    by their place (a shard, or a permuted sequence). program: one object for all masks of one
    structure.
    """

    def __init__(self, mask: Mask, query: Fields, key: Fields) -> None:
        self.mask = mask
        self.query, self.key = dict(query), dict(key)
        self.explicit_index = INDEX in self.query
        if self.explicit_index != (INDEX in self.key):
            raise InvalidInputError(["give an index to both sides of a mask, or to none"])
        self.batch, self.seqlen_q = next(iter(query.values())).shape
        self.seqlen_k = next(iter(key.values())).shape[1]
        self.device = next(iter(query.values())).device
        names = inputs(mask, explicit_index=self.explicit_index)
        sides = {"query": self.query, "key": self.key}
        values = torch.tensor(parameters(mask) or (0,), dtype=torch.int32, device=self.device)
        self.tokens = Tokens(
            names,
            (*(sides[side][name] for side, name in names), values),
            self.batch,
            self.seqlen_q,
            self.seqlen_k,
        )
        self.program = torch_program(mask, explicit_index=self.explicit_index)
        self._lists: dict[Geometry, BlockLists] = {}
        self._blasst: dict[Geometry, BlockMask] = {}
        self._derived: dict[object, AttentionMask] = {}
        self._built = 0
        self._lock = threading.Lock()

    @property
    def aux_tensors(self) -> list[torch.Tensor]:
        """int32: what the mask_mods read, in order; all geometry travels here."""
        return list(self.tokens.tensors)

    @property
    def is_causal(self) -> bool:
        """Whether causality may be applied on top without a change: it only saves work."""
        return self.mask.is_causal and not self.explicit_index and self.seqlen_q == self.seqlen_k

    @property
    def mask_mod(self) -> MaskMod:
        """FlexAttention's: (batch, head, query, key) -> visible, positive logic, any head."""
        return _mask_mod(self.program, self.tokens.tensors)

    @torch.no_grad()
    def dense(self) -> torch.Tensor:
        """bool [batch, seqlen_q, seqlen_k], True = visible."""
        batch = torch.arange(self.batch, device=self.device)[:, None, None]
        query = torch.arange(self.seqlen_q, device=self.device)[:, None]
        key = torch.arange(self.seqlen_k, device=self.device)
        shape = self.batch, self.seqlen_q, self.seqlen_k
        visible: torch.Tensor = self.program(batch, query, key, self.tokens.tensors)
        return visible.expand(shape)

    def lists(self, geometry: Geometry, *, backward: bool = True) -> BlockLists:
        """Block lists, built once; both orientations, or the forward's alone."""
        with self._lock:
            held = self._lists.get(geometry)
            if held is None or (backward and held.by_key is None):
                held = build_lists(
                    self.mask, self.program, self.tokens, geometry, backward=backward
                )
                self._lists[geometry] = held
                self._built += 1
            return held

    def derived(self, name: object, make: Callable[[], AttentionMask]) -> AttentionMask:
        """A mask made from this one (a shard), kept as long as this one is."""
        with self._lock:
            if name not in self._derived:
                self._derived[name] = make()
            return self._derived[name]

    @property
    def lists_built(self) -> int:
        """How often block lists have been built, for shards of this mask too."""
        return self._built + sum(mask.lists_built for mask in list(self._derived.values()))

    def flex(self, geometry: Geometry, *, write_order: bool = False) -> FlexBlockMask:
        """FlexAttention's BlockMask, forward and backward lists included.

        write_order: with the order of dq for the deterministic FLASH backward (torch >= 2.13).
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        lists = self.lists(geometry)
        forward, backward = lists.by_query, lists.backward
        extra: dict[str, Any] = {}
        if write_order:
            partial, full = lists.write_order
            extra = {
                "dq_write_order": partial,
                "dq_write_order_full": full,
                "dq_kv_order_spt": True,
            }
        return FlexBlockMask(
            seq_lengths=(self.seqlen_q, self.seqlen_k),
            kv_num_blocks=forward.partial_counts,
            kv_indices=forward.partial_indices,
            full_kv_num_blocks=forward.full_counts,
            full_kv_indices=forward.full_indices,
            q_num_blocks=backward.partial_counts,
            q_indices=backward.partial_indices,
            full_q_num_blocks=backward.full_counts,
            full_q_indices=backward.full_indices,
            BLOCK_SIZE=(geometry.tile_m, geometry.tile_n),
            mask_mod=self.mask_mod,
            **extra,
        )

    def blasst(self, geometry: Geometry) -> BlockMask:
        """The form that prefill_attention takes: request i is row i of the batch. One object for
        each geometry, so that what a kernel makes of it is made once."""
        forward = self.lists(geometry, backward=False).by_query
        with self._lock:
            if geometry not in self._blasst:
                self._blasst[geometry] = BlockMask(
                    _from_context(self.mask_mod, self.seqlen_k - self.seqlen_q),
                    forward.partial_counts,
                    forward.partial_indices,
                    forward.full_counts,
                    forward.full_indices,
                )
            return self._blasst[geometry]

    @cached_property
    def cu_seqlens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [batch + 1] each: where the rows of the batch end, of queries and of keys. On the
        device once: a copy for each call would make the host wait."""
        ends = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
        return ends * self.seqlen_q, ends * self.seqlen_k


def _from_context(mask_mod: MaskMod, context: int) -> MaskMod:
    """mask_mod for query positions that count in keys: row i of a request is at context + i."""
    if context == 0:
        return mask_mod
    return lambda b, h, q, k: mask_mod(b, h, q - context, k)


def _mask_mod(program: Any, tensors: tuple[torch.Tensor, ...]) -> MaskMod:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        visible: torch.Tensor = program(b, q, k, tensors)
        return visible

    return mask_mod


@dataclass(frozen=True)
class CacheStats:
    """hits, misses: bindings found and made; evictions: dropped for room; builds: block lists made
    for the bindings that are still held."""

    hits: int
    misses: int
    evictions: int
    builds: int

    @property
    def hit_rate(self) -> float:
        """0 when nothing was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class MaskCache:
    """Bound masks by layout, least recently used out first; safe between threads.

    A layout is the content of the fields that the mask reads, so microbatches and steps with the
    same layout share tensors and block lists, and another document length is another layout.
    """

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 1:
            raise InvalidInputError([f"capacity {capacity} must be at least 1 layout"])
        self._capacity = capacity
        self._held: OrderedDict[object, AttentionMask] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = 0

    def bind(
        self, mask: Mask, segments: Segments, device: torch.device | str = "cpu"
    ) -> AttentionMask:
        """The mask over a packed batch; tensors on `device`."""
        for name, value, kind in (("mask", mask, Mask), ("segments", segments, Segments)):
            if not isinstance(value, kind):
                raise InvalidInputError(
                    [
                        f"{name} is {type(value).__name__}, it must be {kind.__name__}, as in "
                        "bind(causal() & document(), batch.segments, device)"
                    ]
                )
        device = _with_index(torch.device(device))
        names = {*field_names(mask, "query"), *field_names(mask, "key")}
        key = mask.text(), parameters(mask), segments.digest(sorted(names)), device
        with self._lock:
            if key in self._held:
                self._hits += 1
                self._held.move_to_end(key)
                return self._held[key]
            self._misses += 1
        # Any field will do for the shape of a mask that reads none. A copy: a collator may fill its
        # tensors again while this mask is held.
        fields = {
            name: segments.field(name).to(device, copy=True)
            for name in sorted(names or {"document"})
        }
        bound = AttentionMask(mask, fields, fields)
        with self._lock:
            # Another thread may have been faster: all must share one set of block lists.
            bound = self._held.setdefault(key, bound)
            while len(self._held) > self._capacity:
                self._held.popitem(last=False)
                self._evictions += 1
        return bound

    @property
    def stats(self) -> CacheStats:
        with self._lock:
            builds = sum(bound.lists_built for bound in self._held.values())
            return CacheStats(self._hits, self._misses, self._evictions, builds)


def _with_index(device: torch.device) -> torch.device:
    """Without an index it is another device after torch.cuda.set_device."""
    if str(device) != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device())


MASKS = MaskCache()
"""The cache that `bind` uses: one a process."""


def bind(mask: Mask, segments: Segments, device: torch.device | str = "cpu") -> AttentionMask:
    """The mask over a packed batch, from the process's cache (MASKS.stats shows the hit rate)."""
    return MASKS.bind(mask, segments, device)
