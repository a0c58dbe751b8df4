"""Tensors on the device that stay from step to step, and how values get there without a wait."""

from __future__ import annotations

import torch

from blasst.kernels.threshold import lambda_to_log2


class LambdaTable:
    """Lambdas of a batch's voting rows at an address on the device that never changes."""

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        self._table = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._held: list[float] = []
        self._loaded: tuple[torch.Tensor, tuple[float, ...]] = self._table[:0], ()

    def load(self, values: list[float]) -> tuple[torch.Tensor, tuple[float, ...]]:
        """[len(values)] on the device, copied in stream order and only when something changed; and
        log2 of each, on the host. Raises ThresholdError."""
        if values != self._held:
            log2_lambda = tuple(map(lambda_to_log2, values))
            view = self._table[: len(values)]
            view.copy_(_staged(torch.tensor(values), self._table.device), non_blocking=True)
            self._held, self._loaded = list(values), (view, log2_lambda)
        return self._loaded


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that nobody waits for."""
    return _staged(t, device).to(device, non_blocking=True)


def _staged(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Where a copy to `device` need not wait: torch keeps the pinned block until it is done."""
    return t.pin_memory() if device.type == "cuda" else t
