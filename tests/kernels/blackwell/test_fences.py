"""tcgen05.fence, which the interpreter does not need: that the PTX has one wherever it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blasst.kernels.blackwell.config import Config
from blasst.kernels.verify.build import build
from blasst.kernels.verify.parse import Instruction
from blasst.kernels.verify.subjects import blackwell

VOTING = Config("bfloat16", 128, True, 0, True, True)
BUILDS = {
    "vote": VOTING,
    "own P": replace(VOTING, cross_p=False),
    "dense": replace(VOTING, vote=False, count=False),
    "masks": replace(VOTING, block_mask=True),
    "staying": replace(VOTING, grid=2),
}
TOUCHES = ("tcgen05.ld", "tcgen05.st", "tcgen05.mma")
OF_LOADS = "ring.py"  # waits for copies into shared memory, which no tcgen05 wrote


def missing(instructions: Sequence[Instruction]) -> list[str]:
    """In the order of the text: uses of tensor memory after a wait without a fence, and arrivals
    after a use without one."""
    found = []
    waited: Instruction | None = None
    used: Instruction | None = None
    for ins in instructions:
        if ins.opcode.startswith("mbarrier.try_wait"):
            waited = waited if (ins.source or "").startswith(OF_LOADS) else ins
        elif ins.opcode == "tcgen05.fence::after_thread_sync":
            waited = None
        elif ins.opcode == "tcgen05.fence::before_thread_sync":
            used = None
        elif ins.opcode.startswith(TOUCHES):
            if waited is not None:
                found.append(f"{ins.opcode} at {ins.where} after the wait at {waited.where}")
            if not ins.opcode.startswith("tcgen05.mma"):  # a commit is its own fence
                used = ins
        elif ins.opcode.startswith(("mbarrier.arrive.shared", "bar.arrive")) and used is not None:
            found.append(f"{ins.opcode} at {ins.where} after {used.opcode} at {used.where}")
    return found


def instructions(config: Config) -> list[Instruction]:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return build(blackwell.subject(config).recipe).module.instructions


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_every_wait_and_arrival_has_its_fence(name: str) -> None:
    assert missing(instructions(BUILDS[name])) == []


def test_a_fence_that_is_left_out_shows() -> None:
    """The check itself. Other fences stand where shared memory alone is handed over."""
    whole = instructions(VOTING)
    for kind, least in (("before", 9), ("after", 15)):
        fences = [ins for ins in whole if ins.opcode.startswith(f"tcgen05.fence::{kind}")]
        noticed = [fence for fence in fences if missing([i for i in whole if i is not fence])]
        assert least <= len(noticed) < len(fences)
