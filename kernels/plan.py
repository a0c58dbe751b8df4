"""Attention for an engine: the batch is checked once on the host, then every layer runs on trust.

Nothing here reads a tensor's values, so nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.dispatch import implementation
from blasst.kernels.errors import InvalidInputError
from blasst.kernels.support import own_geometry
from blasst.kernels.threshold import ThresholdError, lambda_to_log2
from blasst.kernels.types import AttentionSpec, Geometry, Impl, PagedKV, Problem, RaggedKV


class Batch(NamedTuple):
    """Requests as the host knows them. log2_lambda: one a request; None = dense, no vote."""

    requests: tuple[Request, ...]
    log2_lambda: tuple[float, ...] | None


def check_batch(
    ends: Sequence[int], seqlens_k: Sequence[int], skip_lambda: Sequence[float] | None
) -> Batch:
    """The batch. ends: first query row of each request and the end of the last, [batch + 1];
    seqlens_k: keys of each request, those of its query rows included.

    Raises InvalidInputError with every reason.
    """
    reasons = []
    if len(ends) != len(seqlens_k) + 1 or not ends:
        raise InvalidInputError([f"{len(ends)} ends for {len(seqlens_k)} requests"])
    requests = tuple(Request(i, ends[i], ends[i + 1] - ends[i], n) for i, n in enumerate(seqlens_k))
    reasons += [
        f"request {r.index} has {r.seqlen_q} query rows and {r.seqlen_k} keys"
        for r in requests
        if not 0 <= r.seqlen_q <= r.seqlen_k
    ]
    log2_lambda = []
    if skip_lambda is not None and len(skip_lambda) != len(requests):
        reasons.append(f"{len(skip_lambda)} lambdas for {len(requests)} requests")
    for i, value in enumerate(skip_lambda or ()):
        try:
            log2_lambda.append(_log2(value))
        except ThresholdError as e:
            reasons.append(f"skip_lambda[{i}]: {e}")
    if reasons:
        raise InvalidInputError(reasons)
    return Batch(requests, None if skip_lambda is None else tuple(log2_lambda))


# A handful of thresholds serves many requests, and each of their chunks.
_log2 = functools.lru_cache(maxsize=1024)(lambda_to_log2)


@dataclass(frozen=True)
class Plan:
    """One layer's attention on one implementation; make it with `plan`."""

    impl: Impl
    problem: Problem
    spec: AttentionSpec
    softmax_scale: float
    geometry: Geometry

    def run(
        self,
        q: torch.Tensor,
        kv: PagedKV | RaggedKV,
        cu_seqlens_q: torch.Tensor,
        batch: Batch,
        *,
        skip_lambda: torch.Tensor | None,
        out: torch.Tensor,
        counters: torch.Tensor | None,
    ) -> torch.Tensor:
        """Fills the rows of `out` that belong to the batch's requests, returns lse.

        As `prefill_attention`, but cu_seqlens_q may start behind rows of others in q and out, and
        `batch` says on the host what cu_seqlens_q, kv.seqlens_k and skip_lambda say on the device.
        skip_lambda: float32 [batch], read when the kernel runs.
        """
        call = Call(
            q,
            kv,
            cu_seqlens_q,
            skip_lambda,
            batch.requests,
            self.spec,
            self.softmax_scale,
            batch.log2_lambda,
            self.problem,
            self.geometry,
        )
        return implementation(self.impl)(call, out, counters)

    def rehearse(self, device: torch.device | str) -> None:
        """Compile the kernel and run it on a page of zeros. Raises what the kernel raises."""
        p = self.problem
        dtype = getattr(torch, p.dtype)
        q = torch.zeros(1, p.num_heads, p.head_dim, dtype=dtype, device=device)
        page = torch.zeros(
            1, p.page_size or 16, p.num_kv_heads, p.head_dim, dtype=dtype, device=device
        )
        ints = torch.tensor([0, 1], dtype=torch.int32).to(device)
        self.run(
            q,
            PagedKV(page, page, ints[:1, None], ints[1:]),
            ints,
            check_batch([0, 1], [1], [0.0]),
            skip_lambda=torch.zeros(1, device=device),
            out=torch.empty_like(q),
            counters=torch.zeros(p.num_kv_heads, 2, dtype=torch.int64, device=device),
        )


def plan(problem: Problem, impl: str, softmax_scale: float) -> Plan:
    """The plan for an implementation that `choose` has chosen for this problem."""
    named = Impl(impl)
    geometry = problem.geometry or own_geometry(problem, named)
    spec = AttentionSpec(softmax_scale, problem.causal, geometry=geometry)
    return Plan(named, problem, spec, softmax_scale, geometry)
