"""Producer warps: the queries of a thread block, and their share of its keys or values."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from blasst.kernels.cute.ring import Ring
from blasst.kernels.cute.smem import ATOM_ROWS
from blasst.kernels.cute.tile import Tile, position_of
from blasst.kernels.cute.trace import NO_TRACE, Step, Trace
from blasst.kernels.cute.windows import box, box_layout, copy_window, window


class Source(NamedTuple):
    """Row windows of a tensor in global memory. box: what make_box_atom returns, or None."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor
    box: Any = None


@cute.jit
def load_queries(
    source: Source,
    smem: cute.Tensor,
    barriers: cute.Pointer,
    tile: Tile,
    head: Int32,
    group_bytes: cutlass.Constexpr[int],
    pack: cutlass.Constexpr[int] = 1,
) -> None:
    """smem: (rows, head_dim, groups); each group of rows has its own barrier. pack: rows of a
    position, which come together.

    Rows beyond the end are 0, but a window without any row faults: it gets the tile's last row.
    """
    group_rows = cute.size(smem, mode=[0])
    for group in cutlass.range_constexpr(cute.size(smem, mode=[2])):
        row = tile.row + cutlass.min(group * group_rows, tile.rows - pack)
        valid = cutlass.max(pack, cutlass.min(tile.rows - group * group_rows, group_rows))
        row, valid = position_of(row, pack), position_of(valid, pack)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + group, group_bytes)
        copy_window(
            source.atom,
            window(source.coordinates, tile.q_start + row, valid, (head,)),
            smem[None, None, group],
            barriers + group,
        )


@cute.jit
def load_blocks(
    config: cutlass.Constexpr[Any],
    source: Source,
    smem: cute.Tensor,
    ring: Ring,
    tile: Tile,
    place: tuple[int, Int32, cute.Tensor | None],
    trace: Trace = NO_TRACE,
    visits: Any = None,
) -> None:
    """Its share of all blocks of keys or values that the tile visits.

    visits: which they are, `visits.Visits`; None: all of them, from right to left.
    place: which of the config.loaders this warp is, kv head, the request's row of the page table.
    Keys beyond the end are 0, but a window without any key gets the request's last one.
    """
    if cutlass.const_expr(source.box is not None and not config.block_mask):
        load_small_pages(config, source, smem, ring, tile, place, trace)
    else:
        load_each(config, source, smem, ring, tile, place, trace, visits)


@cute.jit
def load_small_pages(
    config: cutlass.Constexpr[Any],
    source: Source,
    smem: cute.Tensor,
    ring: Ring,
    tile: Tile,
    place: tuple[int, Int32, cute.Tensor],
    trace: Trace,
) -> None:
    """All blocks from right to left, in pages that come in one copy each. The lanes read and check
    the page numbers of several blocks at once: a read for each block takes 1.6% longer."""
    loader, kv_head, pages = place
    parts = range(loader, config.windows, config.loaders)
    together = cute.arch.WARP_SIZE // config.windows
    held, ahead = Int32(0), read_many_pages(config, pages, tile, tile.n_blocks - 1)
    for visit in cutlass.range(tile.n_blocks, unroll=1):
        n = tile.n_blocks - 1 - visit
        slot = visit & (together - 1)
        if slot == 0:
            held = ahead
            fault_unless_below(held, cute.size(source.coordinates, mode=[3]))
            ahead = read_many_pages(config, pages, tile, n - together)
        # All that needs no empty stage is done before it is awaited.
        boxes = [(part, page_of(held, slot * config.windows + part)) for part in parts]
        barrier = ring.acquire(visit)
        trace.mark(Step.WAIT_EMPTY, visit)
        stage = smem[None, None, ring.stage(visit)]
        left = tile.seqlen_k - n * config.tile_n
        copy_pages(config, source, boxes, (kv_head, left), stage, barrier)
        trace.mark(Step.LOAD, visit)


@cute.jit
def load_each(
    config: cutlass.Constexpr[Any],
    source: Source,
    smem: cute.Tensor,
    ring: Ring,
    tile: Tile,
    place: tuple[int, Int32, cute.Tensor | None],
    trace: Trace,
    visits: Any,
) -> None:
    """As load_blocks, with a read of the page table for each block."""
    loader, kv_head, pages = place
    each_alone = config.windows if source.box is None else 0
    page, next_n = Int32(0), tile.n_blocks - 1
    listed: Any = None
    if cutlass.const_expr(config.block_mask):
        # The pages of the next visit are read now, so its block is known since the last one.
        listed = visits.blocks_ahead(2)
        listed.start()
        next_n = listed.entry(0)
    if cutlass.const_expr(pages is not None):
        page = read_pages(config, pages, tile, next_n)
    for visit in cutlass.range(tile.n_blocks, unroll=1):
        n = tile.n_blocks - 1 - visit
        next_n = n - 1
        if cutlass.const_expr(config.block_mask):
            n, next_n = listed.entry(0), listed.entry(1)
        next_page = Int32(0)
        if cutlass.const_expr(pages is not None):
            next_page = read_pages(config, pages, tile, next_n)
        boxes: list[tuple[Any, Int32]] = []
        if cutlass.const_expr(source.box is not None):
            # All that needs no empty stage is done before it is awaited.
            parts = range(loader, config.windows, config.loaders)
            boxes = [(part, page_of(page, part)) for part in parts]
        if cutlass.const_expr(pages is not None and config.stops_at_bad_pages):
            # TMA would bring zeros for a page that is not there, and nobody would know.
            fault_unless_below(page, cute.size(source.coordinates, mode=[3]))
        barrier = ring.acquire(visit)
        trace.mark(Step.WAIT_EMPTY, visit)
        stage = smem[None, None, ring.stage(visit)]
        if cutlass.const_expr(source.box is not None):
            left = tile.seqlen_k - n * config.tile_n
            copy_pages(config, source, boxes, (kv_head, left), stage, barrier)
        for part in cutlass.range_constexpr(loader, each_alone, config.loaders):
            offset = n * config.tile_n + part * config.window
            key = cutlass.min(offset, tile.seqlen_k - 1)
            valid = cutlass.max(1, cutlass.min(tile.seqlen_k - offset, config.window))
            target = cute.local_tile(stage, (config.window, config.head_dim), (part, 0))
            if cutlass.const_expr(pages is None):
                rows = window(source.coordinates, tile.key_start + key, valid, (kv_head,))
                copy_window(source.atom, rows, target, barrier)
            else:
                at = (kv_head, page_of(page, part))
                rows = window(source.coordinates, key % config.page_size, valid, at)
                copy_window(source.atom, rows, target, barrier)
        trace.mark(Step.LOAD, visit)
        page = next_page
        if cutlass.const_expr(config.block_mask):
            listed.advance(visit)


@dsl_user_op
def fault_unless_below(page: Int32, pages: Int32, *, loc=None, ip=None) -> None:
    """An illegal access, which ends the kernel, unless 0 <= page < pages. A predicated store to
    address 0: a trap would be a branch, and a third more instructions."""
    llvm.inline_asm(
        None,
        [Int32(page).ir_value(loc=loc, ip=ip), Int32(pages).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred bad; .reg .b64 nowhere; setp.ge.u32 bad, $0, $1; mov.u64 nowhere, 0; "
        "@bad st.global.u32 [nowhere], $0; }",
        "r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def copy_pages(
    config: cutlass.Constexpr[Any],
    source: Source,
    boxes: list[tuple[Any, Int32]],
    place: tuple[Int32, Int32],
    stage: cute.Tensor,
    barrier: cute.Pointer,
) -> None:
    """Windows that are a page each. boxes: (window of the block, page); place: kv head, keys that
    are left from the block's first one on.

    A block of which all keys are there takes one copy a page, one behind the other without a
    branch. Else windows of 8 rows: each needs a valid row of its own.
    """
    kv_head, left = place
    atom, coordinates, head_stride = source.box
    shape, stride = box_layout(config.window, config.head_dim)
    if left >= config.tile_n:
        for part, page in boxes:
            target = cute.local_tile(stage, (config.window, config.head_dim), (part, 0))
            whole = cute.make_tensor(target.iterator, cute.make_layout(shape, stride=stride))
            at = box(coordinates, kv_head * head_stride, Int32(0), page, shape)
            copy_window(atom, at, whole, barrier)
    else:
        for part, page in boxes:
            target = cute.local_tile(stage, (config.window, config.head_dim), (part, 0))
            # A window without any key gets the request's last one, whose page it has.
            begin = cutlass.min(part * config.window, left - 1)
            valid = cutlass.max(1, cutlass.min(left - part * config.window, config.window))
            for eight in cutlass.range_constexpr(config.window // ATOM_ROWS):
                first = cutlass.min(eight * ATOM_ROWS, valid - 1)
                count = cutlass.max(1, cutlass.min(valid - eight * ATOM_ROWS, ATOM_ROWS))
                at = begin % config.window + first
                rows = window(source.coordinates, at, count, (kv_head, page))
                part_of = cute.local_tile(target, (ATOM_ROWS, config.head_dim), (eight, 0))
                copy_window(source.atom, rows, part_of, barrier)


def page_of(pages: Int32, window: Int32) -> Int32:
    """Of what read_pages returned, for one window; of the whole warp."""
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(pages, window))


@cute.jit
def read_pages(config: cutlass.Constexpr[Any], pages: cute.Tensor, tile: Tile, n: Int32) -> Int32:
    """Lane i: the page of the i-th window of block n. Entries beyond the keys are not read."""
    part = cutlass.min(cute.arch.lane_idx(), config.windows - 1)
    key = n * config.tile_n + part * config.window
    return pages[cutlass.max(0, cutlass.min(key, tile.seqlen_k - 1)) // config.page_size]


@cute.jit
def read_many_pages(
    config: cutlass.Constexpr[Any], pages: cute.Tensor, tile: Tile, n: Int32
) -> Int32:
    """The lanes together: as read_pages of block n, then of the blocks to its left, while there
    are any."""
    lane = cute.arch.lane_idx()
    key = (n - lane // config.windows) * config.tile_n + lane % config.windows * config.window
    return pages[cutlass.max(0, cutlass.min(key, tile.seqlen_k - 1)) // config.page_size]
