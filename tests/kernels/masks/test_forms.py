"""Every mask in every form against a plain statement of it, token by token, at ragged shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.errors import UnsupportedError
from blasst.kernels.masks.bound import AttentionMask, MaskCache, bind
from blasst.kernels.masks.cute_mod import cute_mask_mod
from blasst.kernels.masks.expr import KEY, QUERY, Mask, Parameter
from blasst.kernels.masks.fa4 import load_fa4
from blasst.kernels.masks.lists import BlockLists, dq_write_order
from blasst.kernels.masks.mods import (
    Role,
    causal,
    document,
    padding,
    shared_prefix,
    sliding_window,
    strip_history_thinking,
)
from blasst.kernels.masks.segments import Segments
from blasst.kernels.types import Geometry

Seen = Callable[[dict[str, list[int]], int, int], bool]

PLAIN: dict[str, tuple[Mask, Seen]] = {
    "causal": (causal(), lambda t, q, k: k <= q),
    "document": (document(), lambda t, q, k: t["document"][q] == t["document"][k]),
    "padding": (padding(), lambda t, q, k: t["document"][q] >= 0 and t["document"][k] >= 0),
    "window": (sliding_window(9), lambda t, q, k: q - k < 9),
    "narrow window": (sliding_window(2), lambda t, q, k: q - k < 2),
    "shared prefix": (
        shared_prefix(),
        lambda t, q, k: k <= q and t["segment"][k] in (0, t["segment"][q]),
    ),
    "strip": (
        strip_history_thinking(),
        lambda t, q, k: k <= q and not (t["role"][k] == Role.THINK and t["turn"][k] < t["turn"][q]),
    ),
}

GEOMETRIES = (Geometry(16, 16), Geometry(32, 16), Geometry(64, 128), Geometry(8, 32))


@st.composite
def layouts(draw: st.DrawFn) -> Segments:
    """Rows of runs: fields constant over short stretches, as packing makes them, but arbitrary."""
    batch, seqlen = draw(st.integers(1, 2)), draw(st.integers(1, 90))
    fields = []
    for low, high in ((-1, 2), (0, 3), (0, 3), (0, 3), (0, 9)):
        rows = []
        for _ in range(batch):
            runs = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(low, high)), min_size=1))
            row = [value for length, value in runs for _ in range(length)]
            rows.append((row * seqlen)[:seqlen])
        fields.append(torch.tensor(rows, dtype=torch.int32))
    return Segments(*fields)


@st.composite
def combinations(draw: st.DrawFn, depth: int = 3) -> tuple[Mask, Seen]:
    if depth == 0 or draw(st.booleans()):
        return PLAIN[draw(st.sampled_from(sorted(PLAIN)))]
    how = draw(st.sampled_from(["and", "or", "not"]))
    mask, seen = draw(combinations(depth - 1))
    if how == "not":
        return ~mask, lambda t, q, k: not seen(t, q, k)
    other, other_seen = draw(combinations(depth - 1))
    if how == "and":
        return mask & other, lambda t, q, k: seen(t, q, k) and other_seen(t, q, k)
    return mask | other, lambda t, q, k: seen(t, q, k) or other_seen(t, q, k)


def spelled_out(segments: Segments, seen: Seen) -> torch.Tensor:
    """bool [batch, seqlen, seqlen] from single pairs."""
    out = torch.zeros(segments.batch, segments.seqlen, segments.seqlen, dtype=torch.bool)
    for b in range(segments.batch):
        tokens = {
            name: segments.field(name)[b].tolist()
            for name in ("document", "segment", "turn", "role", "position")
        }
        for q in range(segments.seqlen):
            for k in range(segments.seqlen):
                out[b, q, k] = seen(tokens, q, k)
    return out


@settings(deadline=None, max_examples=40)
@given(layouts(), st.data())
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_masks_in_all_forms(
    name: str, run_cute: Any, segments: Segments, data: st.DataObject
) -> None:
    mask, seen = PLAIN[name]
    check_forms(bind(mask, segments), spelled_out(segments, seen), run_cute)


@settings(deadline=None, max_examples=60)
@given(layouts(), combinations())
def test_combinations_dense_and_lists(segments: Segments, combined: tuple[Mask, Seen]) -> None:
    mask, seen = combined
    check_forms(bind(mask, segments), spelled_out(segments, seen), None)


@settings(deadline=None, max_examples=12)
@given(layouts(), combinations())
def test_combinations_in_cute(
    run_cute: Any, segments: Segments, combined: tuple[Mask, Seen]
) -> None:
    mask, seen = combined
    assert torch.equal(run_cute(bind(mask, segments)), spelled_out(segments, seen))


def check_forms(bound: AttentionMask, expected: torch.Tensor, run_cute: Any) -> None:
    from torch.nn.attention.flex_attention import create_mask

    assert torch.equal(bound.dense(), expected)
    flex = create_mask(bound.mask_mod, bound.batch, 1, bound.seqlen_q, bound.seqlen_k, "cpu")
    assert torch.equal(flex[:, 0], expected)
    if run_cute is not None:
        assert torch.equal(run_cute(bound), expected)
    for geometry in GEOMETRIES:
        check_lists(bound.lists(geometry), expected, geometry)


def check_lists(lists: BlockLists, expected: torch.Tensor, geometry: Geometry) -> None:
    """Both orientations against the tiles of the dense mask."""
    rows, columns = -expected.shape[1] % geometry.tile_m, -expected.shape[2] % geometry.tile_n
    padded = torch.nn.functional.pad(expected, (0, columns, 0, rows))
    tiles = padded.unflatten(1, (-1, geometry.tile_m)).unflatten(3, (-1, geometry.tile_n))
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    for side, flip in ((lists.by_query, False), (lists.backward, True)):
        partial, full = side.listed()
        assert torch.equal((partial.mT if flip else partial)[:, 0], some & ~every)
        assert torch.equal((full.mT if flip else full)[:, 0], every)
        for counts, indices in (
            (side.partial_counts, side.partial_indices),
            (side.full_counts, side.full_indices),
        ):
            assert counts.dtype == indices.dtype == torch.int32
            for index, count in zip(
                indices.flatten(0, 2).tolist(), counts.flatten().tolist(), strict=True
            ):
                assert index[:count] == sorted(index[:count]), "ascending, as FA4 reads them"


@settings(deadline=None, max_examples=20)
@given(layouts(), combinations())
def test_lists_equal_those_of_flex_attention(
    segments: Segments, combined: tuple[Mask, Seen]
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    bound = bind(combined[0], segments)
    for geometry in GEOMETRIES[:2]:
        ours = bound.flex(geometry)
        theirs = create_block_mask(
            bound.mask_mod,
            bound.batch,
            None,
            bound.seqlen_q,
            bound.seqlen_k,
            "cpu",
            (geometry.tile_m, geometry.tile_n),
        )
        for name in ("kv", "full_kv", "q", "full_q"):
            assert torch.equal(getattr(ours, f"{name}_indices"), getattr(theirs, f"{name}_indices"))
            counts = f"{name}_num_blocks"
            assert torch.equal(getattr(ours, counts), getattr(theirs, counts))


@settings(deadline=None, max_examples=20)
@given(layouts(), combinations(), st.booleans())
def test_write_order_equals_that_of_fa4(
    segments: Segments, combined: tuple[Mask, Seen], spt: bool
) -> None:
    compute_dq_write_order = load_fa4().block_sparsity.compute_dq_write_order
    lists = bind(combined[0], segments).lists(GEOMETRIES[0])
    sides = [
        (side.partial_counts, side.partial_indices, side.full_counts, side.full_indices)
        for side in (lists.by_query, lists.backward)
    ]
    theirs = compute_dq_write_order(*sides[0], *sides[1], spt=spt)
    for ours, expected, counts in zip(
        dq_write_order(lists, spt=spt),
        theirs,
        (lists.backward.partial_counts, lists.backward.full_counts),
        strict=True,
    ):
        # FA4 leaves whatever it finds beyond a count, and never reads it.
        valid = torch.arange(ours.shape[-1]) < counts[..., None]
        assert torch.equal(ours, torch.where(valid, expected, 0))


@settings(deadline=None, max_examples=10)
@given(layouts(), combinations())
def test_write_order_equals_that_of_flex_attention(
    segments: Segments, combined: tuple[Mask, Seen]
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    bound = bind(combined[0], segments)
    ours = bound.flex(GEOMETRIES[0], write_order=True)
    theirs = create_block_mask(
        bound.mask_mod,
        bound.batch,
        None,
        bound.seqlen_q,
        bound.seqlen_k,
        "cpu",
        (GEOMETRIES[0].tile_m, GEOMETRIES[0].tile_n),
        compute_dq_write_order=True,
    )
    assert ours.dq_kv_order_spt == theirs.dq_kv_order_spt
    for kind, counts in (("", ours.q_num_blocks), ("_full", ours.full_q_num_blocks)):
        mine, expected = (getattr(m, f"dq_write_order{kind}") for m in (ours, theirs))
        valid = torch.arange(mine.shape[-1]) < counts[..., None]
        assert torch.equal(mine, torch.where(valid, expected, 0))


def test_negation_leaves_no_negation() -> None:
    mask = ~(strip_history_thinking() | ~(document() & sliding_window(4)))
    assert "not" not in mask.text()
    assert (~~mask).text() == mask.text()


def test_window_widths_share_a_structure() -> None:
    assert sliding_window(3).text() == sliding_window(4000).text()
    assert sliding_window(3) != sliding_window(4000)
    both = (causal() & sliding_window(3)) | (document() & sliding_window(5))
    segments = Segments.from_position_ids(torch.arange(12)[None])
    expected = torch.arange(12)[:, None] - torch.arange(12)
    expected = ((expected >= 0) & (expected < 3)) | (expected < 5)
    assert torch.equal(bind(both, segments).dense()[0], expected)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: bool(causal()), TypeError, "&, | and ~"),
        (lambda: causal() and document(), TypeError, "&, | and ~"),
        (lambda: QUERY.segment == 1.5, TypeError, "float"),
        (lambda: sliding_window(0), ValueError, "at least 1"),
    ],
)
def test_misuse_is_refused(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_causality_is_known_from_the_structure() -> None:
    assert (document() & causal()).is_causal
    assert (shared_prefix() | strip_history_thinking()).is_causal
    assert not (document() | causal()).is_causal
    assert not (~causal()).is_causal
    assert ((KEY.index <= QUERY.index) & sliding_window(3)).is_causal
    assert not ((QUERY.index - KEY.index) < Parameter(1)).is_causal


def layout(generator: torch.Generator, seqlen: int) -> Segments:
    fields = [torch.randint(0, 4, (1, seqlen), generator=generator).sort().values for _ in range(5)]
    return Segments(*(f.int() for f in fields))


def test_fifty_layouts_compile_once(run_cute: Any) -> None:
    """Other documents, windows and lengths: one trace in CuTe, one key in FA4's compile cache."""
    load_fa4()
    from flash_attn.cute.cute_dsl_utils import get_aux_tensor_metadata
    from flash_attn.cute.utils import hash_callable

    generator = torch.Generator().manual_seed(0)
    before, keys = run_cute.traces, set()
    for i in range(50):
        mask = shared_prefix() & document() & sliding_window(3 + i)
        bound = bind(mask, layout(generator, 20 + i))
        assert torch.equal(run_cute(bound), bound.dense())
        mod = cute_mask_mod(bound)
        keys.add((hash_callable(mod), get_aux_tensor_metadata(bound.aux_tensors)))
    assert run_cute.traces - before == 1
    assert len(keys) == 1
    other = bind(causal() & document() & sliding_window(3), layout(generator, 20))
    assert hash_callable(cute_mask_mod(other)) not in {key for key, _ in keys}


def test_fifty_layouts_compile_flex_attention_once() -> None:
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    cache = MaskCache(capacity=4)
    q = torch.randn(1, 2, 64, 16, generator=generator)
    for i in range(50):
        mask = shared_prefix() & document() & sliding_window(3 + i)
        bound = cache.bind(mask, layout(generator, 64))
        out = compiled(q, q, q, block_mask=bound.flex(Geometry(16, 16)))
        plain = torch.nn.functional.scaled_dot_product_attention(
            q, q, q, attn_mask=bound.dense()[:, None]
        )
        torch.testing.assert_close(out, plain)
    assert counter.frame_count == 1
    assert cache.stats.misses == 50


def test_cache_shares_layouts_across_steps() -> None:
    cache = MaskCache(capacity=2)
    generator = torch.Generator().manual_seed(1)
    first, second, third = (layout(generator, 40) for _ in range(3))
    mask = shared_prefix() & document()
    bound = cache.bind(mask, first)
    bound.lists(Geometry(16, 16))
    again = Segments(*(getattr(first, n).clone() for n in first.__dataclass_fields__))
    assert cache.bind(mask, again) is bound
    assert cache.bind(causal() & document(), first) is not bound
    assert cache.stats.hits == 1
    assert cache.stats.misses == 2
    assert cache.stats.builds == 1
    assert bound.lists(Geometry(16, 16)) is bound.lists(Geometry(16, 16))
    cache.bind(mask, second)
    cache.bind(mask, third)
    assert cache.stats.evictions == 2
    assert cache.bind(mask, first) is not bound
    assert cache.stats.hit_rate == pytest.approx(1 / 6)


def test_a_backward_gets_its_lists_after_an_inference() -> None:
    bound = MaskCache().bind(shared_prefix(), layout(torch.Generator().manual_seed(3), 40))
    geometry = Geometry(16, 16)
    with pytest.raises(UnsupportedError, match="silently dense"):
        _ = bound.lists(geometry, backward=False).backward
    assert bound.lists(geometry).backward is not None
    assert bound.lists(geometry, backward=False).by_key is not None
    assert bound.lists_built == 2


def test_cache_ignores_fields_that_the_mask_does_not_read() -> None:
    cache = MaskCache()
    generator = torch.Generator().manual_seed(2)
    first, other = layout(generator, 30), layout(generator, 30)
    changed = Segments(
        first.document_ids, other.segment_ids, other.turn_ids, other.role_ids, other.position_ids
    )
    assert cache.bind(document(), first) is cache.bind(document(), changed)
    assert cache.bind(shared_prefix(), first) is not cache.bind(shared_prefix(), changed)
