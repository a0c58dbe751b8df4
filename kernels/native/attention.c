/* Attention with skipped blocks: threads take tiles of query rows from one list, and pack each
   block of keys and values when the first of them needs it. No global state. */
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tile.h"

enum { UNTOUCHED, BUSY, READY, WILD };

/* One kv head of a request: its packed blocks, from its first tile to its last. states: two a
   block, keys and values. */
struct kv {
    float *blocks;
    _Atomic uint8_t *states;
    int64_t open;
};

struct work {
    struct call call;
    struct kv *kv;
    int64_t block_floats, width, most_heads;
    atomic_long next;
    atomic_flag lock;
    atomic_int failed;
};

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static void *aligned(int64_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, (size_t)round_up(bytes, 64)) ? NULL : memory;
}

static void acquire(struct work *work) {
    while (atomic_flag_test_and_set_explicit(&work->lock, memory_order_acquire)) sched_yield();
}

static void release(struct work *work) {
    atomic_flag_clear_explicit(&work->lock, memory_order_release);
}

static struct kv *kv_of(struct work *work, const struct item *item) {
    int64_t kv_head = item->head / work->call.group_size;
    return work->kv + item->request * (int64_t)work->call.num_kv_heads + kv_head;
}

/* The packed blocks' memory; 0 when there is none. */
static int open_kv(struct work *work, const struct item *item) {
    struct kv *kv = kv_of(work, item);
    int64_t keys = work->call.requests[item->request].seqlen_k;
    int64_t blocks = round_up(keys, work->call.tile_n) / work->call.tile_n;
    acquire(work);
    if (kv->blocks == NULL) {
        kv->blocks = aligned(blocks * work->block_floats * (int64_t)sizeof(float));
        kv->states = calloc((size_t)blocks, 2);
    }
    int done = kv->blocks != NULL && kv->states != NULL;
    release(work);
    return done;
}

static void free_kv(struct kv *kv) {
    free(kv->blocks);
    free((void *)kv->states);
    kv->blocks = NULL;
    kv->states = NULL;
}

static void close_kv(struct work *work, const struct item *item) {
    struct kv *kv = kv_of(work, item);
    acquire(work);
    int last = --kv->open == 0;
    release(work);
    if (last) free_kv(kv);
}

/* Whether the caller has to pack; else the block is packed when this returns. */
static int claims(_Atomic uint8_t *state) {
    uint8_t seen = UNTOUCHED;
    if (atomic_compare_exchange_strong(state, &seen, BUSY)) return 1;
    while (atomic_load_explicit(state, memory_order_acquire) == BUSY) sched_yield();
    return 0;
}

static const float *keys_of(struct work *work, struct kv *kv, const struct span *span, int *tame) {
    int64_t n = span->first / work->call.tile_n;
    float *keys = kv->blocks + n * work->block_floats;
    if (claims(kv->states + 2 * n))
        atomic_store_explicit(kv->states + 2 * n,
                              pack_keys(&work->call, span, keys) ? READY : WILD,
                              memory_order_release);
    *tame = atomic_load_explicit(kv->states + 2 * n, memory_order_acquire) == READY;
    return keys;
}

static const float *values_of(struct work *work, struct kv *kv, const struct span *span) {
    int64_t n = span->first / work->call.tile_n;
    float *values = kv->blocks + n * work->block_floats + work->width * work->call.head_dim;
    if (claims(kv->states + 2 * n + 1)) {
        pack_values(&work->call, span, values);
        atomic_store_explicit(kv->states + 2 * n + 1, READY, memory_order_release);
    }
    return values;
}

/* Scratch for `heads` heads at once; NULL when there is no memory. */
static struct scratch *new_scratch(const struct work *work, int64_t heads) {
    int64_t rows = round_up(work->call.tile_m, LANES), matrix = rows * work->call.head_dim;
    int64_t head_floats = 2 * matrix + rows + rows * LANES;
    int64_t floats = rows * work->width + 2 * rows + rows * LANES + heads * head_floats;
    struct scratch *own = calloc(1, sizeof *own);
    if (own == NULL) return NULL;
    float *at = own->memory = aligned(floats * (int64_t)sizeof(float));
    own->heads = calloc((size_t)heads, sizeof *own->heads);
    if (at == NULL || own->heads == NULL) {
        free(own->memory);
        free(own->heads);
        free(own);
        return NULL;
    }
    memset(at, 0, (size_t)floats * sizeof(float));
    own->scores = at, at += rows * work->width;
    own->peak = (vec *)at, at += rows * LANES;
    own->block_top = at, at += rows;
    own->scale = at, at += rows;
    for (int64_t h = 0; h < heads; h++) {
        struct head_rows *head = own->heads + h;
        head->q = at, at += matrix;
        head->acc = at, at += matrix;
        head->sum = (vec *)at, at += rows * LANES;
        head->top = at, at += rows;
    }
    return own;
}

static void free_scratch(struct scratch *own) {
    if (own == NULL) return;
    free(own->memory);
    free(own->heads);
    free(own);
}

/* q times the scale, and empty sums. */
static void start_rows(const struct call *call, int64_t first, int64_t rows, int64_t head,
                       struct head_rows *to) {
    const struct tensor *q = &call->q;
    struct matrix from = {q->data, first * q->token + head * q->head, q->token, q->dim, rows,
                          call->head_dim};
    to->tame = copy(call->dtype, &from, to->q, call->head_dim, 1, call->scale);
    to->started = 0;
    memset(to->acc, 0, (size_t)(rows * call->head_dim) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) to->sum[r] = splat(0);
    for (int64_t r = 0; r < round_up(rows, LANES); r++) to->top[r] = NOTHING_SEEN;
}

static void finish_rows(const struct call *call, int64_t first, int64_t rows, int64_t head,
                        const struct head_rows *from) {
    const struct tensor *out = &call->out;
    for (int64_t r = 0; r < rows; r++) {
        float sum = total(from->sum[r]), inverse = sum == 0 ? 0 : 1 / sum;
        int64_t at = (first + r) * out->token + head * out->head;
        put(call->dtype, from->acc + r * call->head_dim, call->head_dim, inverse, out, at);
        call->lse[head * call->total_q + first + r] =
            sum == 0 ? -INFINITY : (from->top[r] + log2f(sum)) * 0.69314718055994531f;
    }
}

/* Keys that query rows before `row_end` can reach. */
static int64_t key_end(const struct call *call, const struct request *request, int64_t row_end) {
    if (!call->causal) return request->seqlen_k;
    int64_t end = request->seqlen_k - request->seqlen_q + row_end;
    return end < 0 ? 0 : end < request->seqlen_k ? end : request->seqlen_k;
}

static int in_map(const struct call *call, const struct request *request, const uint8_t *map,
                  const struct item *item, int64_t head, int64_t n) {
    int64_t n_blocks = round_up(request->seqlen_k, call->tile_n) / call->tile_n;
    return map[(item->head + head) * request->map_head + item->m_block * n_blocks + n];
}

static int attend(struct work *work, const struct item *item, const struct mask *mask,
                  struct scratch *own) {
    const struct call *call = &work->call;
    const struct request *request = call->requests + item->request;
    int64_t tile_n = call->tile_n, row = (int64_t)item->m_block * call->tile_m;
    struct shape shape = {at_most(call->tile_m, request->seqlen_q - row), call->head_dim, tile_n,
                          work->width};
    int64_t visited = 0, skipped = 0, q_row = request->q_start + row;
    if (!open_kv(work, item)) return 0;
    struct kv *kv = kv_of(work, item);
    for (int64_t h = 0; h < item->num_heads; h++)
        start_rows(call, q_row, shape.rows, item->head + h, own->heads + h);
    for (int64_t r = shape.rows; r < round_up(shape.rows, LANES); r++) own->block_top[r] = -INFINITY;
    int64_t end = key_end(call, request, row + shape.rows);
    for (int64_t n = round_up(end, tile_n) / tile_n - 1; n >= 0; n--) {
        struct span span = {request, item->head / call->group_size, n * tile_n,
                            at_most(tile_n, request->seqlen_k - n * tile_n)};
        for (int64_t h = 0; h < item->num_heads; h++) {
            struct head_rows *head = own->heads + h;
            if (request->visited != NULL && !in_map(call, request, request->visited, item, h, n))
                continue;
            struct block block = {.count = span.count,
                                  .causal = call->causal,
                                  .first_row_sees = request->seqlen_k - request->seqlen_q + row +
                                                    1 - span.first};
            block.keys = keys_of(work, kv, &span, &block.tame);
            if (mask != NULL && in_map(call, request, request->partial, item, h, n)) {
                block.visible = mask->visible + h * mask->head + span.first - mask->first_key;
                block.mask_row = mask->row;
            }
            score(&shape, &block, head, own);
            visited++;
            if (head->started && all_vote_skip(&shape, head, own, request->log2_lambda)) {
                skipped++;
                continue;
            }
            head->started = 1;
            accumulate(&shape, &block, head, own, values_of(work, kv, &span));
        }
    }
    for (int64_t h = 0; h < item->num_heads; h++)
        finish_rows(call, q_row, shape.rows, item->head + h, own->heads + h);
    if (call->counters != NULL) {
        int64_t *pair = call->counters + 2 * (item->head / call->group_size);
        __atomic_fetch_add(pair, visited, __ATOMIC_RELAXED);
        __atomic_fetch_add(pair + 1, skipped, __ATOMIC_RELAXED);
    }
    close_kv(work, item);
    return 1;
}

/* Bits of a vector, for reports. */
int blasst_vector_bits(void) { return 32 * LANES; }

/* The state of a call, which must outlive it; NULL when there is no memory. */
struct work *blasst_open(const struct call *call) {
    struct work *work = calloc(1, sizeof *work);
    int64_t heads = call->num_requests * call->num_kv_heads;
    if (work == NULL) return NULL;
    work->call = *call;
    work->kv = calloc((size_t)(heads ? heads : 1), sizeof *work->kv);
    work->width = round_up(call->tile_n, PANEL);
    work->block_floats = (work->width + call->tile_n) * call->head_dim;
    atomic_flag_clear(&work->lock);
    if (work->kv == NULL) {
        free(work);
        return NULL;
    }
    for (int64_t i = 0; i < call->total_q * call->num_kv_heads * call->group_size; i++) call->lse[i] = -INFINITY;
    for (int64_t i = 0; i < call->num_items; i++) {
        kv_of(work, call->items + i)->open++;
        if (work->most_heads < call->items[i].num_heads) work->most_heads = call->items[i].num_heads;
    }
    return work;
}

/* Works on the list until it is empty; any number of threads may. 0: there was no memory. */
int blasst_drain(struct work *work) {
    struct scratch *own = new_scratch(work, work->most_heads);
    if (own == NULL) atomic_store(&work->failed, 1);
    while (!atomic_load(&work->failed)) {
        long i = atomic_fetch_add(&work->next, 1);
        if (i >= work->call.num_items) break;
        if (!attend(work, work->call.items + i, NULL, own)) atomic_store(&work->failed, 1);
    }
    free_scratch(own);
    return !atomic_load(&work->failed);
}

/* Works on one item whose mask the caller made. 0: there was no memory. */
int blasst_item(struct work *work, int64_t i, const struct mask *mask) {
    struct scratch *own = new_scratch(work, work->call.items[i].num_heads);
    int done = own != NULL && attend(work, work->call.items + i, mask, own);
    free_scratch(own);
    return done;
}

void blasst_close(struct work *work) {
    int64_t heads = work->call.num_requests * work->call.num_kv_heads;
    for (int64_t i = 0; i < heads; i++) free_kv(work->kv + i);
    free(work->kv);
    free(work);
}

/* x = 2 ** x for count numbers, a multiple of 16, aligned to 64 bytes; for tests. */
void blasst_exp2(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, exp2_vec(load(x + i)));
}
