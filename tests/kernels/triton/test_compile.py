"""The Triton kernel compiles for every target without a GPU, and fits its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the Triton kernel needs triton")

# bytes of a block, by compute capability
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from blasst.kernels.triton.device import prefill_kernel as kernel

types = {
    **dict.fromkeys(("Q", "K", "V", "Out"), "*bf16"),
    **dict.fromkeys(("Lse", "SkipLambda"), "*fp32"),
    **dict.fromkeys(("CuSeqlensQ", "KeyLengths", "PageTable"), "*i32"),
    "Counters": "*i64",
    "scale_log2": "fp32",
    "strides": (
        ("i32", "i32", "constexpr"),
        ("i32", "i32", "i32", "constexpr"),
        ("i32", "i32", "i32", "constexpr"),
        ("i32", "i32", "constexpr"),
        "i32",
        "i32",
    ),
}
values = dict(
    CAUSAL=True, VOTE=True, COUNT=True, PAGE=16, GROUP=4, HEAD_DIM=128, TILE_M=128, TILE_N=128
)
types |= dict.fromkeys(values, "constexpr")
constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
# The innermost strides are 1.
at = kernel.arg_names.index("strides")
constants |= {(at, 0, 2): 1, (at, 1, 3): 1, (at, 2, 3): 1, (at, 3, 2): 1}
source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants)
target = GPUTarget("cuda", int(sys.argv[1]), 32)
built = triton.compile(source, target=target, options={"num_warps": 8, "num_stages": 2})
print(len(built.asm["cubin"]), built.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles_and_fits(capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", COMPILE, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    size, shared = map(int, done.stdout.split()[-2:])
    assert size > 0
    assert shared <= SHARED_MEMORY[capability]
