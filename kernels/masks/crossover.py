"""From which length on FlashAttention-4 beats FlexAttention's Triton kernels: data, not code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blasst.kernels.errors import InvalidInputError

NEVER = 1 << 62


@dataclass(frozen=True)
class Crossover:
    """tokens: FA4 (through FlexAttention) is the faster route from this sequence length on, by
    (needs a gradient, major compute capability). A GPU that is not listed uses Triton."""

    tokens: Mapping[tuple[bool, int], int] = field(default_factory=dict)
    source: str = ""

    def fa4_from(self, capability: tuple[int, int] | None, needs_grad: bool) -> int:
        """Tokens; NEVER when nothing was measured."""
        if capability is None:
            return NEVER
        return self.tokens.get((needs_grad, capability[0]), NEVER)

    @classmethod
    def load(cls, path: Path) -> Crossover:
        """The table that `blasst bench masks --json` wrote. Raises InvalidInputError."""
        try:
            found = json.loads(path.read_text())["crossover"]
            rows = {(bool(r["needs_grad"]), int(r["major"])): int(r["tokens"]) for r in found}
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidInputError(
                [f"{path} holds no crossover table ({e!r}); write one with blasst bench masks"]
            ) from e
        return cls(rows, str(path))


REPORTED = Crossover(
    {(False, 9): 8192, (True, 9): 8192},
    "one H100 as reported with issue 5 (torch 2.11, FA4 b15): Triton ahead at 2K and 4K, FA4 at 8K "
    "and 16K, forward and forward + backward; one H200 for causal masks (FA4 b36): the same",
)
