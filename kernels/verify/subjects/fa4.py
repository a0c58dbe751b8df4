"""FlashAttention-4's SM100 forward kernel, as it is installed: a test of the interpreter."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch

from blasst.kernels.verify.build import Recipe
from blasst.kernels.verify.subject import Case, Subject
from blasst.kernels.verify.subjects.attention import difference

BUILDER = "blasst.kernels.verify.subjects.fa4:build"
NEEDS = "flash-attn-4 4.0.0b36"
SINGLE = ("mma", "epilogue", "load", "empty")
BETWEEN = 8  # optional arguments between scale and block-sparse tensors that stay None


def missing() -> str | None:
    """Why the subject cannot be built here; None: it can."""
    for name in ("cutlass", "flash_attn", "quack"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; pip install {NEEDS.replace(' ', '==')}"
    return None


def role(warp: int) -> str:
    if warp < 8:
        return f"softmax {warp // 4}"
    return "correction" if warp < 12 else SINGLE[warp - 12]


def subject(
    *, causal: bool = False, head_dim: int = 128, processors: int = 1, lines: bool = False
) -> Subject:
    """processors: how many blocks a persistent launch starts at most."""
    recipe = Recipe.of(
        "sm_100a", BUILDER, lines, causal=causal, head_dim=head_dim, processors=processors
    )
    return Subject("fa4", recipe, role, scoreboard=True)


def build(options: dict[str, Any]) -> Any:
    """In the compiling process: one block a cluster, log-sum-exp written."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
    from flash_attn.cute.utils import AuxData

    d, causal = options["head_dim"], options["causal"]
    kernel = FlashAttentionForwardSm100(
        d, d, is_causal=causal, is_static_persistent=not causal, m_block_size=128
    )
    batch, queries, keys, heads, kv_heads = (cute.sym_int() for _ in range(5))

    def tensor(dtype: Any, shape: tuple[Any, ...], divisibility: int) -> Any:
        stride = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(
            dtype, shape, stride=stride, assumed_align=divisibility * dtype.width // 8
        )

    q = tensor(cutlass.BFloat16, (batch, queries, heads, d), 8)
    k = tensor(cutlass.BFloat16, (batch, keys, kv_heads, d), 8)
    v = tensor(cutlass.BFloat16, (batch, keys, kv_heads, d), 8)
    out = tensor(cutlass.BFloat16, (batch, queries, heads, d), 8)
    lse = tensor(cutlass.Float32, (batch, heads, queries), 1)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = [kernel, q, k, v, out, lse, d**-0.5, *[None] * BETWEEN, None, None]
    arguments += [AuxData(None, None), *[None] * 7, 4096, stream]
    return cute.compile(*arguments, options="--enable-tvm-ffi")


def case(
    *, queries: int, keys: int, heads: int = 1, causal: bool = False, head_dim: int = 128,
    seed: int = 0,
) -> Case:  # fmt: skip
    """One request, bfloat16, standard normal inputs."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, heads, head_dim, generator=generator).bfloat16()
        for n in (queries, keys, keys)
    )
    out, lse = torch.full_like(q, torch.nan), torch.full((1, heads, queries), torch.nan)
    arguments = [q, k, v, out, lse, head_dim**-0.5, *[None] * BETWEEN, None, None]
    arguments += [[None, None], *[None] * 7, queries]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(head_dim)
    if causal:
        reach = torch.arange(queries)[:, None] + keys - queries
        scores = scores.masked_fill(torch.arange(keys) > reach, -torch.inf)
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())

    def check() -> list[str]:
        eps = torch.finfo(torch.bfloat16).eps
        return [
            *difference("out", out, want, 2 * eps, 2 * eps),
            *difference("lse", lse, scores.logsumexp(-1), 1e-3, 1e-3),
        ]

    name = f"{queries}x{keys}, {heads} heads{', causal' if causal else ''}"
    return Case(name, arguments, {"q": q, "k": k, "v": v}, {"out": out, "lse": lse}, check)
