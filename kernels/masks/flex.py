"""FlexAttention, compiled: Inductor's Triton kernels, or FlashAttention-4 behind the same call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal

import torch

from blasst.kernels.masks.inputs import Inputs, Result
from blasst.kernels.types import Geometry

Backend = Literal["TRITON", "FLASH"]

TRITON_GEOMETRY = Geometry(128, 128)
"""FlexAttention's default block, a multiple of every tile that its Triton templates choose."""


@functools.cache
def orders_dq() -> bool:
    """Whether this torch takes the write order of FA4's deterministic backward (2.13 does)."""
    from torch.nn.attention.flex_attention import BlockMask

    return "dq_write_order" in inspect.signature(BlockMask.__init__).parameters


def exact_options(head_dim: int) -> dict[str, Any]:
    """Of Inductor, for the exact lane: whatever it would choose by timing, or by the sizes that it
    happened to see first, must not reach the bits.

    The backward needs the sum of out * dout over head_dim. As a reduction its order follows from a
    block size that is timed for every compilation; unrolled it is one chain of additions, whatever
    the block. (One block is enough then: each takes seconds to compile.)
    """
    return {
        "unroll_reductions_threshold": head_dim + 1,
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "triton.autotune_pointwise": False,
    }


def exact_kernel_options() -> dict[str, Any]:
    """Of FlexAttention's templates, for the exact lane. By default, lengths that are multiples of
    128, and known when compiling, run code without bounds, in which a product and a difference
    become one rounding."""
    return {"IS_DIVISIBLE": False}


def compiled_attention(
    dynamic: bool | None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """flex_attention, compiled, as a function of its own: torch.compile counts recompilations by
    code object and gives up at 8. options: Inductor's."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(*args, **kwargs)

    own = types.FunctionType(attend.__code__.replace(), attend.__globals__)
    return torch.compile(own, fullgraph=True, dynamic=dynamic, options=options)


@functools.lru_cache(maxsize=256)
def _compiled(
    kind: tuple[object, ...], dynamic: bool | None, exact_head_dim: int | None = None
) -> Callable[..., Any]:
    """One for each kind of call: a process may use any number of masks."""
    options = None if exact_head_dim is None else exact_options(exact_head_dim)
    return compiled_attention(dynamic, options)


def _function(x: Inputs, backend: Backend, exact: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x.q, x.k, x.v))
    model = x.q.shape[2:], x.k.shape[2:], x.softmax_scale
    kind = x.mask.program, backend, x.want_lse, wants_grad, x.q.dtype, model
    if exact:  # symbolic from the first call on: one program
        return _compiled(kind, True, x.q.shape[-1])
    if backend == "TRITON":
        return _compiled(kind, None)
    # FLASH refuses a mask that reads tensors of symbolic size: one compilation for each shape.
    return _compiled((*kind, x.q.shape, x.k.shape), False)


def _kernel_options(x: Inputs, backend: Backend, exact: bool) -> dict[str, Any] | None:
    if not x.q.is_cuda:
        return None
    return {"BACKEND": backend, **(exact_kernel_options() if exact else {})}


def run(
    x: Inputs,
    *,
    backend: Backend,
    geometry: Geometry,
    write_order: bool = False,
    exact: bool = False,
) -> Result:
    """On a CPU, Inductor's C++ kernel runs, whatever the backend: forward only, without lse.

    exact: with backend "TRITON" and outside torch.compile, the bits of a row follow from what it
    sees and from its place in a block, not from the length or from what was compiled before.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    result = _function(x, backend, exact)(
        x.q.transpose(1, 2),
        x.k.transpose(1, 2),
        x.v.transpose(1, 2),
        block_mask=x.mask.flex(geometry, write_order=write_order),
        scale=x.softmax_scale,
        enable_gqa=x.q.shape[2] != x.k.shape[2],
        kernel_options=_kernel_options(x, backend, exact),
        return_aux=AuxRequest(lse=True) if x.want_lse else None,
    )
    out, lse = (result[0], result[1].lse) if x.want_lse else (result, None)
    return out.transpose(1, 2), lse
