"""What a warp is doing, for people: the step that a run of instructions belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blasst.kernels.verify.parse import Instruction

WAIT = "wait"
OTHER = ""  # addresses, loop counters: part of the step before
FEW = 4  # instructions of a kind that make a step of a run

EFFECTS: tuple[tuple[str, str], ...] = (
    ("tcgen05.ld", "read scores"),
    ("tcgen05.st", "store P"),
    ("tcgen05.alloc", "set-up"),
    ("tcgen05.dealloc", "set-up"),
    ("bar.red", "vote"),
    ("barrier.cta.red", "vote"),
    ("vote", "vote"),
    ("cp.async.bulk.tensor", "load"),
    ("cp.async", "load"),
    ("stmatrix", "output"),
    ("st.global", "output"),
    ("mbarrier.init", "set-up"),
)
AFTER_WAIT = {
    "read scores": "wait scores",
    "issue QK": "wait keys",
    "issue PV": "wait P",
    "load": "wait slot",
    "store P": "wait window",
}
"""A wait is named after what comes next."""
OF_CORRECTION = {"read scores": "rescale", "store P": "rescale", "scale": "rescale"}


def of_effect(ins: Instruction) -> str:
    if ins.opcode.startswith("tcgen05.mma"):
        return "issue PV" if ins.operands[1].startswith("[") else "issue QK"
    for prefix, step in EFFECTS:
        if ins.opcode.startswith(prefix):
            return step
    return OTHER


def of_run(instructions: Sequence[Instruction]) -> str:
    """Of straight-line arithmetic: exponentials first, then maxima, conversions, products."""
    kinds = Counter(ins.opcode.split(".")[0] for ins in instructions)
    if kinds["ex2"] >= FEW:
        return "exp2"
    if kinds["max"] >= FEW:
        return "max"
    packed = sum(ins.opcode.startswith("cvt.rn.") for ins in instructions)
    if packed >= FEW:
        return "store P"
    if kinds["mul"] + kinds["fma"] >= 2 * FEW:
        return "scale"
    return OTHER


def named(step: str, role: str) -> str:
    """The step as the warp's role calls it."""
    return OF_CORRECTION.get(step, step) if role == "correction" else step
