"""Prefill attention in Triton: one program computes TILE_M rows of one q head of one request.

The tile is the group that votes. Scores are in log2 units: multiplied by softmax_scale * log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log2_or_ninf(x):
    return tl.where(x > 0, tl.math.log2(tl.where(x > 0, x, 1.0)), float("-inf"))


@triton.jit
def _block_pointers(n, keys, PAGE: tl.constexpr, TILE_N: tl.constexpr):
    """Pointers [TILE_N] to the first element of each key and value, and which keys exist."""
    K, V, PageTable, key_start, seqlen_k, stride_k, stride_v = keys
    key = n * TILE_N + tl.arange(0, TILE_N)
    exists = key < seqlen_k
    if PAGE == 0:
        row = key_start + key.to(tl.int64)
        return K + row * stride_k[1], V + row * stride_v[1], key, exists
    # Entries beyond the request's keys may hold anything: they are not read.
    page = tl.load(PageTable + key // PAGE, mask=exists, other=0).to(tl.int64)
    row = key % PAGE
    at_k = K + page * stride_k[0] + row * stride_k[1]
    at_v = V + page * stride_v[0] + row * stride_v[1]
    return at_k, at_v, key, exists


@triton.jit
def _visit_block(
    state,
    q,
    n,
    keys,
    reach,
    vote,
    scale_log2,
    MASK: tl.constexpr,
    VOTE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    acc, row_sum, row_max, skipped = state
    d = tl.arange(0, HEAD_DIM)
    at_k, at_v, key, exists = _block_pointers(n, keys, PAGE, TILE_N)
    at_k = at_k[None, :] + d[:, None] * keys[5][3]
    at_v = at_v[:, None] + d[None, :] * keys[6][3]
    if MASK:
        k = tl.load(at_k, mask=exists[None, :], other=0.0)
        v = tl.load(at_v, mask=exists[:, None], other=0.0)
    else:
        k = tl.load(at_k)
        v = tl.load(at_v)
    # S = Q @ K.T
    s = tl.dot(q, k) * scale_log2
    if MASK:
        s = tl.where(key[None, :] < reach[:, None], s, float("-inf"))
    block_max = tl.max(s, 1)
    keep = True
    if VOTE:
        row_exists, log2_lambda = vote
        # A row that has seen nothing and sees nothing is NaN here: no veto. The first visited
        # block is kept because one of its rows has seen nothing yet and sees something.
        veto = row_exists & (block_max - row_max >= log2_lambda)
        keep = tl.max(veto.to(tl.int32), 0) > 0
        skipped += tl.where(keep, 0, 1)
    if keep:
        new_max = tl.maximum(row_max, block_max)
        base = new_max
        if MASK:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(s - base[:, None])
        rescale = tl.math.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        # O += P @ V
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return acc, row_sum, row_max, skipped


@triton.jit
def prefill_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    CuSeqlensQ,
    KeyLengths,  # [batch]; [batch + 1] cumulative when PAGE is 0
    PageTable,
    SkipLambda,
    Counters,
    scale_log2,
    strides,  # q: (row, head, element); k, v: (page, row, head, element); out, lse, table
    CAUSAL: tl.constexpr,
    VOTE: tl.constexpr,
    COUNT: tl.constexpr,
    PAGE: tl.constexpr,  # 0 = ragged keys
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    stride_q, stride_k, stride_v, stride_out, stride_lse, stride_table = strides
    # The longest tiles of a causal prompt start first; the heads of a group share keys in cache.
    head, m, request = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    kv_head = head // GROUP
    q_start = tl.load(CuSeqlensQ + request)
    seqlen_q = tl.load(CuSeqlensQ + request + 1) - q_start
    if m * TILE_M >= seqlen_q:
        return
    key_start = tl.zeros([], tl.int64)
    if PAGE == 0:
        key_start += tl.load(KeyLengths + request)
        seqlen_k = tl.load(KeyLengths + request + 1) - key_start.to(tl.int32)
    else:
        seqlen_k = tl.load(KeyLengths + request)
    context = seqlen_k - seqlen_q

    row = m * TILE_M + tl.arange(0, TILE_M)
    d = tl.arange(0, HEAD_DIM)
    row_exists = row < seqlen_q
    at_row = (q_start + row).to(tl.int64)
    at_q = Q + at_row * stride_q[0] + head * stride_q[1]
    q = tl.load(at_q[:, None] + d[None, :] * stride_q[2], mask=row_exists[:, None], other=0.0)

    # Keys that any row of the tile sees, and those that all of its rows see.
    key_end = seqlen_k
    full_end = seqlen_k
    reach = tl.zeros([TILE_M], tl.int32) + seqlen_k
    if CAUSAL:
        row_end = tl.minimum(m * TILE_M + TILE_M, seqlen_q)
        key_end = tl.maximum(0, tl.minimum(seqlen_k, context + row_end))
        full_end = tl.maximum(0, tl.minimum(seqlen_k, context + m * TILE_M + 1))
        reach = tl.minimum(seqlen_k, context + row + 1)
    n_blocks = tl.cdiv(key_end, TILE_N)
    n_full = full_end // TILE_N

    log2_lambda = float("-inf")
    if VOTE:
        log2_lambda = _log2_or_ninf(tl.load(SkipLambda + request).to(tl.float32))
    keys = (
        K + kv_head * stride_k[2],
        V + kv_head * stride_v[2],
        PageTable + request.to(tl.int64) * stride_table,
        key_start,
        seqlen_k,
        stride_k,
        stride_v,
    )
    vote = (row_exists, log2_lambda)
    acc = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    skipped = tl.zeros([], tl.int32)
    for i in tl.range(0, n_blocks - n_full):
        acc, row_sum, row_max, skipped = _visit_block(
            (acc, row_sum, row_max, skipped), q, n_blocks - 1 - i, keys, reach, vote,
            scale_log2, True, VOTE, PAGE, TILE_N, HEAD_DIM,
        )  # fmt: skip
    for i in tl.range(0, n_full):
        acc, row_sum, row_max, skipped = _visit_block(
            (acc, row_sum, row_max, skipped), q, n_full - 1 - i, keys, reach, vote,
            scale_log2, False, VOTE, PAGE, TILE_N, HEAD_DIM,
        )  # fmt: skip

    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # a row that saw nothing: 0
    lse = (row_max + _log2_or_ninf(row_sum)) * 0.6931471805599453
    at_out = Out + at_row * stride_out[0] + head * stride_out[1]
    tl.store(
        at_out[:, None] + d[None, :] * stride_out[2],
        out.to(Out.dtype.element_ty),
        mask=row_exists[:, None],
    )
    tl.store(Lse + head.to(tl.int64) * stride_lse + at_row, lse, mask=row_exists)
    if COUNT:
        tl.atomic_add(Counters + kv_head * 2, n_blocks.to(tl.int64))
        tl.atomic_add(Counters + kv_head * 2 + 1, skipped.to(tl.int64))
