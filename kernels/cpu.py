"""The CPU implementation: the compiled tile loop of native/, on the threads of workers.py.

float32 throughout, other dtypes are widened first. lambda 0 cannot skip: it is bit for bit the
dense result. Without a compiler there is cpu_torch.py.
"""

from __future__ import annotations

from functools import partial

import torch

from blasst.kernels.call import Call
from blasst.kernels.native.binding import Work
from blasst.kernels.native.build import library
from blasst.kernels.tiles import key_end, mask_scores
from blasst.kernels.workers import run_all


def run(call: Call, out: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    """Fill `out`, add to `counters`, return lse [num_heads, total_q]. BuildError, MemoryError."""
    threads = torch.get_num_threads()
    work = Work(library(), call, out, threads)
    if call.spec.block_mask is None:
        run_all([work.drain] * min(threads, len(work.items)))
    else:
        run_all(partial(_masked_item, call, work, i) for i in range(len(work.items)))
    for request in call.requests:
        if request.seqlen_q and not request.seqlen_k:
            out[request.q_start : request.q_start + request.seqlen_q] = 0
    if counters is not None and call.log2_lambda is not None:
        counters += work.counters
    return work.lse


def _masked_item(call: Call, work: Work, index: int) -> None:
    request_index, head, num_heads, m = work.items[index]
    request, tile_m = call.requests[request_index], call.geometry.tile_m
    rows = range(m * tile_m, min((m + 1) * tile_m, request.seqlen_q))
    heads = range(head, head + num_heads)
    keys = key_end(call, request, rows.stop)
    like = torch.empty(()).expand(len(heads), len(rows), keys)
    visible = mask_scores(call, request, like, heads, rows, 0).contiguous()
    work.item(index, visible, 0)
