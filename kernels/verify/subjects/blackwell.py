"""Our SM100 kernel."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from blasst.kernels.blackwell.config import ROWS, TILES, Config
from blasst.kernels.types import Geometry
from blasst.kernels.verify.build import Recipe
from blasst.kernels.verify.subject import Case, Subject
from blasst.kernels.verify.subjects.attention import Kernel, Shape, prefill_case
from blasst.kernels.verify.subjects.configs import rebuild

BARRIER = 8  # bytes of an mbarrier


def build(options: dict[str, Any]) -> Any:
    """In the compiling process. options: what asdict makes of a Config."""
    from blasst.kernels.blackwell.compile import compile_prefill

    return compile_prefill(rebuild(Config, options))


def regions(options: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Barriers of the edges of both tiles, then full and empty ones of the rings of stages."""
    from blasst.kernels.blackwell.edges import edge_specs

    config = rebuild(Config, options)
    names = [
        f"{spec.name}[{tile}].{slot}"
        for spec in edge_specs(config)
        for tile in range(TILES)
        for slot in range(spec.slots)
    ]
    for ring, stages in (("keys", config.key_stages), ("values", config.value_stages)):
        names += [f"{ring} {state}[{i}]" for state in ("full", "empty") for i in range(stages)]
    return [(name, BARRIER * i, BARRIER) for i, name in enumerate(names)]


def role(config: Config, warp: int) -> str:
    """Name of a warp, from the config's roles."""
    roles = config.roles
    named = {roles.mma: "mma", roles.keys: "keys", roles.values: "values"}
    if warp in named:
        return named[warp]
    if warp < roles.correction:
        return f"softmax {warp // 4}"
    return "correction" if warp < roles.correction + 4 else "idle"


def subject(config: Config, lines: bool = True) -> Subject:
    builder = "blasst.kernels.verify.subjects.blackwell:build"
    recipe = Recipe.of("sm_100a", builder, lines, **asdict(config))
    return Subject("blackwell", recipe, lambda warp: role(config, warp))


def case(config: Config, shape: Shape) -> Case:
    """Raises ValueError for a build with lists and a shape without a mask, or the reverse."""
    if config.block_mask != bool(shape.mask):
        raise ValueError(f"block_mask {config.block_mask}, but mask {shape.mask!r}")
    kernel = Kernel(
        config.dtype, config.head_dim, config.causal, config.page_size, config.vote,
        config.count, Geometry(ROWS, config.tile_n), TILES,
    )  # fmt: skip
    return prefill_case(kernel, shape)
