"""Row windows: TMA copies of 1 to R rows that start at any row, the rest zero or unwritten.

Two modes of the window step through rows: x in [0, R), which TMA checks, and y. Row r is at
x = R - valid + r, y = first_row + valid, on a base moved back by R rows; x >= R is out of bounds.
A window needs at least one valid row: one without faults when the moved base is not mapped.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from blasst.kernels.cute.smem import ATOM_COLUMNS, ATOM_ROWS, SWIZZLE, tile_layout


def select(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The same memory with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def packed(rows: cute.Tensor, pack: int) -> cute.Tensor:
    """(position, column, head) -> ((head of a bundle, position), column, bundle), the same memory:
    the rows of a position stand together. pack: heads of a bundle; 1: the tensor as it is."""
    if pack == 1:
        return rows
    (positions, columns, heads), (step, column, head) = rows.shape, rows.stride
    layout = cute.make_layout(
        ((pack, positions), columns, heads // pack), stride=((head, step), column, head * pack)
    )
    return cute.make_tensor(rows.iterator, layout)


def window_view(rows: cute.Tensor, window: int) -> cute.Tensor:
    """(row, column, ...) -> (window, column, ..., row + window); of packed rows, (heads, positions)
    stand for rows, and the last mode steps through positions."""
    step, total = rows.stride[0], rows.shape[0]
    first: tuple[int, ...] | int = window
    ahead: tuple[int, ...] | int = -window
    if isinstance(total, tuple):
        (heads, total), (_, step) = rows.shape[0], rows.stride[0]
        window //= heads
        first, ahead = (heads, window), (0, -window)
    base = cute.domain_offset((ahead, *(0,) * (cute.rank(rows) - 1)), rows).iterator
    shape = (first, *rows.shape[1:], total + window + 1)
    return cute.make_tensor(base, cute.make_layout(shape, stride=(*rows.stride, step)))


def make_window_atom(
    op, rows: cute.Tensor, window: int, rows_of_tile: int, whole_rows: bool = False
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA atom and coordinate tensor for windows of `rows`, as wide as its columns."""
    columns = rows.shape[1]
    tile = tile_layout(window, columns, 1, rows_of_tile, whole_rows)
    layout = cute.select(tile, mode=[0, 1])
    atom, coordinates = cpasync.make_tiled_tma_atom(
        op, window_view(rows, window), layout, (window, columns)
    )
    return atom, coordinates


@cute.jit
def window(
    coordinates: cute.Tensor, first_row: Int32, valid: Int32, index: cutlass.Constexpr = ()
) -> cute.Tensor:
    """(R, columns): rows [first_row, first_row + valid) at the given index of the other modes. Of
    packed rows, both are positions."""
    at = coordinates[(None, None, *index, first_row + valid)]
    if cutlass.const_expr(cute.rank(at, mode=[0]) > 1):
        return cute.domain_offset(((0, cute.size(at, mode=[0, 1]) - valid), 0), at)
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


def box_layout(window: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of `window` whole rows in shared memory, as make_box_atom sees them:
    (columns of an atom, its rows, atoms beside each other, atoms below each other)."""
    beside, below = columns // ATOM_COLUMNS, window // ATOM_ROWS
    atom = ATOM_ROWS * ATOM_COLUMNS
    return (ATOM_COLUMNS, ATOM_ROWS, beside, below), (1, ATOM_COLUMNS, atom, beside * atom)


def make_box_atom(
    op, rows: cute.Tensor, window: int
) -> tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]:
    """One TMA copy for `window` rows of a page, all of them valid, of any head.

    rows: (row, column, head, page). Returns the atom, its coordinates (element, row of 8, atom
    beside, atom below, page) and the elements from one head to the next.
    """
    row, _, head, page = rows.stride
    shape, stride = box_layout(window, rows.shape[1])
    reach = Int32((rows.shape[2] - 1) * head) + ATOM_COLUMNS
    view = cute.make_tensor(
        rows.iterator,
        cute.make_layout(
            (reach, ATOM_ROWS, shape[2], rows.shape[0] // ATOM_ROWS, rows.shape[3]),
            stride=(1, row, ATOM_COLUMNS, ATOM_ROWS * row, page),
        ),
    )
    layout = cute.make_composed_layout(
        cute.make_swizzle(*SWIZZLE), 0, cute.make_layout(shape, stride=stride)
    )
    return *cpasync.make_tiled_tma_atom(op, view, layout, shape), Int32(head)


@cute.jit
def box(
    coordinates: cute.Tensor,
    head_offset: Int32,
    row: Int32,
    page: Int32,
    shape: cutlass.Constexpr[tuple[int, ...]],
) -> cute.Tensor:
    """Rows from `row`, a multiple of 8, of a page: what make_box_atom's copy takes."""
    at = cute.domain_offset(
        (head_offset, 0, 0, row // ATOM_ROWS), coordinates[(None, None, None, None, page)]
    )
    return cute.local_tile(at, shape, (0, 0, 0, 0))
