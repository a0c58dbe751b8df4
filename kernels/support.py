"""The single statement of what each implementation can run; everyone who needs to know calls it."""

from __future__ import annotations

from collections.abc import Callable

from blasst.kernels.types import Impl, Problem

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (64, 128)
MIN_TILE = 16
MAX_TRITON_TILE = 128


def unsupported_reasons(problem: Problem, impl: Impl) -> list[str]:
    """Every reason why `impl` cannot run `problem`; empty: it can."""
    reasons = _common(problem)
    reasons += _RULES[impl](problem)
    return reasons


def _common(problem: Problem) -> list[str]:
    reasons = []
    if problem.dtype not in FLOAT_DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(FLOAT_DTYPES)}")
    if problem.num_kv_heads < 1 or problem.num_heads % max(1, problem.num_kv_heads):
        reasons.append(
            f"num_heads {problem.num_heads} is not a multiple of num_kv_heads "
            f"{problem.num_kv_heads}"
        )
    return reasons


def _head_dim(problem: Problem) -> list[str]:
    if problem.head_dim in HEAD_DIMS:
        return []
    return [f"head_dim {problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"]


def _cpu(problem: Problem) -> list[str]:
    reasons = _head_dim(problem)
    if problem.device_type != "cpu":
        reasons.append(f"tensors are on {problem.device_type}, this implementation needs the CPU")
    smallest = min(problem.geometry.tile_m, problem.geometry.tile_n)
    if smallest < MIN_TILE:
        reasons.append(f"a tile side of {smallest} is below {MIN_TILE}")
    return reasons


def _gpu(
    capabilities: str,
    test: Callable[[tuple[int, int]], bool],
    limits: Callable[[Problem], list[str]],
) -> _Rule:
    def rule(problem: Problem) -> list[str]:
        reasons = _head_dim(problem)
        if problem.capability is None:
            reasons.append(
                f"tensors are on {problem.device_type}, it needs a GPU with {capabilities}"
            )
        elif not test(problem.capability):
            major, minor = problem.capability
            reasons.append(
                f"the GPU has compute capability {major}.{minor}, it needs {capabilities}"
            )
        if problem.dtype == "float32":
            reasons.append("dtype float32 has no tensor-core path, give bfloat16 or float16")
        return reasons + limits(problem)

    return rule


def _not_built(problem: Problem) -> list[str]:
    return ["this kernel is not built in this release"]


def _triton(problem: Problem) -> list[str]:
    reasons = []
    if problem.block_mask:
        reasons.append("block masks are not built into this kernel")
    for name in ("tile_m", "tile_n"):
        side = getattr(problem.geometry, name)
        if not MIN_TILE <= side <= MAX_TRITON_TILE:
            reasons.append(f"{name} {side} is not in {MIN_TILE}..{MAX_TRITON_TILE}")
    return reasons


_Rule = Callable[[Problem], list[str]]

_RULES: dict[Impl, _Rule] = {
    Impl.BLACKWELL: _gpu("compute capability 10.0 or 10.3", lambda c: c[0] == 10, _not_built),
    Impl.HOPPER: _gpu("compute capability 9.0", lambda c: c == (9, 0), _not_built),
    Impl.TRITON: _gpu("compute capability 8.0 or later", lambda c: c >= (8, 0), _triton),
    Impl.CPU: _cpu,
    Impl.REFERENCE: lambda problem: [],
}
