"""Named problems, and their inputs with a chosen skip rate on the device that is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from blasst.kernels.call import check_call
from blasst.kernels.dispatch import choose, implementation
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.support import own_geometry
from blasst.kernels.testing import DialOptions, cumulative, dialled_inputs, paged
from blasst.kernels.types import AttentionSpec, Geometry, PagedKV, Problem, RaggedKV

Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Requests of equal length. tokens: of each, None = as asked for; page_size: None = contiguous.

    on: the device type that it is meant for.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens: int | None = None
    batch: int = 1
    causal: bool = True
    page_size: int | None = None
    on: str = "cuda"

    @property
    def flops(self) -> float:
        """Of dense attention: two products of 2 * head_dim operations a visible pair."""
        assert self.tokens is not None
        pairs = self.tokens * (self.tokens + 1) / 2 if self.causal else self.tokens**2
        return 4.0 * self.head_dim * self.num_heads * self.batch * pairs


_LAYER = Shape(32, 8, 128)  # of a Llama 8B

PROBLEMS = {
    "smollm2-135m": Shape(9, 3, 64, page_size=128, on="cpu"),
    "llama-8b": Shape(32, 8, 128, page_size=128, on="cpu"),
    "8k": replace(_LAYER, tokens=8192),
    "16k": replace(_LAYER, tokens=16384),
    "32k": replace(_LAYER, tokens=32768),
    "64k": replace(_LAYER, tokens=65536),
    "128k": replace(_LAYER, tokens=131072),
    "8k-full": replace(_LAYER, tokens=8192, batch=2, causal=False),
    "16k-hd64": replace(_LAYER, tokens=16384, head_dim=64),
    "64k-hd64": replace(_LAYER, tokens=65536, head_dim=64),
    **{
        f"64k-page{page}": replace(_LAYER, tokens=65536, page_size=page)
        for page in (16, 32, 64, 128, 256)
    },
}
DEFAULTS = {"cpu": ("smollm2-135m", "llama-8b"), "cuda": ("64k",)}


@dataclass(frozen=True)
class Inputs:
    """Dialled requests on a device. ragged: the keys, contiguous; kv: as the problem has them."""

    shape: Shape
    q: torch.Tensor
    ragged: RaggedKV
    kv: PagedKV | RaggedKV
    cu_seqlens_q: torch.Tensor
    skip_lambda: torch.Tensor

    def batched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as [batch, tokens, heads, head_dim]."""
        batch = self.shape.batch
        q, k, v = (t.unflatten(0, (batch, -1)) for t in (self.q, self.ragged.k, self.ragged.v))  # type: ignore[no-untyped-call]
        return q, k, v


def make_inputs(
    shape: Shape, skip_rate: float, *, device: str, dtype: torch.dtype, geometry: Geometry
) -> Inputs:
    """One dialled request, repeated; drawn on the device. geometry: what votes."""
    assert shape.tokens is not None
    x = dialled_inputs(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        seqlen=shape.tokens,
        skip_rate=skip_rate,
        causal=shape.causal,
        options=DialOptions(dtype=dtype, geometry=geometry, device=device),
    )
    ends = cumulative([shape.tokens] * shape.batch).to(device)
    q, k, v = (t.repeat(shape.batch, 1, 1) for t in (x.q, x.kv.k, x.kv.v))
    ragged = RaggedKV(k, v, ends)
    skip_lambda = x.skip_lambda.to(device).repeat(shape.batch)
    made = Inputs(shape, q, ragged, ragged, ends, skip_lambda)
    return made if shape.page_size is None else in_pages(made, shape.page_size)


def in_pages(x: Inputs, page_size: int) -> Inputs:
    """The same keys in shuffled pages. Stored transposed in the pages of a CPU cache, as vLLM does.
    Raises UnsupportedError where a request of a GPU's problem does not fill its last page."""
    shape = replace(x.shape, page_size=page_size)
    if not x.q.is_cuda:
        return replace(x, shape=shape, kv=paged(x.ragged, page_size, transposed_keys=True))
    assert shape.tokens is not None
    if shape.tokens % page_size:
        raise UnsupportedError([f"{shape.tokens} tokens do not fill pages of {page_size}"])
    pages = x.ragged.k.shape[0] // page_size
    order = torch.randperm(pages, device=x.q.device)
    k, v = (
        torch.empty_like(t)
        .view(pages, page_size, *t.shape[1:])
        .index_copy_(0, order, t.view(pages, page_size, *t.shape[1:]))
        for t in (x.ragged.k, x.ragged.v)
    )
    table = order.int().view(shape.batch, -1)
    return replace(x, shape=shape, kv=PagedKV(k, v, table, x.cu_seqlens_q.diff().int()))


@dataclass(frozen=True)
class Ours:
    """One of our implementations on these inputs, checked once. counters: [num_kv_heads, 2]."""

    run: Run
    counters: torch.Tensor

    @property
    def skip_rate(self) -> float | None:
        """Of all runs so far; None when nothing was counted."""
        visited, skipped = self.counters.sum(0).tolist()
        return skipped / visited if visited else None


def ours(impl: str, x: Inputs, *, vote: bool) -> Ours:
    """Raises UnsupportedError with every reason."""
    counters = torch.zeros(x.shape.num_kv_heads, 2, dtype=torch.int64, device=x.q.device)
    out = torch.empty_like(x.q)
    skip_lambda = x.skip_lambda if vote else None
    spec = AttentionSpec(causal=x.shape.causal)
    call = check_call(x.q, x.kv, x.cu_seqlens_q, spec, skip_lambda, out, counters)
    chosen = choose(call.problem, impl).impl
    call = call.voting(own_geometry(call.problem, chosen))
    attend = implementation(chosen)
    return Ours(lambda: attend(call, out, counters), counters)


def geometry_for(impl: str, shape: Shape, device: str, dtype: str) -> Geometry:
    """What `impl` votes on for this shape: the blocks that the dial speaks of."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    problem = Problem(
        shape.head_dim, shape.num_heads, shape.num_kv_heads, dtype, device, capability,
        shape.page_size, shape.causal,
    )  # fmt: skip
    return own_geometry(problem, choose(problem, impl).impl)
