"""Prefill attention in Triton: one program computes TILE_M rows of one q head of one request.

The tile is the group that votes. Maxima are of unscaled scores; scale_log2 = softmax_scale *
log2(e) > 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log2_or_ninf(x):
    # == 0, not > 0: a NaN must show.
    return tl.where(x == 0, float("-inf"), tl.math.log2(tl.where(x == 0, 1.0, x)))


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
def _load(at, exists, MASK: tl.constexpr):
    return tl.load(at, mask=exists, other=0.0) if MASK else tl.load(at)


@triton.jit
def _visible_bits(Bits, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """bool [TILE_M, TILE_N] of a block with bits."""
    WORDS: tl.constexpr = TILE_N // 32
    m, n = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    at = Bits + (tile.to(tl.int64) * TILE_M + m) * WORDS
    # Rows alone are loaded: a load of the whole tile would set the layout of the scores, and each
    # block, with bits or without, would pass through shared memory to get there.
    word = tl.load(at)[:, None]
    for w in tl.static_range(1, WORDS):
        word = tl.where((n // 32 == w)[None, :], tl.load(at + w)[:, None], word)
    return ((word >> (n % 32)[None, :]) & 1) != 0


@triton.jit
def _vote(block_max, row_max, vote, scale_log2, first):
    """Whether a row of the tile needs the block; all are needed at lambda 0, and the first visited.

    A row that sees nothing does not veto. Not below, instead of above: a NaN does.
    """
    row_exists, log2_lambda = vote
    below = (block_max - row_max) * scale_log2 < log2_lambda
    veto = row_exists & (block_max != float("-inf")) & (below == 0)
    return (tl.max(veto.to(tl.int32), 0) > 0) | first | (log2_lambda == float("-inf"))


@triton.jit
def _visit_block(
    state, q, n, first, keys, reach, vote, scale_log2, mask,
    MASK: tl.constexpr, VOTE: tl.constexpr, PAGE: tl.constexpr, V_AHEAD: tl.constexpr,
    LISTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """first: of the tile's visits. MASK: not every row may see every key. mask: (bits, tile)."""
    acc, row_sum, row_max, skipped = state
    d = tl.arange(0, HEAD_DIM)
    at_k, at_v, key, exists = _block_pointers(n, keys, PAGE, TILE_N)
    at_k = at_k[None, :] + d[:, None] * keys[5][3]
    at_v = at_v[:, None] + d[None, :] * keys[6][3]
    k = _load(at_k, exists[None, :], MASK)
    if V_AHEAD:
        # Outside the branch it is part of the loop's pipeline, like the keys.
        v = _load(at_v, exists[:, None], MASK)
    # S = Q @ K.T
    s = tl.dot(q, k)
    if MASK:
        if LISTS:
            if mask[1] >= 0:
                visible = _visible_bits(mask[0], mask[1], TILE_M, TILE_N)
                s = tl.where(visible, s, float("-inf"))
        else:
            s = tl.where(key[None, :] < reach[:, None], s, float("-inf"))
    block_max = tl.max(s, 1)
    keep = True
    if VOTE:
        keep = _vote(block_max, row_max, vote, scale_log2, first)
        skipped += tl.where(keep, 0, 1)
    if keep:
        new_max = tl.maximum(row_max, block_max)
        base = new_max * scale_log2
        if MASK:
            base = tl.where(new_max == float("-inf"), 0.0, base)
        if not V_AHEAD:
            v = _load(at_v, exists[:, None], MASK)
        p = tl.math.exp2(s * scale_log2 - base[:, None])
        rescale = tl.math.exp2(row_max * scale_log2 - base)
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
    Lists,  # LISTS: block_lists.BlockLists as a tuple
    scale_log2,
    num_kv_heads,
    strides,  # q: (row, head, element); k, v: (page, row, head, element); out, lse, table
    CAUSAL: tl.constexpr,
    VOTE: tl.constexpr,
    COUNT: tl.constexpr,
    PAGE: tl.constexpr,  # 0 = ragged keys
    LISTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    V_AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    stride_q, stride_k, stride_v, stride_out, stride_lse, stride_table = strides
    # The heads of a group run side by side: they read the same keys. The longest tiles of a
    # causal prompt start first.
    m = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head, request = tl.program_id(2) % num_kv_heads, tl.program_id(2) // num_kv_heads
    head = kv_head * tl.num_programs(0) + tl.program_id(0)
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
    if LISTS:
        counts, blocks, tiles, bits, heads, m_blocks, max_blocks = Lists
        at = (request * heads + head % heads).to(tl.int64) * m_blocks + m
        n_blocks = tl.load(counts + at)
        for i in tl.range(0, n_blocks, num_stages=STAGES):
            n = tl.load(blocks + at * max_blocks + i)
            mask = (bits, tl.load(tiles + at * max_blocks + i))
            acc, row_sum, row_max, skipped = _visit_block(
                (acc, row_sum, row_max, skipped), q, n, i == 0, keys, reach, vote, scale_log2, mask,
                True, VOTE, PAGE, V_AHEAD, True, TILE_M, TILE_N, HEAD_DIM,
            )  # fmt: skip
    else:
        for i in tl.range(0, n_blocks - n_full, num_stages=1):
            acc, row_sum, row_max, skipped = _visit_block(
                (acc, row_sum, row_max, skipped), q, n_blocks - 1 - i, i == 0, keys, reach,
                vote, scale_log2, (), True, VOTE, PAGE, False, False, TILE_M, TILE_N, HEAD_DIM,
            )  # fmt: skip
        for i in tl.range(0, n_full, num_stages=STAGES):
            acc, row_sum, row_max, skipped = _visit_block(
                (acc, row_sum, row_max, skipped), q, n_full - 1 - i, i + n_blocks == n_full,
                keys, reach, vote, scale_log2, (), False, VOTE, PAGE, V_AHEAD, False, TILE_M,
                TILE_N, HEAD_DIM,
            )  # fmt: skip

    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]  # a row that saw nothing: 0
    lse = (row_max * scale_log2 + _log2_or_ninf(row_sum)) * 0.6931471805599453
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
