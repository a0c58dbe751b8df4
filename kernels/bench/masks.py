"""`blasst bench masks`: routes of masked attention, their speed, errors and bits.

Sections run one after the other and are written as they end, so that a box of time keeps its rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from blasst.kernels.bench import mask_cases as cases
from blasst.kernels.bench.mask_cases import Case, Run
from blasst.kernels.masks import MaskCache
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.cute_mod import cute_mask_mod
from blasst.kernels.masks.fa4 import GEOMETRIES, backward_tensors, load_fa4, sparse_tensors
from blasst.kernels.masks.flex import compiled_attention
from blasst.kernels.types import Geometry

Row = dict[str, Any]
TENSORS = ("out", "dq", "dk", "dv")
ERROR_TOKENS = 16384
"""Longest sequence of the float32 comparison: one head of it takes 6 GiB."""


@dataclass(frozen=True)
class Plan:
    """lengths: tokens; rounds: timed ones; small: tokens of the sections about bits; masks: names
    of mask_cases.MASKS."""

    lengths: tuple[int, ...]
    rounds: int
    device: str
    small: int = 4096
    num_heads: int = 16
    head_dim: int = 128
    masks: tuple[str, ...] = tuple(cases.MASKS)

    @property
    def routes(self) -> tuple[str, ...]:
        """With a backward, and then ours without."""
        trained = cases.ROUTES if self.device == "cuda" else ("eager",)
        return (*trained, cases.FORWARD_ONLY)

    def case(self, mask: str, tokens: int, batch: int = 1) -> Case:
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return Case(mask, tokens, batch, self.num_heads, self.head_dim, self.device, dtype)

    def run(self, route: str, mask: AttentionMask, qkv: cases.Tensors, grad: torch.Tensor) -> Run:
        """[out, dq, dk, dv] of a route, or [out] of ours."""
        function = cases.attend(route, mask)
        if route == cases.FORWARD_ONLY:
            forward = cases.forward(function, qkv)
            return lambda: [forward()]
        return cases.both(function, qkv, grad)


@dataclass(frozen=True)
class Contest:
    """Contenders of one mask and length, compiled, and why others are not among them."""

    mask: str
    tokens: int
    sparsity: float
    forward: dict[str, Run]
    both: dict[str, Run]
    left_out: dict[str, str]


def speed(plan: Plan) -> Iterator[Row]:
    """Forward, and forward + backward, of every route."""
    for tokens in plan.lengths:
        for name in plan.masks:
            yield from timed(plan, contest(plan, name, tokens))


def contest(plan: Plan, name: str, tokens: int) -> Contest:
    """Every route runs once in each direction, which compiles it."""
    case = plan.case(name, tokens)
    mask = cases.bound(case)
    qkv, grad = cases.inputs(case)
    found = Contest(name, tokens, mask.lists(Geometry()).sparsity, {}, {}, {})
    routes = [*plan.routes, *(("sdpa",) if tokens <= ERROR_TOKENS else ())]
    if name == "causal":
        routes += cases.CAUSAL_ONLY[: None if plan.device == "cuda" else 1]
    for route in routes:
        function = cases.attend(route, mask)
        found.forward[route] = cases.forward(function, qkv)
        why = refusal(found.forward[route])
        if why is None and route != cases.FORWARD_ONLY:
            found.both[route] = cases.both(function, qkv, grad)
            why = refusal(found.both[route])
        if why is not None:
            found.left_out[route] = why
            del found.forward[route]
            found.both.pop(route, None)
    return found


def timed(plan: Plan, found: Contest) -> Iterator[Row]:
    """One row a route. both_ms: None where there is no backward."""
    forward = cases.interleaved(found.forward, plan.rounds, plan.device)
    both = cases.interleaved(found.both, plan.rounds, plan.device)
    where: Row = {"mask": found.mask, "tokens": found.tokens}
    for route in forward:
        yield {
            **where, "route": route, "sparsity": found.sparsity,
            "forward_ms": forward[route], "both_ms": both.get(route),
        }  # fmt: skip
    for route, why in found.left_out.items():
        yield {**where, "route": route, "left_out": why}


def errors(plan: Plan) -> Iterator[Row]:
    """Relative mean error and largest error against float32, head by head."""
    for tokens in (n for n in plan.lengths if n <= ERROR_TOKENS):
        for name in plan.masks:
            case = plan.case(name, tokens)
            mask = cases.bound(case)
            qkv, grad = cases.inputs(case)
            exact = _float32(mask, qkv, grad)
            for route in (*plan.routes, "sdpa"):
                run = plan.run(route, mask, qkv, grad)
                if (why := refusal(run)) is not None:
                    yield {"mask": name, "tokens": tokens, "route": route, "left_out": why}
                    continue
                row: Row = {"mask": name, "tokens": tokens, "route": route}
                for label, got, want in zip(TENSORS, tensors(run), exact, strict=False):
                    off = (got.float() - want).abs()
                    row[f"{label}_relative"] = float(off.mean() / want.abs().mean())
                    row[f"{label}_max"] = float(off.max())
                yield row


def score_mod(plan: Plan) -> Iterator[Row]:
    """The same mask as a score_mod that returns -inf: no block is skipped. FlexAttention only;
    on a CPU forward only."""
    for tokens in (n for n in plan.lengths if n <= ERROR_TOKENS):
        for backend in ("TRITON", "FLASH") if plan.device == "cuda" else ("TRITON",):
            yield timed_forms(plan, forms(plan, tokens, backend))


@dataclass(frozen=True)
class Forms:
    """One mask as block mask and as score_mod, compiled. runs: by direction and form."""

    tokens: int
    backend: str
    runs: dict[str, dict[str, Run]]
    left_out: str | None = None


def timed_forms(plan: Plan, found: Forms) -> Row:
    """Milliseconds of both forms, and the largest difference of what they give."""
    row: Row = {"tokens": found.tokens, "backend": found.backend, "left_out": found.left_out}
    for direction, pair in found.runs.items():
        ms = cases.interleaved(pair, plan.rounds, plan.device)
        row[f"{direction}_mask_ms"], row[f"{direction}_score_ms"] = ms["mask"], ms["score"]
        row[f"{direction}_ratio"] = ms["score"] / ms["mask"]
        first, other = (tensors(run) for run in pair.values())
        row[f"{direction}_difference"] = max(
            float((a.float() - b.float()).abs().max()) for a, b in zip(first, other, strict=True)
        )
    return row


def forms(plan: Plan, tokens: int, backend: str) -> Forms:
    """Each form runs once in each direction, which compiles it."""
    case = plan.case("shared_prefix", tokens)
    mask = cases.bound(case)
    qkv, grad = cases.inputs(case)
    runs: dict[str, dict[str, Run]] = {"forward": {}, "both": {}}
    for form in ("mask", "score"):
        attend = flex_form(mask, form, backend)
        forward = cases.forward(attend, qkv)
        runs["forward"][form] = lambda forward=forward: [forward()]  # type: ignore[misc]
        runs["both"][form] = cases.both(attend, qkv, grad)
    if plan.device == "cpu":
        del runs["both"]
    for run in (run for pair in runs.values() for run in pair.values()):
        if (why := refusal(run)) is not None:
            return Forms(tokens, backend, {}, why)
    return Forms(tokens, backend, runs)


def flex_form(mask: AttentionMask, form: str, backend: str) -> Callable[..., torch.Tensor]:
    """FlexAttention with the mask as a block mask ("mask"), as a score_mod that returns -inf
    ("score"), or without it ("plain"). On a CPU the backend is the only one."""
    mod, compiled = mask.mask_mod, compiled_attention(dynamic=False)

    def hide(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(mod(b, h, q, k), score, -torch.inf)

    how: dict[str, Any] = {}
    if form != "plain":
        how = {"block_mask": mask.flex(Geometry())} if form == "mask" else {"score_mod": hide}
    if mask.device.type == "cuda":
        how["kernel_options"] = {"BACKEND": backend}

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(*(t.transpose(1, 2) for t in qkv), **how)
        return out.transpose(1, 2)

    return attend


def backward(plan: Plan) -> Iterator[Row]:
    """Direct FA4 with and without key-major lists: what its silent dense backward costs."""
    if plan.device != "cuda":
        yield {"left_out": "needs a CUDA GPU"}
        return
    for tokens in plan.lengths:
        for name in plan.masks:
            case = plan.case(name, tokens)
            mask = cases.bound(case)
            qkv, grad = cases.inputs(case)
            runs = {
                label: cases.both(_fa4(mask, with_lists), qkv, grad)
                for label, with_lists in (("sparse", True), ("dense", False))
            }
            if (why := refusal(runs["sparse"])) is not None:
                yield {"mask": name, "tokens": tokens, "left_out": why}
                continue
            ms = cases.interleaved(runs, plan.rounds, plan.device)
            yield {
                "mask": name, "tokens": tokens, "sparse_ms": ms["sparse"],
                "dense_ms": ms["dense"], "ratio": ms["dense"] / ms["sparse"],
            }  # fmt: skip


def lists(plan: Plan) -> Iterator[Row]:
    """Building a layout's block lists, finding it again in the cache, and FlexAttention's compiled
    create_block_mask for the same (on a GPU), in ms of wall time."""
    for tokens in plan.lengths:
        layout = cases.segments(tokens)
        for name in plan.masks:
            cache, expression = MaskCache(), cases.MASKS[name]

            def build(expression: Any = expression, layout: Any = layout) -> AttentionMask:
                mask = MaskCache().bind(expression, layout, plan.device)
                _ = mask.lists(Geometry()).visited_blocks
                return mask

            def find(cache: Any = cache, expression: Any = expression, layout: Any = layout) -> Any:
                return cache.bind(expression, layout, plan.device).lists(Geometry())

            find()
            yield {
                "mask": name, "tokens": tokens, "built_ms": _wall(build, 3),
                "create_block_mask_ms": _create_block_mask(plan, build()),
                "found_ms": _wall(find, 20), "hit_rate": cache.stats.hit_rate,
            }  # fmt: skip


def _create_block_mask(plan: Plan, mask: AttentionMask) -> float | None:
    """Both orientations, at once, as FlexAttention makes them."""
    if plan.device != "cuda":
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def create() -> None:
        made: Any = create_block_mask(
            mask.mask_mod,
            mask.batch,
            None,
            mask.seqlen_q,
            mask.seqlen_k,
            plan.device,
            _compile=True,
        )
        _ = int(made.kv_num_blocks.sum())

    return _wall(create, 3)


def _wall(run: Run, repeats: int) -> float:
    """Median milliseconds, after one run that is not timed."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def refusal(run: Run) -> str | None:
    """Runs once; why it cannot. Whatever a compiler behind a route raises is a row of the table."""
    try:
        run()
    except Exception as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    return None


def tensors(run: Run) -> list[torch.Tensor]:
    result = run()
    assert isinstance(result, list)
    return result


def _float32(mask: AttentionMask, qkv: cases.Tensors, grad: torch.Tensor) -> list[torch.Tensor]:
    parts = []
    for head in range(grad.shape[2]):
        one = [t[:, :, head : head + 1].float() for t in (*qkv, grad)]
        run = cases.both(cases.attend("eager", mask), (one[0], one[1], one[2]), one[3])
        parts.append(tensors(run))
    return [torch.cat(column, 2) for column in zip(*parts, strict=True)]


def fa4_forward(mask: AttentionMask) -> Callable[..., torch.Tensor]:
    """Direct FA4 with lists that are made here, for inference."""
    return _fa4(mask, False)


def _fa4(mask: AttentionMask, with_lists: bool) -> Callable[..., torch.Tensor]:
    fa4 = load_fa4()
    lists_ = mask.lists(GEOMETRIES[torch.cuda.get_device_capability()[0]])
    backward_lists = backward_tensors(fa4, lists_, deterministic=False) if with_lists else None
    forward_lists = sparse_tensors(fa4, lists_.by_query, lists_.geometry)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fa4.interface.flash_attn_func(
            q,
            k,
            v,
            mask_mod=cute_mask_mod(mask),
            aux_tensors=mask.aux_tensors,
            block_sparse_tensors=forward_lists,
            block_sparse_tensors_bwd=backward_lists,
        )[0]
        return out

    return run
