"""From which length on a route of masked attention is the fastest one: data, not code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blasst.kernels.errors import InvalidInputError

NEVER = 1 << 62


@dataclass(frozen=True)
class Crossover:
    """tokens: the sequence length from which on a route is the faster one, by (route, needs a
    gradient, major compute capability, head_dim): "fa4" and "flex-fa4" than "flex-triton", "blasst"
    than all three. What is not listed is not chosen; "flex-triton" needs no entry."""

    tokens: Mapping[tuple[str, bool, int, int], int] = field(default_factory=dict)
    source: str = ""

    def first(
        self, route: str, capability: tuple[int, int] | None, needs_grad: bool, head_dim: int
    ) -> int:
        """Tokens; NEVER when nothing was measured."""
        if capability is None:
            return NEVER
        return self.tokens.get((route, needs_grad, capability[0], head_dim), NEVER)

    @classmethod
    def load(cls, path: Path) -> Crossover:
        """The table that `blasst bench masks --json` wrote. Raises InvalidInputError."""
        try:
            found = json.loads(path.read_text())["crossover"]
            rows = {
                (str(r["route"]), bool(r["needs_grad"]), int(r["major"]), int(r["head_dim"])): int(
                    r["tokens"]
                )
                for r in found
            }
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidInputError(
                [f"{path} holds no crossover table ({e!r}); write one with blasst bench masks"]
            ) from e
        return cls(rows, str(path))


MEASURED = Crossover(
    {
        ("fa4", True, 9, 128): 4096,
        ("fa4", False, 9, 128): 8192,
        ("flex-fa4", True, 9, 128): 16384,
        ("flex-fa4", False, 9, 128): 16384,
        ("blasst", False, 9, 128): 8192,
    },
    "measured on one H200, docs/measurements/h200-masks.md",
)
