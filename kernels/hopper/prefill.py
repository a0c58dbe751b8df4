"""The kernel: a producer warpgroup and three consumers compute one tile of query rows."""

from dataclasses import replace
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

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
from blasst.kernels.cute.fragment import first_row
from blasst.kernels.cute.load import load_blocks, load_queries
from blasst.kernels.cute.mma import K_MAJOR, MN_MAJOR, warpgroup_mma
from blasst.kernels.cute.ring import Ring
from blasst.kernels.cute.smem import tile_layout, transposed
from blasst.kernels.cute.softmax import make_softmax
from blasst.kernels.cute.tile import Tile
from blasst.kernels.cute.trace import Step, start_trace
from blasst.kernels.cute.visits import Lists, visits_at
from blasst.kernels.hopper.config import ROWS, WARP, WARPGROUP, Config
from blasst.kernels.hopper.consume import Consumer, Operands
from blasst.kernels.hopper.epilogue import store_output
from blasst.kernels.hopper.seen import Seen

SWIZZLE_ALIGNMENT = 1024  # bytes


class Shared(NamedTuple):
    """Shared memory: tiles (rows, columns, stages), rings of stages."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    q_full: cute.Pointer
    keys: Ring
    values: Ring


class HopperPrefill:
    """q, out: [total_q, num_heads, head_dim]; k, v: [num_pages, page_size, num_kv_heads, head_dim],
    or [total_k, num_kv_heads, head_dim] when config.page_size is 0."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tiles = (config.warpgroups, ROWS)

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
            *make_sources(config, ROWS, (q, k, v, out), config.whole_rows, config.pack),
            lse,
            cu_seqlens_q,
            key_lengths,
            page_table,
            skip_lambda,
            counters,
            trace,
            lists,
        )
        grid = make_grid(config, arrays, (q.shape[1], num_kv_heads), max_seqlen_q, config.pack)
        self.kernel(arrays, scale_log2, num_kv_heads).launch(
            grid=grid,
            block=(config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, scale_log2: Float32, num_kv_heads: Int32):
        config = self.config
        place = make_place(self.config, num_kv_heads)
        tile = tile_at(config, arrays, place.request, place.row, config.tile_m, config.pack)
        listed = None
        if cutlass.const_expr(config.block_mask):
            rows = place.row // config.tile_m
            listed = visits_at(arrays.lists, place.request, place.head, rows)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(warp)
        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if tile.rows > 0:
                self.produce(arrays, shared, (tile, listed), warp, place)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            if tile.rows > 0:
                group = warp // (WARPGROUP // WARP) - 1
                self.consume(arrays, shared, (tile.n_blocks, listed), group, place, scale_log2)

    @cute.jit
    def allocate(self, warp: Int32) -> Shared:
        """Shared memory with its barriers ready."""
        config = self.config
        smem = cutlass.utils.SmemAllocator()
        barriers = smem.allocate_array(Int64, config.barriers)
        q, k, v = (
            smem.allocate_tensor(
                self.dtype, layout.outer, byte_alignment=SWIZZLE_ALIGNMENT, swizzle=layout.inner
            )
            for layout in (
                tile_layout(ROWS, config.head_dim, config.warpgroups),
                *(
                    tile_layout(
                        config.tile_n, config.head_dim, stages, whole_rows=config.whole_rows
                    )
                    for stages in (config.key_stages, config.value_stages)
                ),
            )
        )
        first = barriers + config.warpgroups
        share = config.bytes_per_stage // config.loaders
        keys = Ring(first, config.key_stages, share)
        values = Ring(first + 2 * config.key_stages, config.value_stages, share)
        if warp == 0:
            with cute.arch.elect_one():
                for group in cutlass.range_constexpr(config.warpgroups):
                    cute.arch.mbarrier_init(barriers + group, 1)
                for ring in (keys, values):
                    ring.init(config.loaders, config.warpgroups * (WARPGROUP // WARP))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return Shared(q, k, v, barriers, keys, values)

    @cute.jit
    def produce(
        self,
        arrays: Arrays,
        shared: Shared,
        job: tuple[Tile, Any],
        warp: Int32,
        place: Place,
    ) -> None:
        """job: the thread block's tile, and its visits when a block mask lists them."""
        tile, listed = job
        if cutlass.const_expr(listed is not None):
            tile = replace(tile, n_blocks=listed.count())
        if warp == 0:
            size = self.config.query_bytes
            load_queries(
                arrays.q, shared.q, shared.q_full, tile, place.head, size, self.config.pack
            )
        if tile.n_blocks > 0:
            self.produce_blocks(arrays, shared, (tile, listed), warp, place)

    @cute.jit
    def produce_blocks(
        self,
        arrays: Arrays,
        shared: Shared,
        job: tuple[Tile, Any],
        warp: Int32,
        place: Place,
    ) -> None:
        config = self.config
        tile, listed = job
        pages = None
        if cutlass.const_expr(config.page_size > 0):
            pages = arrays.page_table[place.request, None]
        trace = start_trace(arrays.trace, warp)
        for loader in cutlass.range_constexpr(config.loaders):
            mine = (loader, place.kv_head, pages)
            if warp == loader:
                load_blocks(config, arrays.k, shared.k, shared.keys, tile, mine, trace, listed)
            if warp == config.loaders + loader:
                load_blocks(config, arrays.v, shared.v, shared.values, tile, mine, trace, listed)

    @cute.jit
    def consume(
        self,
        arrays: Arrays,
        shared: Shared,
        job: tuple[Int32, Any],
        group: Int32,
        place: Place,
        scale_log2: Float32,
    ) -> None:
        """job: blocks that the thread block visits, or the list of a block mask."""
        config = self.config
        visits, listed = job
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        own_row = place.row + group * ROWS
        tile = tile_at(config, arrays, place.request, own_row, ROWS, config.pack)
        seen = None
        if cutlass.const_expr(listed is not None):
            visits, tile = listed.count(), replace(tile, n_blocks=listed.own(group))
            seen = Seen.create(listed, group, thread)
        log2_lambda = None
        if cutlass.const_expr(config.vote):
            log2_lambda = cute.math.log2(arrays.skip_lambda[place.request], fastmath=True)
        consumer = Consumer(
            config,
            group,
            thread,
            tile,
            visits,
            shared.keys,
            shared.values,
            self.operands(shared, group),
            make_softmax(scale_log2, first_row(thread), tile.rows, log2_lambda, config.highest),
            seen,
            start_trace(arrays.trace, warp),
        )
        cute.arch.mbarrier_wait(shared.q_full + group, 0)
        skipped = consumer.attend()
        if tile.rows > 0:
            own_rows = shared.q[None, None, group]
            store_output(consumer, arrays.out, own_rows, arrays.lse, place.head)
            consumer.trace.mark(Step.OUTPUT, visits - 1)
        if cutlass.const_expr(config.count):
            at = arrays.counters.iterator + place.kv_head * 2
            count_blocks(at, tile.n_blocks, skipped, thread)

    @cute.jit
    def operands(self, shared: Shared, group: Int32) -> Operands:
        config = self.config
        mma_qk = warpgroup_mma(self.dtype, config.tile_n, K_MAJOR, False)
        mma_pv = warpgroup_mma(self.dtype, config.head_dim, MN_MAJOR, True)
        # Descriptors are per warpgroup: the slice of its first thread.
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        return Operands(
            mma_qk,
            mma_pv,
            qk.make_fragment_A(qk.partition_A(shared.q))[None, None, None, group],
            qk.make_fragment_B(qk.partition_B(shared.k)),
            pv.make_fragment_B(pv.partition_B(transposed(shared.v))),
            pv.make_fragment_A(pv.partition_shape_A((ROWS, config.tile_n))),
            cute.make_rmem_tensor(qk.partition_shape_C((ROWS, config.tile_n)), Float32),
            cute.make_rmem_tensor(pv.partition_shape_C((ROWS, config.head_dim)), Float32),
        )
