"""Layout of a tile in shared memory: 128-byte swizzle, 8-row atoms of 64 columns of 16 bits."""

import cutlass.cute as cute

ATOM_ROWS = 8
ATOM_COLUMNS = 64
SWIZZLE = (3, 4, 3)


def tile_layout(
    rows: int,
    columns: int,
    stages: int = 1,
    rows_of_tile: int | None = None,
    whole_rows: bool = False,
) -> cute.ComposedLayout:
    """(rows, columns, stages). rows_of_tile: rows of the tile that these rows are a part of.

    whole_rows: atoms of the same rows lie together, else atoms of the same columns.
    """
    whole = rows_of_tile or rows
    shape = (
        (ATOM_ROWS, rows // ATOM_ROWS),
        (ATOM_COLUMNS, columns // ATOM_COLUMNS),
        stages,
    )
    atom = ATOM_ROWS * ATOM_COLUMNS
    between_rows, between_columns = atom, whole * ATOM_COLUMNS
    if whole_rows:
        between_rows, between_columns = ATOM_ROWS * columns, atom
    stride = ((ATOM_COLUMNS, between_rows), (1, between_columns), whole * columns)
    return cute.make_composed_layout(
        cute.make_swizzle(*SWIZZLE), 0, cute.make_layout(shape, stride=stride)
    )


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """(rows, columns, stages) -> (columns, rows, stages), the same memory."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0, 2]))
