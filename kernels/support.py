"""The single statement of what each implementation can run; everyone who needs to know calls it."""

from __future__ import annotations

from collections.abc import Callable

from blasst.kernels.types import Impl, Problem

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (64, 128)


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
    return reasons


def _gpu(name: str, capabilities: str, test: Callable[[tuple[int, int]], bool]) -> _Rule:
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
        reasons.append(f"the {name} kernel is not built in this release")
        return reasons

    return rule


_Rule = Callable[[Problem], list[str]]

_RULES: dict[Impl, _Rule] = {
    Impl.BLACKWELL: _gpu("blackwell", "compute capability 10.0 or 10.3", lambda c: c[0] == 10),
    Impl.HOPPER: _gpu("hopper", "compute capability 9.0", lambda c: c == (9, 0)),
    Impl.TRITON: _gpu("triton", "compute capability 8.0 or later", lambda c: c >= (8, 0)),
    Impl.CPU: _cpu,
    Impl.REFERENCE: lambda problem: [],
}
