"""Row windows: TMA copies of 1 to R rows that start at any row, the rest zero or unwritten.

Two modes of the window step through rows: x in [0, R), which TMA checks, and y. Row r is at
x = R - valid + r, y = first_row + valid, on a base moved back by R rows; x >= R is out of bounds.
A window needs at least one valid row: one without faults when the moved base is not mapped.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from blasst.kernels.cute.smem import tile_layout


def select(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The same memory with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def window_view(rows: cute.Tensor, window: int) -> cute.Tensor:
    """(row, column, ...) -> (window, column, ..., row + window)."""
    base = cute.domain_offset((-window, *(0,) * (cute.rank(rows) - 1)), rows).iterator
    shape = (window, *rows.shape[1:], rows.shape[0] + window + 1)
    return cute.make_tensor(base, cute.make_layout(shape, stride=(*rows.stride, rows.stride[0])))


def make_window_atom(
    op, rows: cute.Tensor, window: int, rows_of_tile: int
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA atom and coordinate tensor for windows of `rows`, as wide as its columns."""
    columns = rows.shape[1]
    layout = cute.select(tile_layout(window, columns, 1, rows_of_tile), mode=[0, 1])
    atom, coordinates = cpasync.make_tiled_tma_atom(
        op, window_view(rows, window), layout, (window, columns)
    )
    return atom, coordinates


@cute.jit
def window(
    coordinates: cute.Tensor, first_row: Int32, valid: Int32, index: cutlass.Constexpr = ()
) -> cute.Tensor:
    """(R, columns): rows [first_row, first_row + valid) at the given index of the other modes."""
    at = coordinates[(None, None, *index, first_row + valid)]
    return cute.domain_offset((cute.size(at, mode=[0]) - valid, 0), at)


@cute.jit
def copy_window(atom: cute.CopyAtom, gmem: cute.Tensor, smem: cute.Tensor, barrier) -> None:
    """Load if `barrier` is given, else store. Called by a whole warp; one thread issues it."""
    smem, gmem = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, cute.rank(smem)),
        cute.group_modes(gmem, 0, cute.rank(gmem)),
    )
    if cutlass.const_expr(barrier is not None):
        cute.copy(atom, gmem, smem, tma_bar_ptr=barrier)
    else:
        cute.copy(atom, smem, gmem)
