"""Our Hopper kernel."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from blasst.kernels.hopper.config import ROWS, Config
from blasst.kernels.types import Geometry
from blasst.kernels.verify.build import Recipe
from blasst.kernels.verify.subject import Case, Subject
from blasst.kernels.verify.subjects.attention import Kernel, Shape, prefill_case
from blasst.kernels.verify.subjects.configs import rebuild


def build(options: dict[str, Any]) -> Any:
    """In the compiling process."""
    from blasst.kernels.hopper.compile import compile_prefill

    return compile_prefill(rebuild(Config, options))


def subject(config: Config, lines: bool = True) -> Subject:
    producers = [*["keys"] * config.loaders, *["values"] * config.loaders, "idle", "idle"]

    def role(warp: int) -> str:
        return producers[warp] if warp < 4 else f"consumer {warp // 4 - 1}"

    recipe = Recipe.of(
        "sm_90a", "blasst.kernels.verify.subjects.hopper:build", lines, **asdict(config)
    )
    return Subject("hopper", recipe, role)


def case(config: Config, shape: Shape) -> Case:
    """Raises ValueError for a build with lists and a shape without a mask, or the reverse."""
    if config.block_mask != bool(shape.mask):
        raise ValueError(f"block_mask {config.block_mask}, but mask {shape.mask!r}")
    kernel = Kernel(
        config.dtype, config.head_dim, config.causal, config.page_size, config.vote,
        config.count, Geometry(ROWS, config.tile_n, config.pack), config.warpgroups,
    )  # fmt: skip
    return prefill_case(kernel, shape)
