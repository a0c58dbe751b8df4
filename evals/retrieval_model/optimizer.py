"""Muon on the matrices of the layers (orthogonalised momentum), AdamW on everything else."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration that drives singular values towards one."""
_STEPS, _MOMENTUM = 5, 0.95


class Optimizer:
    """Matrices of one shape are updated in one batch."""

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        named = list(model.named_parameters())
        self._all = [parameter for _, parameter in named]
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        chosen = {id(p) for p in matrices}
        rest = [p for p in self._all if id(p) not in chosen]
        groups = [
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.01},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-8)
        self._decay = weight_decay
        self._shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in matrices:
            self._shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self._momenta = {
            shape: torch.zeros((len(group), *shape), device=group[0].device)
            for shape, group in self._shapes.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """One update with the gradients that are there, which are then gone; their norm."""
        norm = float(nn.utils.clip_grad_norm_(self._all, 1.0))
        for settings in self._adam.param_groups:
            settings["lr"] = rate
        self._adam.step()
        for shape, group in self._shapes.items():
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self._momenta[shape]
            momentum.lerp_(gradients, 1 - _MOMENTUM)
            update = orthogonal(gradients.lerp(momentum, _MOMENTUM))
            # Scaled to the size of AdamW's updates, so that one rate serves both.
            size = rate * 0.2 * math.sqrt(max(shape))
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self._decay).sub_(change.to(parameter.dtype) * size)
        for parameter in self._all:
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "momenta": self._momenta}

    def load(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        for shape, momentum in self._momenta.items():
            momentum.copy_(state["momenta"][shape])


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """[N, rows, columns] -> the nearest matrices with equal singular values, roughly."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    result: torch.Tensor = (x if wide else x.mT).float()
    return result
