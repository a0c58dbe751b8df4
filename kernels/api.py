"""The one entry point of blasst.kernels: `prefill_attention`."""

from __future__ import annotations

import torch

from blasst.kernels.call import check_call
from blasst.kernels.dispatch import AUTO, choose, implementation
from blasst.kernels.errors import InvalidInputError
from blasst.kernels.support import own_geometry
from blasst.kernels.types import AttentionSpec, PagedKV, RaggedKV

_DEFAULT_SPEC = AttentionSpec()


def prefill_attention(
    q: torch.Tensor,
    kv: PagedKV | RaggedKV,
    cu_seqlens_q: torch.Tensor,
    *,
    spec: AttentionSpec = _DEFAULT_SPEC,
    skip_lambda: torch.Tensor | None = None,
    impl: str = AUTO,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a ragged batch of query rows over paged or contiguous keys: (out, lse).

    q: [total_q, num_heads, head_dim]; cu_seqlens_q: int32 [batch + 1]. Causal: row i of a request
    sees keys <= seqlen_k - seqlen_q + i. Rows that see nothing give out 0 and lse -inf.
    skip_lambda: None = dense, no vote; else float32/float64 [batch], natural base,
    0 <= lambda < 1, 0 skips nothing. counters: int64 [num_kv_heads, 2]: (visited, skipped) blocks
    are added in place, unless skip_lambda is None. out: like q, in memory of its own, or None to
    allocate it. Numbers (lengths, pages, lambdas, counters) follow one another in memory.
    lse: float32 [num_heads, total_q], natural log.

    Waits for the device to check the values in its tensors; `plan.Plan` does not. Raises
    InvalidInputError (ValueError) or UnsupportedError with every reason, before any work.
    """
    call = check_call(q, kv, cu_seqlens_q, spec, skip_lambda, out, counters)
    if not isinstance(impl, str):
        raise InvalidInputError([f"impl is {type(impl).__name__}, it must be a name"])
    choice = choose(call.problem, impl)
    call = call.voting(own_geometry(call.problem, choice.impl))
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format, requires_grad=False)
    with torch.no_grad():
        lse = implementation(choice.impl)(call, out, counters)
    return out, lse
