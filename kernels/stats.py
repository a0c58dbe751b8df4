"""Skip counters that live where the attention runs, and copies of them that never wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_SLOTS = 32
"""Copies under way at once: more than an engine has steps in its queue, pipelines included."""

_ABSENT = -1
_ABSENT_BYTE = b"\xff"
"""What each cell of a slot holds until its copy arrives, which is whole; counters are >= 0."""


@dataclass
class _Slot:
    """One copy on the host: all of `tiles` is there once none of it is _ABSENT. memory: the same
    as bytes, which are filled in the least time."""

    tiles: torch.Tensor
    number: int = 0
    note: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.tiles.numpy().data.cast("B")


class SkipCounters:
    """int64 [num_layers, num_kv_heads, {visited, skipped}], summed since construction."""

    def __init__(self, num_layers: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.tiles = torch.zeros(num_layers, num_kv_heads, 2, dtype=torch.int64, device=device)
        self._started = 0
        self._absent = _ABSENT_BYTE * (self.tiles.numel() * self.tiles.element_size())
        pinned = self.tiles.is_cuda
        self._slots = [
            _Slot(torch.zeros(self.tiles.shape, dtype=torch.int64, pin_memory=pinned))
            for _ in range(_SLOTS)
        ]

    def layer(self, index: int) -> torch.Tensor:
        """[num_kv_heads, 2], a view at a stable address, for prefill_attention(counters=...)."""
        return self.tiles[index]

    def start_copy(self, note: dict[str, int]) -> None:
        """Begin a copy of the counters behind all work of the current stream, and return at once.

        `note` is what `newest_copy` gives back with it. It is one call of the device's.
        """
        number = self._started + 1
        slot = self._slots[number % _SLOTS]
        slot.number, slot.note = number, note  # whoever reads the older copy sees that it is gone
        slot.memory[:] = self._absent
        slot.tiles.copy_(self.tiles, non_blocking=True)
        self._started = number

    def newest_copy(self) -> tuple[int, torch.Tensor, dict[str, int]]:
        """(number, counters, note) of the newest copy that has arrived; number 0: none has.

        For another thread. It asks nothing of the device, so it disturbs no graph capture.
        """
        newest = self._started
        for number in range(newest, max(0, newest - _SLOTS), -1):
            slot = self._slots[number % _SLOTS]
            note, tiles = slot.note, slot.tiles.clone()
            # Another number: the slot was taken again while we read.
            if int(tiles.min()) > _ABSENT and slot.number == number:
                return number, tiles, note
        return 0, torch.zeros(self.tiles.shape, dtype=torch.int64), {}
