"""Registers of a wgmma accumulator of one warpgroup: 64 rows, two of them in each thread.

Thread t holds rows t // 32 * 16 + t % 32 // 4 + {0, 8} and, of every 8 columns, t % 4 * 2 + {0, 1}.
The same registers in the same order, converted to 16 bits, are the A operand of the next wgmma.
"""

import cutlass.cute as cute
from cutlass import Int32

ROWS_PER_THREAD = 2
STEP = 8


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """(2 rows, columns of the thread) of an accumulator."""
    groups = cute.size(acc) // 4
    layout = cute.make_layout((ROWS_PER_THREAD, (2, groups)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator, layout)


def step_of(fragment: cute.Tensor, step: int) -> cute.Tensor:
    """The 8 values of a thread, in order, that belong to a step of 16 columns."""
    return cute.make_tensor(fragment.iterator + STEP * step, cute.make_layout(STEP))


def first_row(thread: Int32) -> Int32:
    return thread // 32 * 16 + thread % 32 // 4


def first_column(thread: Int32) -> Int32:
    return thread % 4 * 2


def column(index: int) -> int:
    """Column, relative to first_column, of the index-th column of a thread."""
    return index // 2 * 8 + index % 2
