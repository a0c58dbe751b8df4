"""Attention that skips on purpose: by BLASST's rule at any lambda, at random, or the needle.

Proof that the harness sees damage: lambda above 1 and lost needles must show, lambda 0 must not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

BLOCK = 128


@dataclass
class Damage:
    """One kind of skipping; counts the tiles. skip_lambda: BLASST's rule, above 1 deliberately
    wrong. random_rate: share of the tiles off the diagonal. lost: token positions whose key block
    is skipped for every row after it. seed: of the random tiles."""

    skip_lambda: float | None = None
    random_rate: float = 0.0
    lost: tuple[int, ...] = ()
    seed: int = 0
    visited: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [1, H, T, D], k and v [1, KV, T, D] -> [1, H, T, D]; any T."""
        heads, tokens, dim = q.shape[1:]
        groups = heads // k.shape[1]
        scores = q[0] @ k[0].repeat_interleave(groups, 0).mT * dim**-0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        scores.masked_fill_(~seen, -math.inf)
        drop = self.tiles(scores)
        blocks = drop.shape[-1]
        self.visited += heads * blocks * (blocks + 1) // 2
        self.skipped += int(drop.sum())
        wide = drop.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        scores.masked_fill_(wide[:, :tokens, :tokens], -math.inf)
        out: torch.Tensor = (scores.softmax(-1) @ v[0].repeat_interleave(groups, 0))[None]
        return out

    def tiles(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [H, T, T], masked -> bool [H, blocks, blocks]: skipped. Never the diagonal."""
        heads, tokens, _ = scores.shape
        blocks = -(-tokens // BLOCK)
        drop = torch.zeros(heads, blocks, blocks, dtype=torch.bool, device=scores.device)
        if self.skip_lambda is not None:
            drop |= _voted(scores, blocks, self.skip_lambda)
        if self.random_rate:
            generator = torch.Generator().manual_seed(self.seed)
            self.seed += 1
            draw = torch.rand(drop.shape, generator=generator).to(drop.device)
            drop |= draw < self.random_rate
        for position in self.lost:
            drop[:, :, position // BLOCK] = True
        return drop & torch.ones_like(drop).tril(-1)

    @property
    def rate(self) -> float:
        return self.skipped / max(1, self.visited)


def _voted(scores: torch.Tensor, blocks: int, skip_lambda: float) -> torch.Tensor:
    """Unanimous over the rows of a tile, from the diagonal to the left; lambda >= 0.

    The running maximum is over the blocks visited before, kept or not: up to lambda 1 a skipped
    block never holds a new maximum. Above 1 it may, and a kernel would then go on with less.
    """
    heads, tokens, _ = scores.shape
    size = blocks * BLOCK
    padded = scores.new_full((heads, size, size), -math.inf)
    padded[:, :tokens, :tokens] = scores
    best = padded.view(heads, blocks, BLOCK, blocks, BLOCK).amax(-1)
    after = best.flip(-1).cummax(-1).values.flip(-1)
    before = torch.cat((after[..., 1:], torch.full_like(after[..., :1], -math.inf)), -1)
    limit = math.log(skip_lambda) if skip_lambda > 0 else -math.inf
    rows = torch.arange(size, device=scores.device).view(blocks, BLOCK) < tokens
    # -inf less -inf is NaN, and no comparison with it holds: a row without a maximum keeps.
    votes = (best - before < limit) | ~rows[None, :, :, None]
    return votes.all(2)
