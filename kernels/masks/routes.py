"""One call for masked attention, the routes behind it, and the rules of the two lanes."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import torch

from blasst.kernels import dispatch
from blasst.kernels.call import no_tensor_reasons, scale_reasons
from blasst.kernels.errors import InvalidInputError, UnsupportedError
from blasst.kernels.masks import eager, fa4, flex, serving
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.crossover import MEASURED, Crossover
from blasst.kernels.masks.inputs import Inputs, Result
from blasst.kernels.plan import Plan
from blasst.kernels.support import own_geometry
from blasst.kernels.threshold import ThresholdError, check_lambda
from blasst.kernels.types import Geometry, Problem

logger = logging.getLogger("blasst.kernels")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Lane = Literal["throughput", "exact"]
Determinism = Literal["off", "warn", "strict"]


class Route(StrEnum):
    """Implementations of masked_attention."""

    FLEX_TRITON = "flex-triton"
    FLEX_FA4 = "flex-fa4"
    FA4 = "fa4"
    BLASST = "blasst"
    EAGER = "eager"


class NotReproducibleWarning(UserWarning):
    """torch asks for deterministic algorithms, to warn only, and this route's dq is not."""


@dataclass(frozen=True)
class Options:
    """What most callers leave alone.

    skip_lambda: BLASST's threshold (inference, route "blasst"); counters: int64 [num_kv_heads, 2].
    geometry: blocks of the route "blasst", whose votes hold for one geometry only; None = what its
    implementation for this problem has.
    """

    crossover: Crossover = field(default_factory=lambda: MEASURED)
    skip_lambda: float | None = None
    counters: torch.Tensor | None = None
    geometry: Geometry | None = None


@dataclass(frozen=True)
class RouteProblem:
    """All that decides which route runs. determinism: torch.use_deterministic_algorithms;
    seqlen_k: None = as many keys as query rows; compiling: torch.compile traces the call;
    flex_orders_dq: FlexAttention takes FA4's write order."""

    attention: Problem
    seqlen: int
    needs_grad: bool
    seqlen_k: int | None = None
    lane: Lane = "throughput"
    determinism: Determinism = "off"
    compiling: bool = False
    flex_orders_dq: bool = True
    fa4_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class RouteChoice:
    """The route that runs, why, and what speaks against those that would come first."""

    route: Route
    why: str
    against: Mapping[Route, tuple[str, ...]]

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {', '.join(r)}" for name, r in self.against.items())
        return f"{self.route}: {self.why}{others}"


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask,
    *,
    lane: Lane = "throughput",
    impl: str = "auto",
    softmax_scale: float | None = None,
    options: Options | None = None,
) -> torch.Tensor:
    """Attention of packed rows under a block mask; differentiable unless impl is "blasst".

    q: [batch, seqlen_q, num_heads, head_dim]; k, v: [batch, seqlen_k, num_kv_heads, head_dim].
    Rows that see nothing (padding) give 0. lane="exact": the same bits on every run, at every
    length and beside every neighbour, so FlexAttention's Triton kernels, outside torch.compile, or
    an error; lane="throughput": the fastest route.
    Raises InvalidInputError or UnsupportedError with every reason, before any work.
    """
    options = Options() if options is None else options
    if not torch.compiler.is_compiling():  # it has looked at its inputs itself
        _check_kinds(q, k, v, softmax_scale, options)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return attend(Inputs(q, k, v, mask, scale), lane=lane, impl=impl, options=options)[0]


def _check_kinds(q: object, k: object, v: object, softmax_scale: object, options: object) -> None:
    """Of what a thing is; what follows may rely on it."""
    named = {"q": q, "k": k, "v": v}
    if not isinstance(options, Options):
        raise InvalidInputError([f"options is {type(options).__name__}, it must be Options"])
    if options.counters is not None:
        named["counters"] = options.counters
    reasons = [*no_tensor_reasons(named), *scale_reasons(softmax_scale)]
    if isinstance(q, torch.Tensor) and (q.dim() != 4 or 0 in q.shape[2:]):
        reasons.append(f"q has shape {list(q.shape)}, it must be [batch, seqlen, heads, head_dim]")
    geometry = vars(options)["geometry"]
    if geometry is not None and not isinstance(geometry, Geometry):
        reasons.append(f"geometry is {type(geometry).__name__}, it must be Geometry")
    if options.skip_lambda is not None:
        try:
            check_lambda(options.skip_lambda)
        except ThresholdError as e:
            reasons.append(f"skip_lambda: {e}")
    if reasons:
        raise InvalidInputError(reasons)


def attend(x: Inputs, *, lane: Lane, impl: str, options: Options) -> Result:
    """masked_attention, with the lse where it is wanted."""
    problem = _problem(x, lane, options)
    route = choose(problem, impl, options.crossover).route
    if route is Route.EAGER:
        return eager.run(x)
    if route is Route.BLASST:
        plan = blasst_plan(problem, x)
        return serving.run(x, plan=plan, skip_lambda=options.skip_lambda, counters=options.counters)
    if route is Route.FLEX_TRITON:
        exact = lane == "exact"
        return flex.run(x, backend="TRITON", geometry=flex.TRITON_GEOMETRY, exact=exact)
    geometry, ordered = fa4_geometry(problem), needs_write_order(problem, route)
    if problem.needs_grad and problem.determinism == "warn" and not ordered:
        warnings.warn(
            f"dq of {route} is not reproducible here, and deterministic algorithms are set to warn "
            'only; lane="exact" is',
            NotReproducibleWarning,
            stacklevel=3,
        )
    if route is Route.FLEX_FA4:
        return flex.run(x, backend="FLASH", geometry=geometry, write_order=ordered)
    lists = x.mask.lists(geometry, backward=problem.needs_grad)
    return fa4.run(x, lists=lists, deterministic=ordered)


def choose(problem: RouteProblem, impl: str, crossover: Crossover) -> RouteChoice:
    """The route for `impl`, or the first that can run. Raises with every reason."""
    if impl != "auto":
        if impl not in list(Route):
            raise InvalidInputError(
                [f"impl {impl!r} is unknown; choose one of {', '.join(['auto', *Route])}"]
            )
        reasons = unsupported_reasons(problem, Route(impl))
        if reasons:
            raise UnsupportedError([f"{impl}: {reason}" for reason in reasons])
        return RouteChoice(Route(impl), "asked for", {})
    against: dict[Route, tuple[str, ...]] = {}
    for route, why in order(problem, crossover).items():
        reasons = unsupported_reasons(problem, route)
        if not reasons:
            choice = RouteChoice(route, why, against)
            if not problem.compiling:
                _log(str(choice))
            return choice
        against[route] = tuple(reasons)
    raise UnsupportedError(
        [f"{route}: {reason}" for route, reasons in against.items() for reason in reasons]
    )


def order(problem: RouteProblem, crossover: Crossover) -> dict[Route, str]:
    """Routes that "auto" tries, and why. Never the eager one on a GPU: it visits every block; where
    torch.compile traces, only what it can look into."""
    attention, needs_grad = problem.attention, problem.needs_grad
    ours = not needs_grad and not problem.compiling
    if problem.lane == "exact":
        return {Route.FLEX_TRITON: "the exact lane"}
    if attention.vote:
        return {Route.BLASST: "a skip_lambda is given"}
    if attention.device_type == "cpu":
        eager = {Route.EAGER: "a CPU"}
        return {Route.BLASST: "inference on a CPU"} | eager if ours else eager
    kind = "training" if needs_grad else "inference"
    measured = {
        route: crossover.first(route, attention.capability, needs_grad, attention.head_dim)
        for route, usable in (
            (Route.BLASST, ours),
            (Route.FA4, not problem.compiling),
            (Route.FLEX_FA4, True),
        )
        if usable
    }
    faster = {
        route: f"faster from {first} tokens on in {kind} ({crossover.source})"
        for route, first in measured.items()
        if problem.seqlen >= first
    }
    triton = {Route.FLEX_TRITON: f"no faster route is known for {kind} at this length and head_dim"}
    return faster | triton | {Route.FLEX_FA4: "the one that is left"} | faster


@functools.lru_cache(maxsize=256)
def _log(choice: str) -> None:
    """Each new automatic choice once."""
    logger.info("masked attention runs on %s", choice)


def unsupported_reasons(problem: RouteProblem, route: Route) -> list[str]:
    """Every reason why `route` must not run `problem`; the single statement of the lanes."""
    reasons = []
    if problem.lane == "exact" and route is not Route.FLEX_TRITON:
        reasons.append(
            'lane "exact" is flex-triton only: no other route is known to give the same bits on '
            "every run and beside every neighbour, whatever deterministic algorithms are set to"
        )
    if problem.lane == "exact" and problem.compiling:
        reasons.append(
            'lane "exact" is compiled with options of its own, which a surrounding torch.compile '
            "does not keep; call it in a function under torch.compiler.disable"
        )
    if problem.attention.vote and route is not Route.BLASST:
        reasons.append('a skip_lambda is for impl "blasst" only')
    if route in (Route.FLEX_TRITON, Route.FLEX_FA4, Route.FA4):
        reasons += _cuda_reasons(problem)
    if route in (Route.FLEX_FA4, Route.FA4):
        reasons += _fa4_reasons(problem, route)
    if route is Route.BLASST:
        reasons += _blasst_reasons(problem)
    return reasons


def _cuda_reasons(problem: RouteProblem) -> list[str]:
    if problem.attention.device_type != "cuda":
        return [f"tensors are on {problem.attention.device_type}, this route needs a CUDA GPU"]
    return []


def _fa4_reasons(problem: RouteProblem, route: Route) -> list[str]:
    reasons = list(problem.fa4_reasons)
    attention = problem.attention
    if attention.dtype not in ("bfloat16", "float16"):
        reasons.append(f"dtype {attention.dtype} is not bfloat16 or float16")
    if attention.head_dim not in fa4.HEAD_DIMS:
        reasons.append(
            f"head_dim {attention.head_dim} is not a multiple of 8 up to 128, as "
            "FlashAttention-4's backward needs it for blocks of 128 keys"
        )
    capability = attention.capability
    if capability is not None and capability[0] not in fa4.GEOMETRIES:
        reasons.append(
            f"compute capability {capability[0]}.{capability[1]} has no block-sparse backward in "
            "FlashAttention-4, it needs 9.x or 10.x"
        )
    strict = problem.needs_grad and problem.determinism == "strict"
    if strict and not needs_write_order(problem, route):
        reasons.append(
            "torch.use_deterministic_algorithms(True) is set, and FlashAttention-4 has a "
            "deterministic block-sparse backward on compute capability 10.x only, through "
            "FlexAttention from torch 2.13 on; use flex-triton"
        )
    return reasons


def _blasst_reasons(problem: RouteProblem) -> list[str]:
    reasons = []
    if problem.needs_grad:
        reasons.append("it has no backward; call it in torch.no_grad() or choose another route")
    if problem.seqlen_k is not None and problem.seqlen > problem.seqlen_k:
        reasons.append(
            f"{problem.seqlen} query rows and {problem.seqlen_k} keys: to it the rows are the last "
            "of the keys, so they cannot be more"
        )
    try:
        dispatch.choose(problem.attention)
    except UnsupportedError as e:
        reasons += e.reasons
    return reasons


def blasst_geometry(problem: RouteProblem) -> Geometry:
    """What is asked for, or what the kernel that will run has."""
    attention = problem.attention
    return attention.geometry or own_geometry(attention, dispatch.choose(attention).impl)


def blasst_plan(problem: RouteProblem, x: Inputs) -> Plan:
    """The prefill kernel that will run, and the mask in its form."""
    attention, geometry = problem.attention, blasst_geometry(problem)
    spec = serving.spec_for(x.mask, x.softmax_scale, geometry)
    return Plan(
        dispatch.choose(attention).impl,
        replace(attention, geometry=geometry),
        spec,
        x.softmax_scale,
        geometry,
    )


def needs_write_order(problem: RouteProblem, route: Route) -> bool:
    """Whether FA4's backward runs deterministically: asked for, and there is such a kernel that
    the route can reach."""
    capability = problem.attention.capability
    return (
        problem.needs_grad
        and problem.determinism != "off"
        and capability is not None
        and capability[0] == 10
        and (route is not Route.FLEX_FA4 or problem.flex_orders_dq)
    )


def fa4_geometry(problem: RouteProblem) -> Geometry:
    """FA4's block size on this GPU."""
    assert problem.attention.capability is not None
    return fa4.GEOMETRIES[problem.attention.capability[0]]


def _problem(x: Inputs, lane: Lane, options: Options) -> RouteProblem:
    if not isinstance(x.mask, AttentionMask):
        raise InvalidInputError(
            [
                f"mask is {type(x.mask).__name__}, it must be an AttentionMask: "
                "bind(mask, batch.segments, device)"
            ]
        )
    reasons = list(_input_reasons(x))
    q, k = x.q, x.k
    if lane not in ("throughput", "exact"):
        reasons.append(f'lane {lane!r} must be "throughput" or "exact"')
    if reasons:
        raise InvalidInputError(reasons)
    determinism: Determinism = "off"
    if torch.are_deterministic_algorithms_enabled():
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        determinism = "warn" if warn else "strict"
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    return RouteProblem(
        attention=Problem(
            head_dim=q.shape[-1],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            dtype=str(q.dtype).removeprefix("torch."),
            device_type=q.device.type,
            capability=capability,
            causal=x.mask.is_causal,
            block_mask=True,
            vote=options.skip_lambda is not None,
            geometry=options.geometry,
        ),
        seqlen=q.shape[1],
        needs_grad=x.needs_grad,
        seqlen_k=k.shape[1],
        lane=lane,
        determinism=determinism,
        compiling=torch.compiler.is_compiling(),
        flex_orders_dq=capability is None or capability[0] != 10 or flex.orders_dq(),
        fa4_reasons=fa4.fa4_reasons() if q.is_cuda else (),
    )


def _input_reasons(x: Inputs) -> list[str]:
    q, k, v, mask = x.q, x.k, x.v, x.mask
    reasons = list(scale_reasons(x.softmax_scale))
    lengths = mask.seqlen_q, mask.seqlen_k, mask.seqlen_k
    for name, t, seqlen in zip("qkv", (q, k, v), lengths, strict=True):
        if t.dim() != 4 or t.shape[:2] != (mask.batch, seqlen):
            reasons.append(
                f"{name} has shape {list(t.shape)}, the mask is for "
                f"[{mask.batch}, {seqlen}, heads, head_dim]"
            )
        if t.device != mask.device:
            reasons.append(f"{name} is on {t.device}, the mask on {mask.device}; bind it there")
        if t.dtype != q.dtype:
            reasons.append(f"{name} has dtype {t.dtype}, q has {q.dtype}; they must be equal")
    if not reasons:
        if k.shape != v.shape or q.shape[3] != k.shape[3]:
            reasons.append(
                f"k {list(k.shape)} and v {list(v.shape)} must be equal, with q's head_dim "
                f"{q.shape[3]}"
            )
        elif q.dtype not in FLOATS:
            names = ", ".join(map(str, FLOATS))
            reasons.append(f"q has dtype {q.dtype}, it must be a floating dtype: {names}")
        elif not k.shape[2] or q.shape[2] % k.shape[2]:
            reasons.append(f"num_heads {q.shape[2]} is not a multiple of num_kv_heads {k.shape[2]}")
    return reasons
