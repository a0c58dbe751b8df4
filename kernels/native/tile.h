/* The running softmax of one head's tile of query rows over one block of keys. */
#ifndef BLASST_TILE_H
#define BLASST_TILE_H

#include <float.h>
#include <math.h>

#include "matmul.h"
#include "pack.h"

/* The running max of a row that has seen no key. Finite: minus it, a hidden score stays -inf. */
#define NOTHING_SEEN (-FLT_MAX)

/* One head's rows: q scaled so that scores are in log2 units, acc and sum relative to 2 ** top.
   sum: each lane by itself. A row whose scores are not finite has the top and the sum NaN. */
struct head_rows {
    float *q, *acc, *top;
    vec *sum;
    int tame, started;
};

/* What a thread works in. scores: [tile_m, width]; the others: one a row, and up to a whole vector
   more that vote skip. */
struct scratch {
    float *memory, *scores, *block_top, *scale;
    vec *peak;
    struct head_rows *heads;
};

/* Keys of one block. Causal: the tile's first row sees this many of them (below 0: none), each
   further row one more. visible: bytes [rows, keys], row stride mask_row, or NULL = all. */
struct block {
    const float *keys;
    int64_t count, first_row_sees, mask_row;
    int causal, tame;
    const uint8_t *visible;
};

/* scores: [rows, width], which is tile_n rounded up to whole panels. */
struct shape {
    int64_t rows, dim, tile_n, width;
};

INLINE int64_t sees(const struct block *block, int64_t row) {
    int64_t keys = block->causal ? block->first_row_sees + row : block->count;
    return keys < 0 ? 0 : keys < block->count ? keys : block->count;
}

INLINE int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }

/* The larger one; NaN where the old one is NaN. */
INLINE vec raised(vec top, vec block_top) {
    ivec larger = block_top > top;
    return (vec)(((ivec)block_top & larger) | ((ivec)top & ~larger));
}

static void hide(const struct shape *shape, const struct block *block, int64_t row, float *scores,
                 vec *peak) {
    for (int64_t j = sees(block, row); j < shape->width; j++) scores[j] = -INFINITY;
    if (block->visible != NULL)
        for (int64_t j = 0; j < sees(block, row); j++)
            if (!block->visible[row * block->mask_row + j]) scores[j] = -INFINITY;
    *peak = splat(-INFINITY);
    for (int64_t j = 0; j < shape->width; j += LANES) *peak = vmax(*peak, load(scores + j));
}

/* A row that sees NaN or +inf becomes NaN, and never votes skip from then on. */
static void mark_wild(const struct shape *shape, struct head_rows *head, const struct scratch *own) {
    for (int64_t r = 0; r < shape->rows; r++)
        for (int64_t j = 0; j < shape->width; j++)
            if (!(own->scores[r * shape->width + j] < INFINITY)) {
                head->top[r] = NAN;
                head->sum[r] = splat(NAN);
            }
}

/* Scores of the block, and block_top, the largest of each row. */
static void score(const struct shape *shape, const struct block *block, struct head_rows *head,
                 const struct scratch *own) {
    for (int64_t r = 0; r < shape->rows; r++) own->peak[r] = splat(-INFINITY);
    for (int64_t panel = 0; panel < shape->width; panel += PANEL)
        for (int64_t r = 0; r < shape->rows; r += ROWS) {
            int64_t rows = at_most(ROWS, shape->rows - r);
            if (panel < sees(block, r + rows - 1))
                score_panel((int)rows, head->q + r * shape->dim, shape->dim,
                            block->keys + panel * shape->dim, own->scores + r * shape->width + panel,
                            shape->width, own->peak + r);
        }
    for (int64_t r = 0; r < shape->rows; r++)
        if (block->visible != NULL || sees(block, r) < shape->width)
            hide(shape, block, r, own->scores + r * shape->width, own->peak + r);
    if (!block->tame || !head->tame) mark_wild(shape, head, own);
    for (int64_t r = 0; r < shape->rows; r++) own->block_top[r] = largest(own->peak[r]);
}

/* Whether every row votes skip. NaN does not: no comparison with it is true. */
static int all_vote_skip(const struct shape *shape, const struct head_rows *head,
                         const struct scratch *own, float log2_lambda) {
    ivec keep = {0};
    for (int64_t r = 0; r < shape->rows; r += LANES) {
        vec top = load(head->top + r), block_top = load(own->block_top + r);
        keep |= ~(block_top - raised(top, block_top) < splat(log2_lambda));
    }
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= keep[i];
    return !any;
}

/* The running max takes the block in; scale: what sums relative to the old one become. */
static void raise_tops(const struct shape *shape, struct head_rows *head,
                       const struct scratch *own) {
    for (int64_t r = 0; r < shape->rows; r += LANES) {
        vec top = load(head->top + r), next = raised(top, load(own->block_top + r));
        store(own->scale + r, exp2_vec(top - next));
        store(head->top + r, next);
    }
}

/* P = 2 ** (S - top) and its row sum, in whole panels: what no row sees is -inf. */
INLINE void weigh(float *scores, int64_t columns, float top, float scale, vec *sum) {
    vec shift = splat(top), part[COLUMNS] = {*sum * splat(scale)};
    for (int64_t panel = 0; panel < columns; panel += PANEL)
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) {
            vec p = exp2_vec(load(scores + panel + j * LANES) - shift);
            store(scores + panel + j * LANES, p);
            part[j] += p;
        }
#pragma GCC unroll 4
    for (int j = 1; j < COLUMNS; j++) part[0] += part[j];
    *sum = part[0];
}

/* The block's part in the softmax: O += P @ V. */
static void accumulate(const struct shape *shape, const struct block *block,
                       struct head_rows *head, const struct scratch *own, const float *values) {
    raise_tops(shape, head, own);
    for (int64_t r = 0; r < shape->rows; r += ROWS) {
        int64_t rows = at_most(ROWS, shape->rows - r), depth = sees(block, r + rows - 1);
        float *p = own->scores + r * shape->width;
        for (int64_t i = 0; i < rows; i++)
            weigh(p + i * shape->width, depth, head->top[r + i], own->scale[r + i],
                  head->sum + r + i);
        for (int64_t d = 0; d < shape->dim; d += PANEL)
            add_panel((int)rows, p, shape->width, values + d * shape->tile_n, depth,
                      head->acc + r * shape->dim + d, shape->dim, own->scale + r);
    }
}

#endif
