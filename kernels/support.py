"""The single statement of what each implementation can run; everyone who needs to know calls it.

What a GPU kernel can be built for is said by the kernel's own `launch`; here is what is left.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from blasst.kernels.types import Geometry, Impl, Problem

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (64, 128)

MAX_GRID = 65535
"""Thread blocks along the second and third dimension of a grid: CUDA's limit."""

_INSTALL = "install blasst[cuda]"


def unsupported_reasons(problem: Problem, impl: Impl) -> list[str]:
    """Every reason why `impl` cannot run `problem`; empty: it can."""
    reasons = _common(problem)
    reasons += _RULES[impl](problem)
    return reasons


def own_geometry(problem: Problem, impl: Impl) -> Geometry:
    """What `impl` votes on when the caller does not say."""
    if impl is Impl.HOPPER:
        from blasst.kernels.hopper.launch import geometry_of

        return geometry_of(problem)
    if impl is Impl.BLACKWELL:
        from blasst.kernels.blackwell.launch import geometry_of as blackwell_geometry

        return blackwell_geometry(problem)
    if impl is Impl.TRITON:
        from blasst.kernels.triton.launch import geometry_of as triton_geometry

        return triton_geometry(problem)
    return Geometry()


def packing_reasons(problem: Problem) -> list[str]:
    """Why heads of the problem cannot vote together as its geometry says; empty: they can."""
    heads = 1 if problem.geometry is None else problem.geometry.heads
    if heads == 1:
        return []
    reasons = []
    group = problem.num_heads // max(1, problem.num_kv_heads)
    if group % heads:
        reasons.append(f"{heads} heads together do not divide a group of {group} q heads")
    if problem.block_mask:
        reasons.append(f"the lists of a block mask are of one head, not of {heads} together")
    return reasons


def grid_reasons(tiles: int, slots: int) -> list[str]:
    """Why CUDA cannot start so many thread blocks; empty: it can. tiles: of the longest request;
    slots: requests * kv heads."""
    if max(tiles, slots) <= MAX_GRID:
        return []  # of every layer of every step: nothing else is made
    named = {"tiles of the longest request": tiles, "requests times kv heads": slots}
    return [
        f"{count} {name} are more than the {MAX_GRID} that one launch takes; split the batch"
        for name, count in named.items()
        if count > MAX_GRID
    ]


def _common(problem: Problem) -> list[str]:
    reasons = packing_reasons(problem)
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


def _each_head(problem: Problem) -> list[str]:
    heads = 1 if problem.geometry is None else problem.geometry.heads
    return [f"it votes for each head, not for {heads} together"] if heads > 1 else []


def _cpu_torch(problem: Problem) -> list[str]:
    reasons = _head_dim(problem)
    reasons += _each_head(problem)
    if problem.device_type != "cpu":
        reasons.append(f"tensors are on {problem.device_type}, this implementation needs the CPU")
    return reasons


def _cpu(problem: Problem) -> list[str]:
    reasons = _cpu_torch(problem)
    if reasons:
        return reasons
    from blasst.kernels.native import build

    return list(build.reasons())


def _device(
    problem: Problem, capabilities: str, test: Callable[[tuple[int, int]], bool]
) -> list[str]:
    if problem.capability is None:
        return [f"tensors are on {problem.device_type}, it needs a GPU with {capabilities}"]
    if not test(problem.capability):
        major, minor = problem.capability
        return [f"the GPU has compute capability {major}.{minor}, it needs {capabilities}"]
    return []


def _package(module: str, distribution: str) -> list[str]:
    if importlib.util.find_spec(module) is not None:
        return []
    return [f"the package {distribution} is not installed; {_INSTALL}"]


def _blackwell(problem: Problem) -> list[str]:
    reasons = _device(problem, "compute capability 10.0 or 10.3", lambda c: c[0] == 10)
    if reasons:
        return reasons
    reasons += [*_each_head(problem), *_package("cutlass", "nvidia-cutlass-dsl")]
    from blasst.kernels.blackwell.launch import problem_reasons

    return reasons + problem_reasons(problem)


def _hopper(problem: Problem) -> list[str]:
    reasons = _device(problem, "compute capability 9.0", lambda c: c == (9, 0))
    if reasons:
        return reasons
    reasons += _package("cutlass", "nvidia-cutlass-dsl")
    from blasst.kernels.hopper.launch import problem_reasons

    return reasons + problem_reasons(problem)


def _triton(problem: Problem) -> list[str]:
    reasons = _device(problem, "compute capability 8.0 or later", lambda c: c >= (8, 0))
    if reasons:
        return reasons
    reasons += [*_each_head(problem), *_package("triton", "triton")]
    from blasst.kernels.triton.launch import problem_reasons

    return reasons + problem_reasons(problem)


_RULES: dict[Impl, Callable[[Problem], list[str]]] = {
    Impl.BLACKWELL: _blackwell,
    Impl.HOPPER: _hopper,
    Impl.TRITON: _triton,
    Impl.CPU: _cpu,
    Impl.CPU_TORCH: _cpu_torch,
    Impl.REFERENCE: lambda problem: [],
}
