"""The C interface of attention.c: its structs (call.h), filled from a checked call."""

from __future__ import annotations

import ctypes

import torch

from blasst.kernels.call import Call, Request
from blasst.kernels.tiles import blocks, partial_blocks, visited_blocks
from blasst.kernels.types import LOG2_E, RaggedKV

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_CACHED_ROWS = 512 * 1024
"""Bytes of q and acc that the heads of one item may fill: half of a common core's L2."""

Item = tuple[int, int, int, int]
"""(request, first q head, q heads, m_block)"""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("dim", ctypes.c_int64),
    )

    @classmethod
    def of(cls, t: torch.Tensor) -> _Tensor:
        strides = t.stride() if t.dim() == 4 else (0, *t.stride())
        return cls(t.data_ptr(), *strides)


class _Request(ctypes.Structure):
    _fields_ = (
        ("q_start", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_k", ctypes.c_int64),
        ("k_start", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("visited", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("map_head", ctypes.c_int64),
        ("log2_lambda", ctypes.c_float),
        ("unused", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("requests", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_items", "num_requests", "total_q")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "dtype",
                "group_size",
                "num_kv_heads",
                "head_dim",
                "tile_m",
                "tile_n",
                "page_size",
                "causal",
            )
        ),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32),
    )


class _Mask(ctypes.Structure):
    _fields_ = (
        ("visible", ctypes.c_void_p),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("first_key", ctypes.c_int64),
    )


class Work:
    """One call in the library's hands. Threads `drain` it, or do each `item` with its mask.

    lse: float32 [num_heads, total_q]; counters: int64 [num_kv_heads, 2]. The library's memory goes
    with the last reference, which may be a thread's. MemoryError: no memory.
    """

    _work: int | None = None  # of the class: torch.compile drops objects that it half made

    def __init__(self, library: ctypes.CDLL, call: Call, out: torch.Tensor, threads: int) -> None:
        self._library = library
        self.items = _items(call, threads)
        # Filled by the library: torch would do it with threads that a forked child lacks.
        self.lse = torch.empty(call.q.shape[1], call.q.shape[0])
        self.counters = torch.zeros(call.problem.num_kv_heads, 2, dtype=torch.int64)
        self._kept: list[object] = [call, out]
        self._call = self._structs(call, out)
        self._work = library.blasst_open(ctypes.byref(self._call))
        _check(self._work)

    def drain(self) -> None:
        _check(self._library.blasst_drain(self._work))

    def item(self, index: int, visible: torch.Tensor, first_key: int) -> None:
        """visible: bool [q heads of the item, rows, keys from first_key on]."""
        mask = _Mask(visible.data_ptr(), visible.stride(0), visible.stride(1), first_key)
        _check(self._library.blasst_item(self._work, index, ctypes.byref(mask)))

    def __del__(self) -> None:
        if self._work:
            self._library.blasst_close(self._work)

    def _structs(self, call: Call, out: torch.Tensor) -> _Call:
        requests = (_Request * max(1, len(call.requests)))()
        for i, request in enumerate(call.requests):
            requests[i] = self._request(call, request)
        items = torch.tensor(self.items or [(0, 0, 0, 0)], dtype=torch.int32)
        self._kept += [requests, items]
        geometry = call.geometry
        return _Call(
            q=_Tensor.of(call.q),
            k=_Tensor.of(call.kv.k),
            v=_Tensor.of(call.kv.v),
            out=_Tensor.of(out),
            lse=self.lse.data_ptr(),
            counters=self.counters.data_ptr(),
            requests=ctypes.addressof(requests),
            items=items.data_ptr(),
            num_items=len(self.items),
            num_requests=len(call.requests),
            total_q=call.q.shape[0],
            dtype=_DTYPES[call.q.dtype],
            group_size=call.group_size,
            num_kv_heads=call.problem.num_kv_heads,
            head_dim=call.problem.head_dim,
            tile_m=geometry.tile_m,
            tile_n=geometry.tile_n,
            page_size=call.problem.page_size or 0,
            causal=call.spec.causal,
            scale=call.softmax_scale * LOG2_E,
        )

    def _request(self, call: Call, request: Request) -> _Request:
        made = _Request(
            q_start=request.q_start,
            seqlen_q=request.seqlen_q,
            seqlen_k=request.seqlen_k,
            log2_lambda=-torch.inf if call.log2_lambda is None else call.log2_lambda[request.index],
        )
        if isinstance(call.kv, RaggedKV):
            made.k_start = int(call.kv.cu_seqlens_k[request.index])
        else:
            pages = call.kv.page_table[request.index].contiguous()
            made.pages = pages.data_ptr()
            self._kept.append(pages)
        mask = call.spec.block_mask
        if mask is not None:
            visited = visited_blocks(call, request).contiguous()
            partial = partial_blocks(mask, request, visited).contiguous()
            made.visited, made.partial = visited.data_ptr(), partial.data_ptr()
            made.map_head = visited.stride(0) if visited.shape[0] > 1 else 0
            self._kept += [visited, partial]
        return made


def _items(call: Call, threads: int) -> list[Item]:
    """Tiles of query rows, those of a request with the most keys first, so that threads end
    together; the heads of a group stay together while there are tiles enough for all threads."""
    tile_m, group = call.geometry.tile_m, call.group_size
    tiles = [
        (r.index, kv_head, m)
        for r in call.requests
        if r.seqlen_q and r.seqlen_k
        for kv_head in range(call.problem.num_kv_heads)
        for m in reversed(range(blocks(r.seqlen_q, tile_m)))
    ]
    most = max(1, _CACHED_ROWS // (tile_m * call.problem.head_dim * 8))
    if len(tiles) < 8 * threads > 8:
        most = 1
    return [
        (index, kv_head * group + first, min(most, group - first), m)
        for index, kv_head, m in tiles
        for first in range(0, group, most)
    ]


def _check(done: object) -> None:
    if not done:
        raise MemoryError("no memory for the packed keys and values of this call")
