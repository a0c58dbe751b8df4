"""One checked call: every rule of the API's inputs, all reasons collected before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.overlap import overlaps_itself, share_memory
from blasst.kernels.threshold import ThresholdError, lambda_to_log2
from blasst.kernels.types import AttentionSpec, BlockMask, Geometry, PagedKV, Problem, RaggedKV

SCALES = (2.0**-100, 2.0**100)
"""Of scores: a little beyond, float32 holds no product of it."""


class Request(NamedTuple):
    """One request of a batch. Query row i (of seqlen_q) is at key position `context` + i."""

    index: int  # type: ignore[assignment]  # hides a method that tuples have
    q_start: int
    seqlen_q: int
    seqlen_k: int

    @property
    def context(self) -> int:
        return self.seqlen_k - self.seqlen_q


@dataclass(frozen=True)
class Call:
    """Checked inputs. log2_lambda: one per request, -inf = skips nothing; None = dense, no vote.
    geometry: what votes; 128 x 128 unless the caller or the implementation has another."""

    q: torch.Tensor
    kv: PagedKV | RaggedKV
    cu_seqlens_q: torch.Tensor
    skip_lambda: torch.Tensor | None
    requests: tuple[Request, ...]
    spec: AttentionSpec
    softmax_scale: float
    log2_lambda: tuple[float, ...] | None
    problem: Problem
    geometry: Geometry

    def voting(self, own: Geometry) -> Call:
        """The same call on an implementation that votes on `own` unless told otherwise."""
        return self if self.problem.geometry is not None else replace(self, geometry=own)

    @property
    def group_size(self) -> int:
        """Query heads of one kv head."""
        return self.problem.num_heads // self.problem.num_kv_heads

    def gather(self, request: Request, kv_head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of one kv head, [seqlen_k, head_dim]: views if contiguous, else copies."""
        k, v = self.kv.k[..., kv_head, :], self.kv.v[..., kv_head, :]
        if isinstance(self.kv, RaggedKV):
            start = int(self.kv.cu_seqlens_k[request.index])
            return k[start : start + request.seqlen_k], v[start : start + request.seqlen_k]
        pages = self.kv.page_table[request.index, : -(-request.seqlen_k // k.shape[1])]
        rows_k, rows_v = (t.index_select(0, pages).flatten(0, 1) for t in (k, v))
        return rows_k[: request.seqlen_k], rows_v[: request.seqlen_k]


def check_call(
    q: torch.Tensor,
    kv: PagedKV | RaggedKV,
    cu_seqlens_q: torch.Tensor,
    spec: AttentionSpec,
    skip_lambda: torch.Tensor | None,
    out: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> Call:
    """The checked call. Raises InvalidInputError with every reason."""
    reasons = list(_kind_reasons(q, kv, cu_seqlens_q, spec, skip_lambda, out, counters))
    if reasons:
        raise InvalidInputError(reasons)
    reasons += [*_tensor_reasons(q, kv, cu_seqlens_q), *_out_reasons(q, kv, out)]
    if reasons:
        raise InvalidInputError(reasons)
    batch = cu_seqlens_q.numel() - 1
    ends = cu_seqlens_q.tolist()
    reasons += _cumulative_reasons("cu_seqlens_q", ends, q.shape[0])
    seqlens_k, kv_reasons = _key_lengths(kv, batch)
    reasons += kv_reasons
    log2_lambda, lambda_reasons = _log2_lambdas(skip_lambda, batch, q.device)
    reasons += lambda_reasons
    reasons += counter_reasons(counters, kv.k.shape[-2], q.device)
    reasons += scale_reasons(spec.softmax_scale)
    if not reasons:
        requests = tuple(
            Request(i, ends[i], ends[i + 1] - ends[i], seqlens_k[i]) for i in range(batch)
        )
        reasons += _block_mask_reasons(spec, requests, q.shape[1], q.device)
    if reasons:
        raise InvalidInputError(reasons)
    scale = float(q.shape[-1] ** -0.5 if spec.softmax_scale is None else spec.softmax_scale)
    problem = _problem(q, kv, spec, skip_lambda)
    geometry = problem.geometry or Geometry()
    return Call(
        q, kv, cu_seqlens_q, skip_lambda, requests, spec, scale, log2_lambda, problem, geometry
    )


def _kind_reasons(
    q: object,
    kv: object,
    cu_seqlens_q: object,
    spec: object,
    skip_lambda: object,
    out: object,
    counters: object,
) -> Iterator[str]:
    """Of what a thing is; what follows may rely on it."""
    named = {"q": q, "cu_seqlens_q": cu_seqlens_q}
    if isinstance(kv, PagedKV | RaggedKV):
        named |= vars(kv)
    else:
        yield f"kv is {type(kv).__name__}, it must be PagedKV or RaggedKV"
    optional = {"skip_lambda": skip_lambda, "out": out, "counters": counters}
    named |= {name: t for name, t in optional.items() if t is not None}
    if isinstance(spec, AttentionSpec):
        yield from _spec_reasons(vars(spec))
        if isinstance(spec.block_mask, BlockMask):
            lists = vars(spec.block_mask)
            named |= {f"block_mask.{name}": t for name, t in lists.items() if name != "mask_mod"}
    else:
        yield f"spec is {type(spec).__name__}, it must be AttentionSpec"
    yield from no_tensor_reasons(named)
    if isinstance(q, torch.Tensor) and q.device.type not in ("cpu", "cuda"):
        yield f"q is on {q.device}, attention runs on cpu and cuda"


def no_tensor_reasons(named: Mapping[str, object]) -> Iterator[str]:
    """Why a thing cannot be read as memory with strides; empty: all can."""
    for name, t in named.items():
        if not isinstance(t, torch.Tensor):
            yield f"{name} is {type(t).__name__}, it must be a tensor"
        elif t.layout != torch.strided or t.is_neg() or t.is_conj():
            how = t.layout if t.layout != torch.strided else "a view that changes values when read"
            yield f"{name} is {how}, it must be an ordinary dense tensor"


def scale_reasons(scale: object) -> Iterator[str]:
    """Why a softmax_scale cannot be used; None, the default, can."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        yield f"softmax_scale is {type(scale).__name__}, it must be a number or None"
    elif not SCALES[0] <= float(scale) <= SCALES[1]:
        yield (
            f"softmax_scale {scale} must be a finite number > 0, "
            f"from {SCALES[0]:.1g} to {SCALES[1]:.1g}"
        )


def _spec_reasons(spec: Mapping[str, object]) -> Iterator[str]:
    geometry, mask = spec["geometry"], spec["block_mask"]
    if not isinstance(spec["causal"], bool):
        yield f"causal is {spec['causal']!r}, it must be True or False"
    if geometry is not None and not isinstance(geometry, Geometry):
        yield f"geometry is {type(geometry).__name__}, it must be Geometry or None"
    if mask is not None and not isinstance(mask, BlockMask):
        yield f"block_mask is {type(mask).__name__}, it must be BlockMask or None"
    elif mask is not None and not callable(vars(mask)["mask_mod"]):
        yield "block_mask.mask_mod must be a function"


def _problem(
    q: torch.Tensor, kv: PagedKV | RaggedKV, spec: AttentionSpec, skip_lambda: torch.Tensor | None
) -> Problem:
    geometry = spec.geometry
    if geometry is None and spec.block_mask is not None:
        geometry = Geometry()
    return Problem(
        head_dim=q.shape[-1],
        num_heads=q.shape[1],
        num_kv_heads=kv.k.shape[-2],
        dtype=str(q.dtype).removeprefix("torch."),
        device_type=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        page_size=kv.k.shape[1] if isinstance(kv, PagedKV) else None,
        causal=spec.causal,
        block_mask=spec.block_mask is not None,
        vote=skip_lambda is not None,
        geometry=geometry,
    )


def _tensor_reasons(
    q: torch.Tensor, kv: PagedKV | RaggedKV, cu_seqlens_q: torch.Tensor
) -> Iterator[str]:
    if q.dim() != 3 or 0 in q.shape[1:]:
        yield f"q has shape {_shape(q)}, it must be [total_q, num_heads, head_dim]"
    rank, form = (
        (4, "[num_pages, page_size, num_kv_heads, head_dim]")
        if isinstance(kv, PagedKV)
        else (3, "[total_k, num_kv_heads, head_dim]")
    )
    for name, t in (("k", kv.k), ("v", kv.v)):
        if t.dim() != rank or 0 in t.shape[1:]:
            yield f"{name} has shape {_shape(t)}, it must be {form}"
        if t.dtype != q.dtype:
            yield f"{name} has dtype {t.dtype}, q has {q.dtype}; they must be equal"
        if t.device != q.device:
            yield f"{name} is on {t.device}, q on {q.device}; they must be on one device"
        if t.shape[-1:] != q.shape[-1:]:
            yield f"{name} has head_dim {_last(t)}, q has {_last(q)}; they must be equal"
    if kv.k.shape != kv.v.shape:
        yield f"k has shape {_shape(kv.k)}, v {_shape(kv.v)}; they must be equal"
    yield from _int32_reasons("cu_seqlens_q", cu_seqlens_q, 1, "[batch + 1]", q.device)
    if cu_seqlens_q.dim() == 1 and cu_seqlens_q.numel() == 0:
        yield "cu_seqlens_q is empty, it must have batch + 1 elements"
    if isinstance(kv, PagedKV):
        yield from _int32_reasons("page_table", kv.page_table, 2, "[batch, max_pages]", q.device)
        yield from _int32_reasons("seqlens_k", kv.seqlens_k, 1, "[batch]", q.device)
    else:
        yield from _int32_reasons("cu_seqlens_k", kv.cu_seqlens_k, 1, "[batch + 1]", q.device)
    if torch.is_grad_enabled() and (q.requires_grad or kv.k.requires_grad or kv.v.requires_grad):
        yield "an input requires a gradient, this attention has none; call it in torch.no_grad()"


def _int32_reasons(
    name: str, t: torch.Tensor, rank: int, form: str, device: torch.device
) -> Iterator[str]:
    if t.dim() != rank:
        yield f"{name} has shape {_shape(t)}, it must be {form}"
    if t.dtype != torch.int32:
        yield f"{name} has dtype {t.dtype}, it must be int32"
    if t.device != device:
        yield f"{name} is on {t.device}, q on {device}; they must be on one device"
    yield from _spread_reasons(name, t)


def _spread_reasons(name: str, t: torch.Tensor) -> Iterator[str]:
    """Kernels read rows of numbers one after the other, whatever the strides say."""
    if t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1:
        yield f"{name} has stride {t.stride(-1)}, its numbers must follow one another"


def _cumulative_reasons(name: str, ends: Sequence[int], total: int) -> Iterator[str]:
    if ends[0] != 0:
        yield f"{name} starts with {ends[0]}, it must start with 0"
    for i, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            yield f"{name} falls from {a} to {b} at request {i}, it must not decrease"
            break
    if ends[-1] != total:
        yield f"{name} ends with {ends[-1]}, the tensor has {total} rows; they must be equal"


def _key_lengths(kv: PagedKV | RaggedKV, batch: int) -> tuple[list[int], list[str]]:
    if isinstance(kv, RaggedKV):
        ends = kv.cu_seqlens_k.tolist()
        if len(ends) != batch + 1:
            return [], [f"cu_seqlens_k has {len(ends)} elements for a batch of {batch}"]
        lengths = [b - a for a, b in pairwise(ends)]
        return lengths, list(_cumulative_reasons("cu_seqlens_k", ends, kv.k.shape[0]))
    lengths = kv.seqlens_k.tolist()
    num_pages, page_size = kv.k.shape[:2]
    rows, max_pages = kv.page_table.shape
    if len(lengths) != batch or rows != batch:
        return [], [
            f"seqlens_k has {len(lengths)} and page_table {rows} rows for a batch of {batch}"
        ]
    reasons = []
    for i, n in enumerate(lengths):
        if not 0 <= n <= max_pages * page_size:
            reasons.append(
                f"seqlens_k of request {i} is {n}, its page_table row holds 0 to "
                f"{max_pages * page_size} keys"
            )
    if not reasons and batch:
        pages_used = -(-kv.seqlens_k.long() // page_size)
        used = torch.arange(max_pages, device=pages_used.device) < pages_used[:, None]
        bad = used & ((kv.page_table < 0) | (kv.page_table >= num_pages))
        if bad.any():
            i, j = bad.nonzero()[0].tolist()
            reasons.append(
                f"page_table[{i}, {j}] is {int(kv.page_table[i, j])}, outside the cache's pages "
                f"0..{num_pages - 1}"
            )
    return lengths, reasons


def _log2_lambdas(
    skip_lambda: torch.Tensor | None, batch: int, device: torch.device
) -> tuple[tuple[float, ...] | None, list[str]]:
    if skip_lambda is None:
        return None, []
    reasons = []
    if skip_lambda.shape != (batch,):
        reasons.append(f"skip_lambda has shape {_shape(skip_lambda)}, it must be [{batch}]")
    if skip_lambda.dtype not in (torch.float32, torch.float64):
        reasons.append(f"skip_lambda has dtype {skip_lambda.dtype}, it must be float32 or float64")
    if skip_lambda.device != device:
        reasons.append(f"skip_lambda is on {skip_lambda.device}, q on {device}")
    reasons += _spread_reasons("skip_lambda", skip_lambda)
    if reasons:
        return None, reasons
    log2_lambda = []
    values = skip_lambda.cpu()  # one wait for the device
    pairs = zip(values.tolist(), values.float().tolist(), strict=True)
    for i, (value, single) in enumerate(pairs):
        try:
            log2_lambda.append(lambda_to_log2(value))
        except ThresholdError as e:
            reasons.append(f"skip_lambda[{i}]: {e}")
            continue
        if single >= 1.0:
            reasons.append(
                f"skip_lambda[{i}]: lambda {value!r} is 1 in float32, as kernels read it"
            )
    return tuple(log2_lambda), reasons


def _out_reasons(
    q: torch.Tensor, kv: PagedKV | RaggedKV, out: torch.Tensor | None
) -> Iterator[str]:
    if out is None:
        return
    if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
        yield (
            f"out is {out.dtype} {_shape(out)} on {out.device}, it must be like q: "
            f"{q.dtype} {_shape(q)} on {q.device}"
        )
        return
    if overlaps_itself(out):
        yield f"out has strides {out.stride()}: some of its elements may share memory"
    for name, t in (("q", q), ("k", kv.k), ("v", kv.v)):
        if t.device == out.device and share_memory(out, t):
            yield f"out shares memory with {name}, which is read while out is written"


def counter_reasons(
    counters: torch.Tensor | None, num_kv_heads: int, device: torch.device
) -> Iterator[str]:
    """Why `counters` cannot be counted in; empty: they can, or there are none."""
    if counters is None:
        return
    if counters.shape != (num_kv_heads, 2) or counters.dtype != torch.int64:
        yield (
            f"counters is {counters.dtype} {_shape(counters)}, it must be int64 "
            f"[{num_kv_heads}, 2] (visited, skipped)"
        )
    elif not counters.is_contiguous():
        yield f"counters has strides {counters.stride()}, it must be contiguous"
    if counters.device != device:
        yield f"counters is on {counters.device}, q on {device}; they must be on one device"


def _block_mask_reasons(
    spec: AttentionSpec, requests: Sequence[Request], num_heads: int, device: torch.device
) -> Iterator[str]:
    mask = spec.block_mask
    if mask is None:
        return
    tile_m = (spec.geometry or Geometry()).tile_m
    m_blocks = max((-(-r.seqlen_q // tile_m) for r in requests), default=0)
    readable = True
    for kind, counts, indices in _lists(mask):
        if counts.dtype != torch.int32 or indices.dtype != torch.int32:
            yield f"block_mask {kind} lists are {counts.dtype} and {indices.dtype}, must be int32"
        if counts.device != device or indices.device != device:
            where = f"{counts.device} and {indices.device}"
            yield f"block_mask {kind} lists are on {where}, q on {device}"
            readable = False
        if counts.dim() != 3 or indices.dim() != 4 or indices.shape[:3] != counts.shape:
            yield (
                f"block_mask {kind} lists have shapes {_shape(counts)} and {_shape(indices)}, must "
                "be [batch or 1, num_heads or 1, m_blocks] and the same with n_blocks appended"
            )
            continue
        b, h, m = counts.shape
        if b not in (1, len(requests)) or h not in (1, num_heads) or m < m_blocks:
            yield (
                f"block_mask {kind} counts have shape {_shape(counts)}, the call needs "
                f"[{len(requests)} or 1, {num_heads} or 1, at least {m_blocks}]"
            )
    if readable:
        yield from _value_reasons(mask)


_CHECKED: WeakKeyDictionary[BlockMask, tuple[str, ...]] = WeakKeyDictionary()


def _value_reasons(mask: BlockMask) -> tuple[str, ...]:
    """Of the numbers in the lists, which are read once: reading them waits for the device."""
    if mask not in _CHECKED:
        _CHECKED[mask] = tuple(_list_value_reasons(mask))
    return _CHECKED[mask]


def _list_value_reasons(mask: BlockMask) -> Iterator[str]:
    for kind, counts, indices in _lists(mask):
        if counts.dim() != 3 or indices.dim() != 4 or indices.shape[:3] != counts.shape:
            continue  # said before
        if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= indices.shape[3]:
            yield f"block_mask {kind} counts must lie in 0..{indices.shape[3]}"
        elif indices.numel() and bool(((indices < 0) & _listed(counts, indices)).any()):
            yield f"block_mask {kind} indices must not be negative"


def _lists(mask: BlockMask) -> tuple[tuple[str, torch.Tensor, torch.Tensor], ...]:
    return (
        ("partial", mask.partial_counts, mask.partial_indices),
        ("full", mask.full_counts, mask.full_indices),
    )


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.arange(indices.shape[3], device=counts.device) < counts[..., None]


def _shape(t: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, t.shape)) + "]"


def _last(t: torch.Tensor) -> int | None:
    return t.shape[-1] if t.dim() else None
