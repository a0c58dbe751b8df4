/* What the caller hands over. Strides count elements; binding.py mirrors these structs. */
#ifndef BLASST_CALL_H
#define BLASST_CALL_H

#include <stdint.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* A tensor [page, token, head, dim]; ragged rows are one page. */
struct tensor {
    void *data;
    int64_t page, token, head, dim;
};

/* Query rows [q_start, q_start + seqlen_q) see keys [k_start, k_start + seqlen_k), or, where `pages`
   is given, the keys on these pages. visited, partial: bytes [num_heads or 1, m_blocks, n_blocks],
   NULL = all, none; map_head: bytes from one head to the next. */
struct request {
    int64_t q_start, seqlen_q, seqlen_k, k_start;
    const int32_t *pages;
    const uint8_t *visited, *partial;
    int64_t map_head;
    float log2_lambda; /* -inf: never skips */
    int32_t unused;
};

/* One piece of work: a tile of query rows of some heads that share a kv head. */
struct item {
    int32_t request, head, num_heads, m_block;
};

/* lse: [num_heads, total_q]. counters: [num_kv_heads, 2], added to, or NULL.
   scale: from q . k to scores in log2 units. */
struct call {
    struct tensor q, k, v, out;
    float *lse;
    int64_t *counters;
    const struct request *requests;
    const struct item *items;
    int64_t num_items, num_requests, total_q;
    int32_t dtype, group_size, num_kv_heads, head_dim, tile_m, tile_n, page_size, causal;
    float scale;
    int32_t unused;
};

/* What a mask lets the rows of one item see: bytes [num_heads, rows, keys from first_key on]. */
struct mask {
    const uint8_t *visible;
    int64_t head, row, first_key;
};

#endif
