"""The model of time as data: what an instruction class occupies, and when its result is ready.

Cycles of one SM's clock. Throughputs are of NVIDIA's documents, latencies of published
microbenchmarks, rounded; none was measured by us on a B200. docs/verify.md says what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from blasst.kernels.verify.parse import Instruction


@dataclass(frozen=True)
class Cost:
    """pipe: what is occupied, in each of the SM's four parts; busy: for how long by one warp
    instruction; latency: from issue until a dependent instruction may issue.
    """

    pipe: str
    busy: float
    latency: float


@dataclass(frozen=True)
class Model:
    """parts: schedulers of an SM, one instruction a cycle each. fma_per_cycle: of 16-bit products.

    copy_bytes: a cycle, from L2; copy_latency, product_latency: until the first result; wake:
    from a barrier's completion until a waiting warp goes on; tensor_columns: that the warps of a
    part read or write a cycle, tensor_latency: of the last.
    """

    name: str
    fma_per_cycle: int
    copy_bytes: float = 64.0
    copy_latency: float = 700.0
    product_latency: float = 60.0
    wake: float = 20.0
    parts: int = 4
    tensor_columns: float = 1.0
    tensor_latency: float = 30.0


B200 = Model("B200", fma_per_cycle=4096)
MODELS = {"sm_100a": B200}

ALU = Cost("alu", 2.0, 5.0)
FMA = Cost("fma", 1.0, 4.0)
COSTS: tuple[tuple[str, Cost], ...] = (
    # The first prefix that fits counts.
    ("ex2", Cost("mufu", 8.0, 24.0)),
    ("lg2", Cost("mufu", 8.0, 24.0)),
    ("rcp", Cost("mufu", 8.0, 24.0)),
    ("rsqrt", Cost("mufu", 8.0, 24.0)),
    ("div", Cost("mufu", 16.0, 60.0)),
    ("fma.rn.f32x2", Cost("fma", 2.0, 4.0)),
    ("add.rn.f32x2", Cost("fma", 2.0, 4.0)),
    ("add.rm.f32x2", Cost("fma", 2.0, 4.0)),
    ("mul.rn.f32x2", Cost("fma", 2.0, 4.0)),
    ("sub.rn.f32x2", Cost("fma", 2.0, 4.0)),
    ("fma", FMA),
    ("mul.f32", FMA),
    ("add.f32", FMA),
    ("sub.f32", FMA),
    ("mul", Cost("fma", 2.0, 5.0)),
    ("mad", Cost("fma", 2.0, 5.0)),
    ("cvt.rn", Cost("alu", 2.0, 8.0)),
    ("mov.b64", Cost("none", 0.0, 0.0)),  # register pairs: renamed by the assembler
    ("mov.b32", Cost("none", 0.0, 0.0)),
    ("ld.param", Cost("none", 0.0, 0.0)),
    ("bra", Cost("issue", 1.0, 8.0)),
    ("ld.shared", Cost("memory", 4.0, 29.0)),
    ("st.shared", Cost("memory", 4.0, 4.0)),
    ("stmatrix", Cost("memory", 8.0, 8.0)),
    ("ldmatrix", Cost("memory", 8.0, 33.0)),
    ("ld.global", Cost("memory", 4.0, 500.0)),
    ("st.global", Cost("memory", 4.0, 4.0)),
    ("atom", Cost("memory", 4.0, 500.0)),
    ("red.", Cost("memory", 4.0, 4.0)),
    ("shfl", Cost("memory", 2.0, 24.0)),
    ("vote", Cost("alu", 2.0, 12.0)),
    ("redux", Cost("alu", 4.0, 24.0)),
    ("elect", Cost("alu", 2.0, 8.0)),
    ("bar", Cost("memory", 2.0, 16.0)),
    ("mbarrier.try_wait", Cost("memory", 2.0, 20.0)),
    ("mbarrier", Cost("memory", 2.0, 8.0)),
    ("fence", Cost("memory", 2.0, 16.0)),
    ("tcgen05.mma", Cost("issue", 4.0, 4.0)),
    ("tcgen05.commit", Cost("issue", 4.0, 4.0)),
    ("cp", Cost("memory", 4.0, 8.0)),
    ("setmaxnreg", Cost("issue", 1.0, 24.0)),
)


def cost(ins: Instruction) -> Cost:
    """Integer and logic instructions are what is left."""
    for prefix, found in COSTS:
        if ins.opcode.startswith(prefix):
            return found
    return ALU
