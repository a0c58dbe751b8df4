"""The cache of bound masks: a layout is what its tensors hold now, and one layout is one object."""

import threading

import pytest
import torch

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks import bound, flex
from blasst.kernels.masks.bound import AttentionMask, MaskCache
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.masks.mods import causal, document, shared_prefix, sliding_window
from blasst.kernels.masks.segments import Segments
from blasst.kernels.types import Geometry

MASK = causal() & document()
SMALL = Geometry(4, 4)


def two_documents() -> Segments:
    return Segments.from_position_ids(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], dtype=torch.int32))


def test_tensors_that_are_filled_again_are_another_layout() -> None:
    """A collator that keeps its buffers: neither the digest nor the held mask may be of before."""
    cache, segments = MaskCache(), two_documents()
    before = cache.bind(MASK, segments)
    assert int(before.dense().sum()) == 20
    segments.document_ids.fill_(0)
    after = cache.bind(MASK, segments)
    assert int(after.dense().sum()) == 36
    assert after.lists(SMALL).visited_blocks == 3
    again = cache.bind(MASK, two_documents())
    assert again is before
    assert int(again.dense().sum()) == 20
    assert again.lists(SMALL).visited_blocks == 2


def test_threads_that_miss_together_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, found = MaskCache(), list[AttentionMask]()
    together = threading.Barrier(2, timeout=20)

    class Slow(AttentionMask):
        def __init__(self, *arguments: object) -> None:
            together.wait()
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bound, "AttentionMask", Slow)

    def work() -> None:
        mask = cache.bind(MASK, two_documents())
        mask.lists(SMALL)
        found.append(mask)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 2
    assert found[0] is found[1]
    assert cache.stats.misses == 2
    assert cache.stats.builds == 1


def test_many_threads_build_the_lists_of_a_mask_once() -> None:
    mask = MaskCache().bind(MASK, two_documents())
    held: list[object] = []
    threads = [threading.Thread(target=lambda: held.append(mask.lists(SMALL))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({id(lists) for lists in held}) == 1
    assert mask.lists_built == 1


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for asked, expected in (("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu")):
        assert str(bound._with_index(torch.device(asked))) == expected


def test_what_is_not_a_token_is_refused() -> None:
    for shape in ((1, 0), (0, 4)):
        with pytest.raises(InvalidInputError, match="some token"):
            Segments(*[torch.zeros(shape, dtype=torch.int32)] * 5)
    with pytest.raises(InvalidInputError, match="list, it must be a tensor"):
        Segments(*[[[0, 1]]] * 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="int64"):
        Segments(*[torch.zeros(1, 4, dtype=torch.int64)] * 5)


@pytest.mark.parametrize(("backend", "lengths", "compilations"), [("TRITON", (64,), 1),
    ("FLASH", (64,), 1), ("TRITON", (64, 128, 192, 130, 70), 3)])  # fmt: skip
def test_fifty_layouts_of_the_route_itself(
    backend: flex.Backend,
    lengths: tuple[int, ...],
    compilations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flex.run, as masked_attention calls it: other lengths are two more, with symbolic sizes, of
    one block of keys and of several."""
    from torch._dynamo.testing import CompileCounter

    counter, real = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: real(f, backend=counter, **o))
    torch._dynamo.reset()  # it remembers which sizes changed in other tests
    flex._compiled.cache_clear()
    generator, cache = torch.Generator().manual_seed(0), MaskCache()
    for i in range(50):
        n = lengths[i % len(lengths)]
        fields = [torch.randint(0, 4, (1, n), generator=generator).sort().values for _ in range(5)]
        mask = shared_prefix() & document() & sliding_window(3 + i)
        held = cache.bind(mask, Segments(*(f.int() for f in fields)))
        q = torch.randn(1, n, 2, 8, generator=generator)
        with torch.no_grad():
            flex.run(Inputs(q, q, q, held, 0.3), backend=backend, geometry=flex.TRITON_GEOMETRY)
    flex._compiled.cache_clear()
    assert counter.frame_count == compilations
    assert cache.stats.misses == 50
