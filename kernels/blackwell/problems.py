"""What is proved of the kernel, as data: which builds run which problems, how often."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from blasst.kernels.blackwell.config import CROSS, Config
from blasst.kernels.verify.subjects.attention import Shape
from blasst.kernels.verify.subjects.masks import MASKS

VOTING = Config("bfloat16", 128, True, 0, True, True)
MAGS = (14000, 10000, 7000, 4500, 2500, 1500, 1000)
SKIP_RATES = (0.0, 0.51, 0.76, 0.89, 0.95)
KEY_TILES = (1, 2, 5, 8)
DIVERSE = 6  # seed of inputs whose skips differ between almost all mags
# A tile without rows for several visits and a last visit with a mask; warps that disagree on a
# block with a mask, in both tiles.
CORNERS = (
    Shape(((100, 300), (300, 200)), num_heads=1),
    Shape(((256, 544),), mag=1000, seed=55),
)
# Warps of tile 1, of tile 0, that disagree on a block with bits; a maximum that rises late.
MASKED_CORNERS = (
    Shape(((256, 640),), num_heads=1, mask="sliding window", mag=1000.0),
    Shape(((256, 640),), num_heads=1, mask="shared_prefix", mag=1000.0, seed=1),
    Shape(((256, 640),), num_heads=1, mask="random blocks", mag=14000.0),
)
FEW_MASKED = ((0, 7), (5, 5), (130, 300))
MASKED_EDGES = ((256, 640), (130, 300), (5, 5), (0, 7), (257, 384))
EDGES = ((256, 640), (70, 70), (0, 5), (100, 64), (3, 0), (1, 1), (129, 300), (255, 257))
UNEQUAL = (1000, 100, 3000, 300)  # MAGs of requests: a kernel that takes another's skips otherwise
# One key block for two tiles: the only visit is the first and the last one.
SINGLE = Shape(((200, 128), (256, 100)), num_heads=1, mag=UNEQUAL, seed=1)
SKIPPING = Shape(((256, 640),), mag=2500, seed=10)  # a third of its visits


@dataclass(frozen=True)
class Part:
    """One build and its problems. seeds: schedules of each; all must give the same bits."""

    name: str
    config: Config
    shapes: tuple[Shape, ...]
    seeds: int = 4


def _square(tiles: int, queries: int = 256) -> tuple[tuple[int, int], ...]:
    return ((min(queries, tiles * 128), tiles * 128),)


def parts() -> list[Part]:
    """Everything that is proved, cheapest first."""
    tiles = (*(Shape(_square(n), num_heads=1) for n in KEY_TILES), SINGLE)
    edges = Shape(EDGES, mag=UNEQUAL, seed=1)
    mags = tuple(Shape(((256, 1024),), mag=mag, seed=DIVERSE) for mag in MAGS)
    dialled = tuple(Shape(((256, 2560),), skip_rate=rate) for rate in SKIP_RATES)
    heads = Shape(((130, 400), (40, 300)), num_heads=6, num_kv_heads=2, mag=UNEQUAL)
    found = [
        Part("dense, not causal", replace(DENSE, causal=False), (*tiles, edges)),
        Part("dense, causal", DENSE, (*tiles, edges)),
        Part("vote", VOTING, (*tiles, edges, *CORNERS, heads, *mags, *dialled)),
        Part("vote, own P", replace(VOTING, cross_p=False), (*tiles, edges, *mags, *dialled)),
        Part("vote, not causal", replace(VOTING, causal=False), (*tiles, edges, *mags)),
        Part("long", VOTING, (Shape(((256, 63 * 128),), num_heads=1, skip_rate=0.5),), 1),
        Part("schedules", VOTING, (SKIPPING,), 200),
        Part("schedules, dense", DENSE, (Shape(((256, 640),), num_heads=1),), 200),
        Part(
            "schedules, own P",
            replace(VOTING, cross_p=False),
            (SKIPPING,),
            200,
        ),
    ]
    for head_dim, dtype, page in itertools.product(
        (64, 128), ("bfloat16", "float16"), (0, 16, 64, 128)
    ):
        config = replace(VOTING, head_dim=head_dim, dtype=dtype, page_size=page)
        found.append(Part(f"head_dim {head_dim}, {dtype}, pages of {page}", config, (edges,), 3))
    for buffered in itertools.product((0, 1, 4), (0, 2, 4)):
        config = replace(VOTING, schedule=replace(CROSS, buffered=buffered))
        shapes = (SKIPPING,)
        found.append(Part(f"{buffered[0]} and {buffered[1]} quarters buffered", config, shapes, 8))
    for page in (48, 256):
        found.append(Part(f"pages of {page}", replace(VOTING, page_size=page), (edges,), 3))
    return found + masked_parts() + staying_parts()


def masked_parts() -> list[Part]:
    """Block masks: every mask at a common lambda, at one that skips much, and at 0."""
    every = tuple(
        Shape(MASKED_EDGES, mask=mask, mag=mag) for mask in MASKS for mag in (None, 500.0, math.inf)
    )
    dense = tuple(Shape(MASKED_EDGES, mask=mask) for mask in MASKS)
    paged = replace(MASKED, page_size=16, head_dim=64, dtype="float16", causal=False)
    one = (Shape(((256, 640), (130, 300)), mask="blind rows", mag=500.0),)
    return [
        Part("masks", MASKED, (*every, *MASKED_CORNERS)),
        Part("masks, own P", replace(MASKED, cross_p=False), every),
        Part("masks, dense", replace(MASKED, vote=False, count=False), dense),
        Part("masks, not causal, head_dim 64, float16, pages of 16", paged, every),
        Part("masks, pages of 128", replace(MASKED, page_size=128), dense, 2),
        Part("schedules, masks", MASKED, one, 200),
    ]


def staying_parts() -> list[Part]:
    """Thread blocks that stay: phases go on from one item to the next, some without visits."""
    edges = Shape(EDGES, mag=UNEQUAL, seed=1)
    heads = Shape(((130, 400), (40, 300)), num_heads=6, num_kv_heads=2, mag=UNEQUAL)
    mag = Shape(((512, 640), (130, 300)), mag=2500, seed=DIVERSE)
    items = Shape(((512, 640), (130, 300)), num_heads=1, mag=UNEQUAL)
    masked = tuple(Shape(MASKED_EDGES, mask=mask) for mask in ("blind rows", "blind tiles"))
    paged = replace(STAYING, page_size=16, head_dim=64, dtype="float16", causal=False)
    return [
        Part("staying", STAYING, (edges, heads, mag, SINGLE)),
        Part("staying, own P", replace(STAYING, cross_p=False, grid=1), (edges, heads, mag)),
        Part("staying, dense", replace(STAYING, vote=False, count=False), (edges,)),
        Part("staying, pages of 16", paged, (edges, mag)),
        Part("staying, masks", replace(STAYING, block_mask=True), masked),
        Part("schedules, staying", STAYING, (items,), 200),
    ]


DENSE = replace(VOTING, vote=False, count=False)
STAYING = replace(VOTING, grid=2)
MASKED = replace(VOTING, block_mask=True)


@dataclass(frozen=True)
class Mutated:
    """A build of which each synchronisation instruction is left out, and problems that run then,
    cheapest first."""

    name: str
    config: Config
    shapes: tuple[Shape, ...]


def mutated() -> list[Mutated]:
    """Every kind of build. What one problem does not reach or notice, another one may."""
    small = Shape(((200, 400), (64, 64)), num_heads=1)
    few = Shape(((0, 5), (3, 0), (1, 1), (129, 300)), num_heads=1, mag=UNEQUAL, seed=1)
    votes = (few, small, SINGLE, *CORNERS, SKIPPING)
    masks = tuple(
        Shape(((256, 640), (130, 300)), num_heads=1, mask=mask, mag=500.0)
        for mask in ("random blocks", "blind rows", "blind tiles")
    )
    masks = (
        Shape(FEW_MASKED, num_heads=1, mask="strip_history_thinking"), *masks, *MASKED_CORNERS
    )  # fmt: skip
    items = Shape(((512, 640), (130, 300)), num_heads=1, mag=2500, seed=DIVERSE)
    items_masked = tuple(replace(shape, seqlens=items.seqlens) for shape in masks[1:4])
    paged = replace(VOTING, page_size=16, head_dim=64, dtype="float16")
    return [
        Mutated("vote", VOTING, votes),
        Mutated("vote, own P", replace(VOTING, cross_p=False), votes),
        Mutated("vote, not causal", replace(VOTING, causal=False), votes),
        Mutated("dense", DENSE, (replace(few, mag=None), small, SINGLE, CORNERS[0])),
        Mutated("pages of 16, head_dim 64, float16", paged, (*votes, replace(CORNERS[1], seed=2))),
        Mutated("masks", MASKED, masks),
        Mutated("staying", STAYING, (few, items, SINGLE, CORNERS[1], SKIPPING)),
        Mutated("staying, masks", replace(STAYING, block_mask=True), (*masks, *items_masked)),
    ]
