"""Attention problems as cases: inputs, the oracle of blasst.kernels, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from blasst.kernels.block_lists import group_lists
from blasst.kernels.call import check_call
from blasst.kernels.cute.host import for_each_head
from blasst.kernels.reference import ReferenceResult, reference_attention
from blasst.kernels.testing import DialOptions, cumulative, dialled_inputs, paged
from blasst.kernels.types import LOG2_E, AttentionSpec, Geometry, PagedKV, RaggedKV
from blasst.kernels.verify.subject import Case
from blasst.kernels.verify.subjects.masks import block_mask

TIE = 2e-3  # log2 units: a vote this near to lambda may go either way in float32
TILE_KEYS = 128
LEVEL_KEYS = 64  # keys of one level, so that votes go both ways within a tile


@dataclass(frozen=True)
class Shape:
    """seqlens: (queries, keys) of each request. mag: lambda = 2 ** (-mag / 1000), of all requests
    or one a request, again and again; None: 0.05, 0.3, 0.001, 0.6 and keys that hardly differ.

    skip_rate: dialled inputs, one request, with this share of skipped blocks. mask: of
    `masks.MASKS`, "" = none.
    """

    seqlens: tuple[tuple[int, int], ...]
    num_heads: int = 2
    num_kv_heads: int = 1
    mag: float | tuple[float, ...] | None = None
    skip_rate: float | None = None
    seed: int = 0
    mask: str = ""

    @property
    def mags(self) -> tuple[float, ...]:
        """mag as a tuple, () for None."""
        if self.mag is None:
            return ()
        return self.mag if isinstance(self.mag, tuple) else (self.mag,)


@dataclass(frozen=True)
class Kernel:
    """What of a prefill kernel decides the inputs. page_size 0 = ragged keys. tiles: of a thread
    block, for the lists of a mask."""

    dtype: str
    head_dim: int
    causal: bool
    page_size: int
    vote: bool
    count: bool
    geometry: Geometry
    tiles: int = 1


def prefill_case(kernel: Kernel, shape: Shape) -> Case:
    """For launchers with the arguments of our prefill kernels."""
    q, ragged, lambdas = prefill_inputs(kernel, shape)
    kv: RaggedKV | PagedKV = paged(ragged, kernel.page_size) if kernel.page_size else ragged
    cu_q = cumulative([n for n, _ in shape.seqlens])
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    counters = torch.zeros(shape.num_kv_heads, 2, dtype=torch.int64)
    lengths = kv.seqlens_k if isinstance(kv, PagedKV) else kv.cu_seqlens_k
    table = kv.page_table if isinstance(kv, PagedKV) else None
    inputs = {"q": q, "k": kv.k, "v": kv.v, "cu_seqlens_q": cu_q, "key_lengths": lengths}
    if table is not None:
        inputs["page_table"] = table
    outputs = {"out": out, "lse": lse}
    if kernel.vote:
        inputs["skip_lambda"] = lambdas
    if kernel.count:
        outputs["counters"] = counters
    scale = q.shape[2] ** -0.5
    mask = None
    if shape.mask:
        mask = block_mask(shape.mask, shape.seqlens, shape.num_heads, kernel.geometry)
    spec = AttentionSpec(causal=kernel.causal, block_mask=mask, geometry=kernel.geometry)
    lists = None
    if mask is not None:
        call = check_call(q, kv, cu_q, spec, lambdas, None, None)
        lists = for_each_head(group_lists(call, kernel.tiles), shape.num_heads)
        inputs |= lists._asdict()
    arguments = [
        q, kv.k, kv.v, out, lse, cu_q, lengths, table, lambdas if kernel.vote else None,
        counters if kernel.count else None, None, lists, scale * LOG2_E,
        max(n for n, _ in shape.seqlens),
    ]  # fmt: skip
    check = _checker(shape, spec, (q, kv, cu_q, lambdas if kernel.vote else None), outputs)
    return Case(_name(kernel, shape), arguments, inputs, outputs, check)


def _name(kernel: Kernel, shape: Shape) -> str:
    lengths = "+".join(f"{a}x{b}" for a, b in shape.seqlens)
    parts = [lengths, f"{shape.num_heads}/{shape.num_kv_heads} heads"]
    parts += [f"pages of {kernel.page_size}"] if kernel.page_size else []
    parts += [f"MAG {'/'.join(f'{m:g}' for m in shape.mags)}"] if shape.mags else []
    parts += [f"skip rate {shape.skip_rate:g}"] if shape.skip_rate is not None else []
    parts += [f"mask {shape.mask}"] if shape.mask else []
    parts += [f"seed {shape.seed}"] if shape.seed else []
    return ", ".join(parts)


def prefill_inputs(kernel: Kernel, shape: Shape) -> tuple[torch.Tensor, RaggedKV, torch.Tensor]:
    """(q, k and v, skip_lambda) of a shape; page_size of the kernel plays no part."""
    dtype = getattr(torch, kernel.dtype)
    if shape.skip_rate is not None:
        ((queries, keys),) = shape.seqlens
        dialled = dialled_inputs(
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=kernel.head_dim,
            seqlen=queries, context=keys - queries, skip_rate=shape.skip_rate,
            causal=kernel.causal, options=DialOptions(dtype, kernel.geometry, shape.seed),
        )  # fmt: skip
        return dialled.q, dialled.kv, dialled.skip_lambda
    generator = torch.Generator().manual_seed(shape.seed)
    total_q, total_k = (sum(lengths) for lengths in zip(*shape.seqlens, strict=True))
    q = torch.randn(total_q, shape.num_heads, kernel.head_dim, generator=generator)
    k, v = (
        torch.randn(total_k, shape.num_kv_heads, kernel.head_dim, generator=generator)
        for _ in range(2)
    )
    q[..., 0] = 4.0
    # The rows of one warp in four see the levels less, so that warps of a tile disagree.
    q[torch.arange(total_q) % 128 // 16 == 2, :, 0] = 1.0
    # With a mag, whole tiles of keys lie as far apart as mags do.
    keys, spread = (LEVEL_KEYS, 8.0) if shape.mag is None else (TILE_KEYS, 24.0)
    level = torch.randn(total_k // keys + 1, shape.num_kv_heads, generator=generator)
    k[..., 0] += spread * level.repeat_interleave(keys, 0)[:total_k]
    lambdas = [2.0 ** (-mag / 1000) for mag in shape.mags] or [0.05, 0.3, 0.001, 0.6]
    chosen = torch.tensor((lambdas * len(shape.seqlens))[: len(shape.seqlens)])
    return (
        q.to(dtype),
        RaggedKV(k.to(dtype), v.to(dtype), cumulative([n for _, n in shape.seqlens])),
        chosen,
    )


def _checker(
    shape: Shape,
    spec: AttentionSpec,
    call: tuple[torch.Tensor, RaggedKV | PagedKV, torch.Tensor, torch.Tensor | None],
    outputs: dict[str, torch.Tensor],
) -> Callable[[], list[str]]:
    """Compares out, lse and counters with the oracle, which is computed once."""
    found: list[ReferenceResult] = []

    def oracle() -> ReferenceResult:
        if not found:
            q, kv, cu_q, lambdas = call
            found.append(reference_attention(q, kv, cu_q, spec=spec, skip_lambda=lambdas))
        return found[0]

    def check() -> list[str]:
        want = oracle()
        wrong = []
        eps = torch.finfo(outputs["out"].dtype).eps
        wrong += difference("out", outputs["out"], want.out, 2 * eps, 2 * eps)
        wrong += difference("lse", outputs["lse"], want.lse, 1e-4, 1e-4)
        if "counters" in outputs:
            expected = want.counts(shape.num_kv_heads)
            ties = sum(int((m.abs() < TIE).sum()) for m in want.margin)
            off = int((outputs["counters"] - expected).abs().sum())
            if off > ties:
                wrong.append(
                    f"counters {outputs['counters'].tolist()} instead of {expected.tolist()}"
                )
        return wrong

    return check


def difference(
    name: str, got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float
) -> list[str]:
    """One line when a value is off, naming the worst one."""
    got = got.double()
    same_infinity = torch.isinf(want) & (got == want)
    error = torch.where(same_infinity, 0.0, (got - want).abs())
    excess = error - (atol + rtol * torch.where(torch.isinf(want), 0.0, want.abs()))
    bad = ~(excess <= 0)
    if not bad.any():
        return []
    at = [int(i) for i in bad.nonzero()[0]]
    return [
        f"{name}: {int(bad.sum())} of {bad.numel()} values differ from the oracle, the first at "
        f"{at}: {float(got[tuple(at)]):.6g} instead of {float(want[tuple(at)]):.6g}"
    ]
