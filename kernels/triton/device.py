"""Prefill attention in Triton: one program computes TILE_M rows of one q head of one request.

The tile is the group that votes. Maxima are of unscaled scores; scale_log2 = softmax_scale *
log2(e) > 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.4028234663852886e38)  # of finite float32


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
        # Of the block's own rows only 32 bits are multiplied, and that outside the loop.
        start, row = key_start + n * TILE_N, tl.arange(0, TILE_N)
        at_k = K + start * stride_k[1] + row * stride_k[1]
        return at_k, V + start * stride_v[1] + row * stride_v[1], key, exists
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
def _load_box(tensor, n, kv_head, key_start, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[TILE_N, HEAD_DIM] of a block whose keys all exist, by the copy engine."""
    row = key_start.to(tl.int32) + n * TILE_N
    return tensor.load([kv_head, row, 0]).reshape([TILE_N, HEAD_DIM])


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
def _asm(text: tl.constexpr, x, PACK: tl.constexpr):
    """x if PACK is 1, else PACK elements of it at a time, through PTX that keeps its place."""
    return tl.inline_asm_elementwise(
        text, "=&r,r" if PACK == 1 else "=r,=r,r,r", [x], tl.int32, is_pure=False, pack=PACK
    )


@triton.jit
def _declare_ballot():
    # A PTX register outlives the statement that names it: so the result of a barrier becomes a
    # scalar, which Triton makes of a tensor through shared memory only.
    _asm(".reg .b32 ballot; mov.b32 ballot, 0; mov.b32 $0, $1;", tl.full([], 0, tl.int32), 1)


@triton.jit
def _any(x, BALLOT: tl.constexpr):
    """Whether any element of x holds: bool [TILE_M], or [TILE_M, 4] by thread."""
    if not BALLOT:
        if len(x.shape) == 2:
            x = tl.max(x.to(tl.int32), 1)
        return tl.max(x.to(tl.int32), 0) > 0
    # Rows of a product come in pairs: for 16 rows a warp it is one barrier.
    _asm(
        "{ .reg .pred p; or.b32 $0, $2, $3; mov.b32 $1, $0; setp.ne.b32 p, $0, 0; "
        "barrier.cta.red.or.pred p, 0, p; @p mov.b32 ballot, 1; }",
        x.to(tl.int32),
        2,
    )
    # All warps have the same result, but only a vote of the warp tells ptxas: without it the branch
    # counts as divergent, and what the products read goes to uniform registers anew each visit.
    text: tl.constexpr = (
        "{ .reg .pred p; setp.ne.b32 p, ballot, 0; "
        "vote.sync.ballot.b32 $0, p, 0xffffffff; mov.b32 ballot, $1; }"
    )
    return _asm(text, tl.full([], 0, tl.int32), 1) != 0


@triton.jit
def _vote(block_max, row_max, vote, scale_log2, first, BALLOT: tl.constexpr):
    """Whether a row of the tile needs the block; all are needed at lambda 0, and the first visited.
    A row that sees nothing needs none. Not below, instead of above: a NaN needs it."""
    row_exists, log2_lambda = vote
    below = (block_max - row_max) * scale_log2 < log2_lambda
    veto = row_exists & (block_max != float("-inf")) & (below == 0)
    return _any(veto, BALLOT) | first | (log2_lambda == float("-inf"))


@triton.jit
def _max_by_thread(s, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """[TILE_M, 4]: the maxima of s [TILE_M, TILE_N] over what each of a row's four threads holds of
    a product."""
    return tl.max(tl.max(tl.reshape(s, [TILE_M, TILE_N // 8, 4, 2]), 3), 1)


@triton.jit
def _visit_block(
    state, n, first, given, mask, how: tl.constexpr, MASK: tl.constexpr, V_AHEAD: tl.constexpr
):  # fmt: skip
    """state: output, sums, maxima and thresholds of the rows, blocks skipped; first: of the tile's
    visits; given: what all read; how: what they are compiled for. MASK: not every row may see every
    key; mask: (reach, bits, tile)."""
    VOTE: tl.constexpr = how[0]
    PAGE: tl.constexpr = how[1]
    LISTS: tl.constexpr = how[2]
    BALLOT: tl.constexpr = how[3]
    WAIT: tl.constexpr = how[4] and (LISTS or not MASK)
    TILE_M: tl.constexpr = how[5]
    TILE_N: tl.constexpr = how[6]
    HEAD_DIM: tl.constexpr = how[7]
    acc, row_sum, row_max, threshold, skipped = state
    q, scale_log2, keys, boxes, vote = given
    k_box, v_box, kv_head = boxes
    BOXES: tl.constexpr = k_box is not None and not MASK
    BY_THREAD: tl.constexpr = VOTE and k_box is not None
    d = tl.arange(0, HEAD_DIM)
    at_k, at_v, key, exists = _block_pointers(n, keys, PAGE, TILE_N)
    at_k = at_k[None, :] + d[:, None] * keys[5][3]
    at_v = at_v[:, None] + d[None, :] * keys[6][3]
    if BOXES:
        k = _load_box(k_box, n, kv_head, keys[3], TILE_N, HEAD_DIM).T
    else:
        k = _load(at_k, exists[None, :], MASK)
    if V_AHEAD:
        # Outside the branch it is part of the loop's pipeline, like the keys.
        if BOXES:
            v = _load_box(v_box, n, kv_head, keys[3], TILE_N, HEAD_DIM)
        else:
            v = _load(at_v, exists[:, None], MASK)
    # S = Q @ K.T
    s = tl.dot(q, k)
    if MASK:
        if LISTS:
            if mask[2] >= 0:
                visible = _visible_bits(mask[1], mask[2], TILE_M, TILE_N)
                s = tl.where(visible, s, float("-inf"))
        else:
            s = tl.where(key[None, :] < mask[0][:, None], s, float("-inf"))
    if BY_THREAD:
        most = _max_by_thread(s, TILE_M, TILE_N)
    else:
        block_max = tl.max(s, 1)
    # WAIT: a product that is in flight from visit to visit ptxas takes apart where the loop holds
    # others (C7515: each of its instructions is waited for); behind a branch none is.
    keep = n >= 0 if WAIT else True
    if VOTE:
        if BY_THREAD:
            keep = _any((most < threshold[:, None]) == 0, BALLOT)
        else:
            keep = _vote(block_max, row_max, vote, scale_log2, first, BALLOT)
        skipped += tl.where(keep, 0, 1)
    if keep:
        if BY_THREAD:
            block_max = tl.max(most, 1)
        new_max = tl.maximum(row_max, block_max)
        base = new_max * scale_log2
        if MASK:
            base = tl.where(new_max == float("-inf"), 0.0, base)
        if not V_AHEAD and not BOXES:
            v = _load(at_v, exists[:, None], MASK)
        p = tl.math.exp2(s * scale_log2 - base[:, None])
        rescale = tl.math.exp2(row_max * scale_log2 - base)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if not V_AHEAD and BOXES:
            v = _load_box(v_box, n, kv_head, keys[3], TILE_N, HEAD_DIM)
        # O += P @ V
        acc = tl.dot(p.to(q.dtype), v, acc * rescale[:, None])
        row_max = new_max
        if BY_THREAD:
            threshold = tl.maximum(row_max + vote[0], vote[1])
    return acc, row_sum, row_max, threshold, skipped


@triton.jit
def _visit_full_blocks(
    state, start, end, blocks, given, how: tl.constexpr, V_AHEAD: tl.constexpr, STAGES: tl.constexpr
):
    """From right to left, those from `start` on, before `end`. blocks: (all, full ones)."""
    n_blocks, n_full = blocks
    for i in tl.range(start, end, num_stages=STAGES):
        first = i + n_blocks == n_full
        state = _visit_block(state, n_full - 1 - i, first, given, (), how, False, V_AHEAD)
    return state


@triton.jit
def _visit_as_skipped(
    state, blocks, given, how: tl.constexpr, STAGES: tl.constexpr, DEMAND_STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """All full blocks. After CHUNK blocks of which most were skipped, values of the next CHUNK are
    fetched on demand, and keys, which need no more room than that, further ahead."""
    done = 0
    on_demand = True
    while done < blocks[1]:
        # The first look comes early: a short prompt has few blocks.
        end = tl.minimum(blocks[1], done + tl.where(done == 0, (CHUNK + 7) // 8, CHUNK))
        before = state[4]
        if on_demand:
            state = _visit_full_blocks(state, done, end, blocks, given, how, False, DEMAND_STAGES)
        else:
            state = _visit_full_blocks(state, done, end, blocks, given, how, True, STAGES)
        on_demand = 2 * (state[4] - before) > end - done
        done = end
    return state


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
    KBoxes,  # tensor maps of k and v in boxes [1, TILE_N, HEAD_DIM], or None; only where PAGE is 0
    VBoxes,
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
    DEMAND_STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    BALLOT: tl.constexpr,  # vote through PTX, which Triton's interpreter cannot read
    WAIT: tl.constexpr,
):
    if VOTE and BALLOT:
        _declare_ballot()
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
    head_64, kv_head_64 = head.to(tl.int64), kv_head.to(tl.int64)
    at_q = Q + at_row * stride_q[0] + head_64 * stride_q[1]
    q = tl.load(at_q[:, None] + d[None, :] * stride_q[2], mask=row_exists[:, None], other=0.0)

    # Keys that any row of the tile sees, and those that all of its rows see.
    key_end, full_end = seqlen_k, seqlen_k
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
        K + kv_head_64 * stride_k[2], V + kv_head_64 * stride_v[2],
        PageTable + request.to(tl.int64) * stride_table, key_start, seqlen_k, stride_k, stride_v,
    )  # fmt: skip
    boxes = (KBoxes, VBoxes, kv_head)
    how: tl.constexpr = (VOTE, PAGE, LISTS, BALLOT, WAIT, TILE_M, TILE_N, HEAD_DIM)
    vote = (row_exists, log2_lambda)
    threshold = tl.zeros([TILE_M], tl.float32)
    # The four threads of a row vote each for itself, on a threshold that only kept blocks move:
    # where the copy engine brings the keys 10% less time than with the row's maximum, else 3% more.
    if VOTE and KBoxes is not None:
        # Of the first visited block a row needs any score; then, unless lambda is 0, none of -inf,
        # though it may have seen nothing else. A row that does not exist needs no block.
        threshold = tl.where(row_exists, float("-inf"), float("inf"))
        least = tl.where(log2_lambda == float("-inf"), float("-inf"), LEAST)
        vote = (log2_lambda / scale_log2, tl.where(row_exists, least, threshold))
    given = (q, scale_log2, keys, boxes, vote)
    state = (
        tl.zeros([TILE_M, HEAD_DIM], tl.float32), tl.zeros([TILE_M], tl.float32),
        tl.full([TILE_M], float("-inf"), tl.float32), threshold, tl.zeros([], tl.int32),
    )  # fmt: skip
    if LISTS:
        counts, blocks, tiles, bits, heads, m_blocks, max_blocks = Lists
        at = (request * heads + head % heads).to(tl.int64) * m_blocks + m
        n_blocks = tl.load(counts + at)
        for i in tl.range(0, n_blocks, num_stages=STAGES):
            n = tl.load(blocks + at * max_blocks + i)
            mask = (reach, bits, tl.load(tiles + at * max_blocks + i))
            state = _visit_block(state, n, i == 0, given, mask, how, True, V_AHEAD)
    else:
        for i in tl.range(0, n_blocks - n_full, num_stages=1):
            state = _visit_block(state, n_blocks - 1 - i, i == 0, given, (reach,), how, True, False)
        full = (n_blocks, n_full)
        if VOTE and DEMAND_STAGES > 0:
            state = _visit_as_skipped(state, full, given, how, STAGES, DEMAND_STAGES, CHUNK)
        else:
            state = _visit_full_blocks(state, 0, n_full, full, given, how, V_AHEAD, STAGES)

    acc, row_sum, row_max, _, skipped = state
    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]  # a row that saw nothing: 0
    lse = (row_max * scale_log2 + _log2_or_ninf(row_sum)) * 0.6931471805599453
    at_out = Out + at_row * stride_out[0] + head_64 * stride_out[1]
    tl.store(
        at_out[:, None] + d[None, :] * stride_out[2],
        out.to(Out.dtype.element_ty),
        mask=row_exists[:, None],
    )
    tl.store(Lse + head_64 * stride_lse + at_row, lse, mask=row_exists)
    if COUNT:
        tl.atomic_add(Counters + kv_head * 2, n_blocks.to(tl.int64))
        tl.atomic_add(Counters + kv_head * 2 + 1, skipped.to(tl.int64))
