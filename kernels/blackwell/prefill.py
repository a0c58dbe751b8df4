"""The kernel: 16 warps compute two tiles of 128 query rows of one head against all their keys."""

from dataclasses import replace
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from blasst.kernels.blackwell.config import ALIGNMENT, ROWS, TILES, WARP, WARPGROUP, Config
from blasst.kernels.blackwell.correction import Correction
from blasst.kernels.blackwell.edges import Edges, barrier_count
from blasst.kernels.blackwell.epilogue import await_normaliser, store_output
from blasst.kernels.blackwell.mma import Multiplier, Operands
from blasst.kernels.blackwell.softmax import Softmax
from blasst.kernels.cute import tmem
from blasst.kernels.cute.arrays import (
    DTYPES,
    Arrays,
    Place,
    make_grid,
    make_place,
    make_sources,
    tile_at,
)
from blasst.kernels.cute.count import count_blocks
from blasst.kernels.cute.load import load_blocks, load_queries
from blasst.kernels.cute.ring import Ring
from blasst.kernels.cute.smem import tile_layout, transposed
from blasst.kernels.cute.tile import Tile
from blasst.kernels.cute.trace import NO_TRACE, Trace, start_trace
from blasst.kernels.cute.visits import Lists, visits_at


class Shared(NamedTuple):
    """Shared memory: tiles (rows, columns, stages or tiles), barriers, and messages.

    scale: (tiles, 2 slots, rows); kept: (tiles,); tmem: (1,), the base address of tensor memory.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    edges: Edges
    keys: Ring
    values: Ring
    scale: cute.Tensor
    kept: cute.Tensor
    tmem: cute.Tensor

    def after(self, clock: cute.Tensor) -> Any:
        """With the phases of the next item. clock: registers [2], visits and items so far."""
        visits, items = clock[0], clock[1]
        return self._replace(
            edges=replace(self.edges, visits=visits, items=items),
            keys=replace(self.keys, before=visits),
            values=replace(self.values, before=visits),
        )


class Item(NamedTuple):
    """256 query rows of a head: their place, both tiles in one and apart, how many visits each
    passes by first, and the visits when a block mask lists them."""

    place: Place
    tile: Tile
    tiles: tuple[Tile, Tile]
    leads: tuple[Int32, Int32]
    listed: Any


class BlackwellPrefill:
    """q, out: [total_q, num_heads, head_dim]; k, v: [num_pages, page_size, num_kv_heads, head_dim],
    or [total_k, num_kv_heads, head_dim] when config.page_size is 0."""

    tiles = (TILES, ROWS)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        key_lengths: cute.Tensor,
        page_table: cute.Tensor | None,
        skip_lambda: cute.Tensor | None,
        counters: cute.Tensor | None,
        trace: cute.Tensor | None,
        lists: Lists | None,
        scale_log2: Float32,
        max_seqlen_q: Int32,
        stream: cuda.CUstream,
    ):
        config = self.config
        paged = config.page_size > 0
        num_kv_heads = k.shape[2] if cutlass.const_expr(paged) else k.shape[1]
        arrays = Arrays(
            *make_sources(config, ROWS, (q, k, v, out)),
            lse,
            cu_seqlens_q,
            key_lengths,
            page_table,
            skip_lambda,
            counters,
            trace,
            lists,
        )
        grid = make_grid(config, arrays, (q.shape[1], num_kv_heads), max_seqlen_q)
        work = None
        if cutlass.const_expr(config.grid > 0):
            work = grid
            grid = (cutlass.min(config.grid, work[0] * work[1] * work[2]), 1, 1)
        self.kernel(arrays, scale_log2, num_kv_heads, work).launch(
            grid=grid, block=(config.roles.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, scale_log2: Float32, num_kv_heads: Int32, work: Any):
        if cutlass.const_expr(self.config.grid > 0):
            self.stay(arrays, (work, num_kv_heads), scale_log2)
        else:
            place = make_place(self.config, num_kv_heads)
            tile = tile_at(self.config, arrays, place.request, place.row, self.config.tile_m)
            if tile.rows > 0:
                self.attend(arrays, tile, place, scale_log2)

    @cute.jit
    def item_at(self, arrays: Arrays, place: Place, tile: Tile) -> Item:
        config = self.config
        tiles = tuple(
            tile_at(config, arrays, place.request, place.row + t * ROWS, ROWS) for t in range(TILES)
        )
        leads = tuple(tile.n_blocks - t.n_blocks for t in tiles)
        listed = None
        if cutlass.const_expr(config.block_mask):
            group = place.row // config.tile_m
            listed = visits_at(arrays.lists, place.request, place.head, group)
            tile = replace(tile, n_blocks=listed.count())
            tiles = tuple(replace(tiles[t], n_blocks=listed.own(t)) for t in range(TILES))
            leads = tuple(listed.first(t) for t in range(TILES))
        return Item(place, tile, tiles, leads, listed)

    @cute.jit
    def attend(self, arrays: Arrays, tile: Tile, place: Place, scale_log2: Float32) -> None:
        """Every warp takes its role."""
        roles, registers = self.config.roles, self.config.registers
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        item = self.item_at(arrays, place, tile)
        shared = self.allocate(warp)
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem.iterator)
        if warp >= roles.mma:
            cute.arch.setmaxregister_decrease(registers.other)
            if warp == roles.mma:
                if item.tile.n_blocks > 0:
                    trace = start_trace(arrays.trace, warp)
                    self.multiplier(shared, base, item, trace).multiply()
                self.free(base)
            elif item.tile.n_blocks > 0:
                self.produce(arrays, shared, item, warp)
        elif warp >= roles.correction:
            cute.arch.setmaxregister_decrease(registers.correction)
            self.correct(arrays, shared, item)
            self.leave()
        else:
            cute.arch.setmaxregister_increase(registers.softmax)
            for index in cutlass.range_constexpr(TILES):
                if warp // 4 == index:
                    self.soften(arrays, shared, index, item, scale_log2)

    @cute.jit
    def stay(self, arrays: Arrays, work: tuple[Any, Int32], scale_log2: Float32) -> None:
        """As attend, for one item after the other; every warp goes through them on its own.

        work: (heads of a group, tiles of the longest request, kv heads * requests), kv heads.
        """
        roles, registers = self.config.roles, self.config.registers
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(warp)
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem.iterator)
        job = (arrays, shared, base, work, scale_log2)
        # A loop for each role: in one for all, every warp would need the registers of softmax.
        if warp >= roles.mma:
            cute.arch.setmaxregister_decrease(registers.other)
            if warp == roles.mma:
                self.go_through(job, "multiply")
                self.free(base)
            else:
                self.go_through(job, "produce")
        elif warp >= roles.correction:
            cute.arch.setmaxregister_decrease(registers.correction)
            self.go_through(job, "correct")
            self.leave()
        else:
            cute.arch.setmaxregister_increase(registers.softmax)
            for index in cutlass.range_constexpr(TILES):
                if warp // 4 == index:
                    self.go_through(job, "soften", index)

    @cute.jit
    def go_through(
        self,
        job: tuple[Any, ...],
        role: cutlass.Constexpr[str],
        index: cutlass.Constexpr[int] = 0,
    ) -> None:
        """All items of the thread block, in one role."""
        arrays, shared, base, ((group_size, m_blocks, slots), num_kv_heads), scale_log2 = job
        clock = cute.make_rmem_tensor(2, Int32)
        clock[0], clock[1] = Int32(0), Int32(0)
        count, step = group_size * m_blocks * slots, cute.arch.grid_dim()[0]
        for at in cutlass.range(cute.arch.block_idx()[0], count, step, unroll=1):
            place = self.place_at(at, (group_size, m_blocks, slots), num_kv_heads)
            tile = tile_at(self.config, arrays, place.request, place.row, self.config.tile_m)
            if tile.rows > 0:
                item = self.item_at(arrays, place, tile)
                self.do_item((arrays, shared, base, item, scale_log2), clock, role, index)
                clock[0] += item.tile.n_blocks
                clock[1] += 1

    @cute.jit
    def do_item(
        self,
        job: tuple[Any, ...],
        clock: cute.Tensor,
        role: cutlass.Constexpr[str],
        index: cutlass.Constexpr[int],
    ) -> None:
        """Arrives everywhere, also for an item without visits."""
        arrays, shared, base, item, scale_log2 = job
        shared = shared.after(clock)
        if cutlass.const_expr(role == "multiply"):
            self.multiplier(shared, base, item, NO_TRACE).multiply_or_pass_by()
        elif cutlass.const_expr(role == "produce"):
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            self.produce(arrays, shared, item, warp)
        elif cutlass.const_expr(role == "correct"):
            self.correct(arrays, shared, item)
        else:
            self.soften(arrays, shared, index, item, scale_log2)

    @cute.jit
    def place_at(self, at: Int32, work: tuple[Int32, Int32, Int32], num_kv_heads: Int32) -> Place:
        """Of the item `at`. The last rows of all requests and heads come first: the longest."""
        group_size, m_blocks, slots = work
        m_reversed, at = at // (group_size * slots), at % (group_size * slots)
        slot, in_group = at // group_size, at % group_size
        kv_head, request = slot % num_kv_heads, slot // num_kv_heads
        row = (m_blocks - 1 - m_reversed) * self.config.tile_m
        return Place(kv_head * group_size + in_group, kv_head, request, row)

    @cute.jit
    def await_epilogue(self, shared: Shared) -> None:
        """Keys warp: the outputs of the last item have left the place of the queries."""
        for t in cutlass.range_constexpr(TILES):
            shared.edges.edge("q_free", t).wait(-1)

    @cute.jit
    def free(self, base: cute.Pointer) -> None:
        """MMA warp: tensor memory, when nobody reads it any more."""
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.barrier(
            barrier_id=self.config.teardown_barrier, number_of_threads=WARPGROUP + WARP
        )
        cute.arch.dealloc_tmem(base, tmem.COLUMNS)

    @cute.jit
    def leave(self) -> None:
        """Correction warps: tensor memory is no longer read."""
        tmem.fence_before_sync()
        cute.arch.barrier_arrive(
            barrier_id=self.config.teardown_barrier, number_of_threads=WARPGROUP + WARP
        )

    @cute.jit
    def allocate(self, warp: Int32) -> Shared:
        """Shared and tensor memory, barriers ready."""
        config = self.config
        smem = cutlass.utils.SmemAllocator()
        stages = config.key_stages + config.value_stages
        barriers = smem.allocate_array(Int64, barrier_count(config) + 2 * stages)
        base = smem.allocate_tensor(Int32, cute.make_layout(1))
        kept = smem.allocate_tensor(Int32, cute.make_layout(TILES))
        scale = smem.allocate_tensor(
            Float32, cute.make_layout((TILES, 2, ROWS), stride=(2 * ROWS, ROWS, 1)), 16
        )
        q, k, v = (
            smem.allocate_tensor(
                self.dtype, layout.outer, byte_alignment=ALIGNMENT, swizzle=layout.inner
            )
            for layout in (
                tile_layout(ROWS, config.head_dim, TILES),
                tile_layout(config.tile_n, config.head_dim, config.key_stages),
                tile_layout(config.tile_n, config.head_dim, config.value_stages),
            )
        )
        edges = Edges(config, barriers)
        first = barriers + barrier_count(config)
        share = config.bytes_per_stage // config.loaders
        keys = Ring(first, config.key_stages, share)
        values = Ring(first + 2 * config.key_stages, config.value_stages, share)
        if warp == config.roles.mma:
            cute.arch.alloc_tmem(tmem.COLUMNS, base.iterator)
        if warp == 0:
            with cute.arch.elect_one():
                edges.init()
                for ring in (keys, values):
                    ring.init(config.loaders, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return Shared(q, k, v, edges, keys, values, scale, kept, base)

    @cute.jit
    def produce(
        self,
        arrays: Arrays,
        shared: Shared,
        item: Item,
        warp: Int32,
    ) -> None:
        config = self.config
        place, tile, _, _, listed = item
        pages = None
        if cutlass.const_expr(config.page_size > 0):
            pages = arrays.page_table[place.request, None]
        mine = (0, place.kv_head, pages)
        q_full = shared.edges.edge("q_full", 0).barriers
        if warp == config.roles.keys:
            if cutlass.const_expr(config.grid > 0):
                self.await_epilogue(shared)
            load_queries(arrays.q, shared.q, q_full, tile, place.head, config.query_bytes)
            load_blocks(config, arrays.k, shared.k, shared.keys, tile, mine, visits=listed)
        if warp == config.roles.values:
            load_blocks(config, arrays.v, shared.v, shared.values, tile, mine, visits=listed)

    @cute.jit
    def soften(
        self,
        arrays: Arrays,
        shared: Shared,
        index: cutlass.Constexpr[int],
        item: Item,
        scale_log2: Float32,
    ) -> None:
        config, place, listed = self.config, item.place, item.listed
        tile, visits, lead = item.tiles[index], item.tile.n_blocks, item.leads[index]
        row = cute.arch.thread_idx()[0] % WARPGROUP
        floor = -Float32.inf
        if cutlass.const_expr(config.vote):
            log2_lambda = cute.math.log2(arrays.skip_lambda[place.request], fastmath=True)
            floor = log2_lambda if row < tile.rows else Float32.inf
        lanes = tmem.own_lanes(shared.tmem[0])
        softmax = Softmax(
            config,
            index,
            tile,
            visits,
            lead,
            row,
            shared.edges,
            lanes + config.tmem.scores[index],
            lanes + config.p_columns[index],
            shared.scale[index, None, None],
            shared.kept,
            scale_log2,
            floor,
            cute.make_rmem_tensor(3, Float32),
            self.dtype,
            listed,
            start_trace(arrays.trace, cute.arch.make_warp_uniform(cute.arch.warp_idx())),
        )
        skipped = softmax.attend()
        if row < tile.rows:
            arrays.lse[place.head, tile.q_start + tile.row + row] = softmax.lse()
        if cutlass.const_expr(config.count):
            count_blocks(arrays.counters.iterator + place.kv_head * 2, tile.n_blocks, skipped, row)

    @cute.jit
    def correct(
        self,
        arrays: Arrays,
        shared: Shared,
        item: Item,
    ) -> None:
        config = self.config
        place, tiles, visits = item.place, item.tiles, item.tile.n_blocks
        lanes = tmem.own_lanes(shared.tmem[0])
        correction = Correction(
            config,
            shared.edges,
            visits,
            cute.arch.thread_idx()[0] % WARPGROUP,
            shared.scale,
            tuple(lanes + column for column in config.tmem.out),
        )
        correction.correct()
        for t in cutlass.range_constexpr(TILES):
            correction.await_output(t)
            if tiles[t].rows > 0:
                smem = shared.q[None, None, t]
                store_output(correction, t, tiles[t], arrays.out, smem, place.head)
            if cutlass.const_expr(config.grid > 0):
                if tiles[t].rows <= 0:
                    # No phase may be missed.
                    await_normaliser(correction, t)
                shared.edges.edge("q_free", t).arrive(0)

    @cute.jit
    def multiplier(
        self,
        shared: Shared,
        base: cute.Pointer,
        item: Item,
        trace: Trace,
    ) -> Multiplier:
        config = self.config
        visits, leads, listed = item.tile.n_blocks, item.leads, item.listed
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shapes = (ROWS, config.tile_n), (ROWS, config.head_dim)
        mma_qk, mma_pv = (
            cutlass.utils.blackwell_helpers.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                k_major,
                b_major,
                Float32,
                tcgen05.CtaGroup.ONE,
                shape,
                source,
            )
            for b_major, shape, source in (
                (k_major, shapes[0], tcgen05.OperandSource.SMEM),
                (mn_major, shapes[1], tcgen05.OperandSource.TMEM),
            )
        )
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        p = pv.make_fragment_A(pv.partition_shape_A((ROWS, config.tile_n)))
        scores = qk.make_fragment_C(qk.partition_shape_C(shapes[0]))
        out = pv.make_fragment_C(pv.partition_shape_C(shapes[1]))
        operands = Operands(
            mma_qk,
            mma_pv,
            qk.make_fragment_A(qk.partition_A(shared.q)),
            qk.make_fragment_B(qk.partition_B(shared.k)),
            pv.make_fragment_B(pv.partition_B(transposed(shared.v))),
            tuple(place_at(p, base + c, self.dtype) for c in config.p_columns),
            tuple(place_at(scores, base + c, Float32) for c in config.tmem.scores),
            tuple(place_at(out, base + c, Float32) for c in config.tmem.out),
        )
        return Multiplier(
            config,
            operands,
            shared.edges,
            shared.keys,
            shared.values,
            visits,
            leads,
            shared.kept,
            listed.codes_ahead(1, 1) if config.block_mask and listed is not None else None,
            trace,
        )


def place_at(fragment: cute.Tensor, column: cute.Pointer, dtype: Any) -> cute.Tensor:
    """The fragment at a column of tensor memory."""
    return cute.make_tensor(cute.recast_ptr(column, dtype=dtype), fragment.layout)
