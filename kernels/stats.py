"""Skip counters that live where the attention runs, and copies of them that never wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_SLOTS = 8
"""Copies under way at once. A step that votes takes milliseconds, a copy microseconds."""


@dataclass
class _Slot:
    """One copy on the host. arrived holds `number` once all of tiles has, for it is copied last."""

    tiles: torch.Tensor
    arrived: torch.Tensor
    number: int = 0
    note: dict[str, int] = field(default_factory=dict)


class SkipCounters:
    """int64 [num_layers, num_kv_heads, {visited, skipped}], summed since construction."""

    def __init__(self, num_layers: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.tiles = torch.zeros(num_layers, num_kv_heads, 2, dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._started = 0
        pinned = self.tiles.is_cuda
        self._slots = [
            _Slot(
                torch.zeros(self.tiles.shape, dtype=torch.int64, pin_memory=pinned),
                torch.zeros(1, dtype=torch.int64, pin_memory=pinned),
            )
            for _ in range(_SLOTS)
        ]

    def layer(self, index: int) -> torch.Tensor:
        """[num_kv_heads, 2], a view at a stable address, for prefill_attention(counters=...)."""
        return self.tiles[index]

    def start_copy(self, note: dict[str, int]) -> None:
        """Begin a copy of the counters behind all work of the current stream, and return at once.

        `note` is what `newest_copy` gives back with it.
        """
        self._started += 1
        slot = self._slots[self._started % _SLOTS]
        slot.number, slot.note = self._started, note
        slot.tiles.copy_(self.tiles, non_blocking=True)
        self._number.fill_(self._started)
        slot.arrived.copy_(self._number, non_blocking=True)

    def newest_copy(self) -> tuple[int, torch.Tensor, dict[str, int]]:
        """(number, counters, note) of the newest copy that has arrived; number 0: none has.

        For another thread. It asks nothing of the device, so it disturbs no graph capture.
        """
        for number in range(self._started, max(0, self._started - _SLOTS), -1):
            slot = self._slots[number % _SLOTS]
            note = slot.note
            if int(slot.arrived) == number:
                tiles = slot.tiles.clone()
                if slot.number == number:  # else it was taken again while we read
                    return number, tiles, note
        return 0, torch.zeros(self.tiles.shape, dtype=torch.int64), {}
