"""Counters of visited and skipped blocks."""

import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def count_blocks(at: cute.Pointer, visited: Int32, skipped: Int32, thread: Int32) -> None:
    """Adds a warpgroup's numbers to the pair of its kv head."""
    if thread == 0:
        cute.arch.atomic_add(at, Int64(visited))
        cute.arch.atomic_add(at + 1, Int64(skipped))
