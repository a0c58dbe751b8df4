"""Where the elements of a tensor lie in memory, and whether two of them may lie at one place."""

from __future__ import annotations

import torch


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a tensor may share memory: a step does not pass all smaller ones."""
    reach = 1
    for step, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if step < reach:
            return t.numel() > 0
        reach = step * (size - 1) + reach
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements of two tensors may be the same; not for columns of one buffer's rows."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    start, other = a.data_ptr(), b.data_ptr()
    if start >= other + _bytes(b) or other >= start + _bytes(a):
        return False
    row = a.stride(0) * a.element_size()
    if row != b.stride(0) * b.element_size() or row == 0:
        return True
    between = (other - start) % row
    return between < _bytes(a[0]) or between + _bytes(b[0]) > row


def _bytes(t: torch.Tensor) -> int:
    """From the first element to behind the last."""
    elements = sum(s * (n - 1) for s, n in zip(t.stride(), t.shape, strict=True)) + 1
    return elements * t.element_size()
