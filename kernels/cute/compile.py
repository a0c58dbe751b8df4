"""Compiles a prefill kernel; needs no GPU."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from blasst.kernels.block_lists import WORD
from blasst.kernels.cute.arrays import DTYPES
from blasst.kernels.cute.trace import STEPS
from blasst.kernels.cute.visits import Lists

TMA_ALIGNMENT = 8  # elements of 16 bits


def compile_kernel(kernel: Any) -> Any:
    """The function of kernel.__call__ without its stream: the current one is used.

    kernel: an object with a `config` and the arguments of HopperPrefill.__call__. tiles: of query
    rows that vote by themselves, (how many, rows of each).
    """
    config = kernel.config
    dtype = DTYPES[config.dtype]
    total_q, num_heads, num_kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    batch, batch_and_1, max_pages = cute.sym_int(), cute.sym_int(), cute.sym_int()
    d = config.head_dim
    if config.page_size:
        kv_shape: tuple[Any, ...] = (cute.sym_int(), config.page_size, num_kv_heads, d)
        lengths, table = _fake(cutlass.Int32, (batch,)), _fake(cutlass.Int32, (batch, max_pages))
    else:
        kv_shape = (cute.sym_int(), num_kv_heads, d)
        lengths, table = _fake(cutlass.Int32, (batch_and_1,)), None
    return cute.compile(
        kernel,
        _fake(dtype, (total_q, num_heads, d), TMA_ALIGNMENT),
        _fake(dtype, kv_shape, TMA_ALIGNMENT),
        _fake(dtype, kv_shape, TMA_ALIGNMENT),
        _fake(dtype, (total_q, num_heads, d), TMA_ALIGNMENT),
        _fake(cutlass.Float32, (num_heads, total_q)),
        _fake(cutlass.Int32, (batch_and_1,)),
        lengths,
        table,
        _fake(cutlass.Float32, (batch,)) if config.vote else None,
        _fake(cutlass.Int64, (num_kv_heads, 2)) if config.count else None,
        _fake(cutlass.Int64, (cute.sym_int(), cute.sym_int(), STEPS)) if config.trace else None,
        _lists(kernel.tiles, config.tile_n, batch, num_heads) if config.block_mask else None,
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def _lists(tiles: tuple[int, int], tile_n: int, batch: Any, num_heads: Any) -> Lists:
    """Row-major inside, any strides between requests, heads and thread blocks."""
    (count, rows), words = tiles, tile_n // WORD
    at, n_blocks = (batch, num_heads, cute.sym_int()), cute.sym_int()
    inner = {"spans": (1 + 2 * count,), "blocks": (n_blocks,), "codes": (n_blocks, count)}
    strides = {"spans": (1,), "blocks": (1,), "codes": (count, 1)}
    lists = {
        name: cute.runtime.make_fake_tensor(
            cutlass.Int32,
            (*at, *shape),
            stride=(*(cute.sym_int64() for _ in at), *strides[name]),
            assumed_align=4,
        )
        for name, shape in inner.items()
    }
    bits = cute.runtime.make_fake_tensor(
        cutlass.Int32, (cute.sym_int(), rows, words), stride=(rows * words, words, 1),
        assumed_align=16,
    )  # fmt: skip
    return Lists(**lists, bits=bits)


def _fake(dtype: Any, shape: tuple[Any, ...], divisibility: int = 1) -> Any:
    """A tensor of any strides, the last one 1, all of them and its address divisible."""
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(
        dtype, shape, stride=stride, assumed_align=divisibility * dtype.width // 8
    )
