"""Skip counters that live where the attention runs, and snapshots that never wait for it."""

from __future__ import annotations

import torch


class SkipCounters:
    """int64 [num_layers, num_kv_heads, {visited, skipped}], summed since construction."""

    def __init__(self, num_layers: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.tiles = torch.zeros(num_layers, num_kv_heads, 2, dtype=torch.int64, device=device)
        self._copy: torch.Tensor | None = None
        self._copied: torch.Event | None = None
        self._latest = torch.zeros_like(self.tiles, device="cpu")

    def layer(self, index: int) -> torch.Tensor:
        """[num_kv_heads, 2], a view at a stable address, for prefill_attention(counters=...)."""
        return self.tiles[index]

    def snapshot(self) -> torch.Tensor:
        """A CPU copy, contiguous. On a GPU the newest finished one: each call starts the next copy
        on the current stream and returns at once, so it lags by one call."""
        if not self.tiles.is_cuda:
            return self.tiles.clone()
        if self._copied is not None and self._copied.query():
            assert self._copy is not None
            self._latest = self._copy.clone()
            self._copied = None
        if self._copied is None:
            if self._copy is None:
                self._copy = torch.empty_like(self._latest, pin_memory=True)
            self._copy.copy_(self.tiles, non_blocking=True)
            self._copied = torch.Event("cuda")
            self._copied.record()
        return self._latest
