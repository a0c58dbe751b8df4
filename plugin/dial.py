"""A test-only hook that gives every layer of a Llama inputs whose skip rate is chosen.

For benchmarks: with dummy weights no block is worth less than another. Queries, keys and values are
replaced before they reach attention and the cache, for every contender alike; answers are noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blasst.kernels.testing import (
    DIALLED_LOG2_LAMBDA,
    low_blocks,
    lower,
    tame_keys,
    tame_queries,
)
from blasst.kernels.types import Geometry

DIALLED_LAMBDA = 2.0**DIALLED_LOG2_LAMBDA


@contextmanager
def replaced(owner: Any, **methods: Any) -> Iterator[None]:
    """These methods of a class are others for a while."""
    before = {name: getattr(owner, name) for name in methods}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)


class Dial:
    """q: [max_tokens of a step, num_heads x head_dim]; k, v: [max_len, num_kv_heads, head_dim]."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        max_tokens: int,
        max_len: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """heads: (num_heads, num_kv_heads, head_dim)."""
        num_heads, self.num_kv_heads, dim = heads
        generator = torch.Generator(device).manual_seed(0)

        def noise(rows: int, count: int) -> torch.Tensor:
            return torch.randn(rows, count, dim, generator=generator, dtype=dtype, device=device)

        q = noise(max_tokens, num_heads)
        tame_queries(q)
        self.k, v = noise(max_len, self.num_kv_heads), noise(max_tokens, self.num_kv_heads)
        tame_keys(self.k)
        self.q, self.v = q.flatten(1), v.flatten(1)
        self._low: dict[tuple[float, int, Geometry], torch.Tensor] = {}

    def turn(self, skip_rate: float, length: int, geometry: Geometry) -> None:
        """Prompts of this length skip this share of their blocks from now on."""
        key = skip_rate, length, geometry
        if key not in self._low:  # chosen on the host, which takes longer than a short prompt
            low = low_blocks(length, self.num_kv_heads, skip_rate, geometry)
            self._low[key] = low.to(self.k.device)
        lower(self.k[:length], self._low[key], geometry)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it is, all Llama layers of the process are dialled. Eager models only."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.models.llama import LlamaAttention

        layer_forward, attention_forward = LlamaAttention.forward, Attention.forward
        at: list[torch.Tensor] = []

        def remember(layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
            at[:] = [positions]
            return layer_forward(layer, positions, hidden_states)

        def dialled(layer: Any, query: torch.Tensor, key: Any, value: Any, *args: Any) -> Any:
            count = query.shape[0]
            # Warm-up runs have positions behind every prompt's end.
            k = self.k.index_select(0, at[0].clamp(max=self.k.shape[0] - 1)).flatten(1)
            return attention_forward(layer, self.q[:count], k, self.v[:count], *args)

        with replaced(LlamaAttention, forward=remember), replaced(Attention, forward=dialled):
            yield
