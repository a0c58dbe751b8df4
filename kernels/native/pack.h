/* From tensors of any dtype and strides to float32 panels, and back. */
#ifndef BLASST_PACK_H
#define BLASST_PACK_H

#include <string.h>

#include "call.h"
#include "vec.h"

/* Inputs beyond this, NaN and infinity included, could make a score that is not finite. */
#define TAME 0x1p40f

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float widen(const void *data, int64_t at, int dtype) {
    if (dtype == FLOAT32) return ((const float *)data)[at];
    uint32_t half = ((const uint16_t *)data)[at];
    if (dtype == BFLOAT16) return from_bits(half << 16);
    uint32_t size = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
    /* The product makes subnormals right; infinity and NaN have the largest exponent. */
    float x = from_bits(size) * 0x1p112f;
    if (size >= 0x0f800000) x = from_bits(size | 0x7f800000);
    return from_bits(to_bits(x) | sign);
}

INLINE uint16_t narrow_bfloat16(float x) {
    uint32_t bits = to_bits(x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t narrow_float16(float x) {
    uint32_t sign = to_bits(x) >> 16 & 0x8000, bits = to_bits(x) & 0x7fffffff;
    if (bits > 0x7f800000) return 0x7e00;
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) /* subnormal: the sum is rounded to a multiple of 2 ** -24 */
        return (uint16_t)(sign | (to_bits(from_bits(bits) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

INLINE void narrow(void *data, int64_t at, float x, int dtype) {
    if (dtype == FLOAT32)
        ((float *)data)[at] = x;
    else
        ((uint16_t *)data)[at] = dtype == BFLOAT16 ? narrow_bfloat16(x) : narrow_float16(x);
}

/* A matrix inside a tensor; strides in elements. */
struct matrix {
    const void *data;
    int64_t at, row, column, rows, columns;
};

/* Bits of |x|: NaN and infinity are above all numbers. */
INLINE uint32_t magnitude(float x) { return to_bits(x) & 0x7fffffff; }

INLINE int copy_as(int dtype, int64_t column, const struct matrix *from, float *restrict to,
                   int64_t to_row, int64_t to_column, float scale) {
    uint32_t most = 0;
    for (int64_t i = 0; i < from->rows; i++)
        for (int64_t j = 0; j < from->columns; j++) {
            float x = widen(from->data, from->at + i * from->row + j * column, dtype) * scale;
            most = magnitude(x) > most ? magnitude(x) : most;
            to[i * to_row + j * to_column] = x;
        }
    return most < magnitude(TAME);
}

/* to[i, j] = from[i, j] * scale as float32; returns whether all of them are tame. */
static int copy(int dtype, const struct matrix *from, float *to, int64_t to_row, int64_t to_column,
                float scale) {
#define COPY(type)                                                                      \
    from->column != 1 ? copy_as(type, from->column, from, to, to_row, to_column, scale) \
    : to_column == 1  ? copy_as(type, 1, from, to, to_row, 1, scale)                    \
                      : copy_as(type, 1, from, to, to_row, to_column, scale)
    if (dtype == FLOAT32) return COPY(FLOAT32);
    if (dtype == BFLOAT16) return COPY(BFLOAT16);
    return COPY(FLOAT16);
#undef COPY
}

INLINE void put_as(int dtype, int64_t step, const float *restrict from, int64_t count, float scale,
                   void *data, int64_t at) {
    for (int64_t i = 0; i < count; i++) narrow(data, at + i * step, from[i] * scale, dtype);
}

/* data[at + i * step] = from[i] * scale, rounded to the nearest of its dtype. */
static void put(int dtype, const float *from, int64_t count, float scale, const struct tensor *to,
                int64_t at) {
#define PUT(type)                                                      \
    to->dim == 1 ? put_as(type, 1, from, count, scale, to->data, at) \
                 : put_as(type, to->dim, from, count, scale, to->data, at)
    if (dtype == FLOAT32)
        PUT(FLOAT32);
    else if (dtype == BFLOAT16)
        PUT(BFLOAT16);
    else
        PUT(FLOAT16);
#undef PUT
}

/* Tokens [first, first + count) of one kv head of a request. */
struct span {
    const struct request *request;
    int64_t kv_head, first, count;
};

/* The tokens from the span's i-th on that lie at one stride: how many; *at: where they begin. */
INLINE int64_t run_of(const struct call *call, const struct tensor *t, const struct span *span,
                      int64_t i, int64_t *at) {
    const struct request *request = span->request;
    int64_t token = span->first + i, left = span->count - i;
    *at = span->kv_head * t->head;
    if (request->pages == NULL) {
        *at += (request->k_start + token) * t->token;
        return left;
    }
    int64_t inside = token % call->page_size, rest = call->page_size - inside;
    *at += request->pages[token / call->page_size] * t->page + inside * t->token;
    return rest < left ? rest : left;
}

/* Keys as panels [head_dim][PANEL keys side by side], zeros behind; returns whether all are tame. */
static int pack_keys(const struct call *call, const struct span *span, float *to) {
    const struct tensor *k = &call->k;
    int64_t dim = call->head_dim, at, width, run = 0;
    int tame = 1;
    if (span->count % PANEL)
        memset(to + span->count / PANEL * PANEL * dim, 0, (size_t)(PANEL * dim) * sizeof(float));
    for (int64_t i = 0; i < span->count; i += width) {
        run = run_of(call, k, span, i, &at);
        width = PANEL - i % PANEL < run ? PANEL - i % PANEL : run;
        float *panel = to + i / PANEL * PANEL * dim + i % PANEL;
        struct matrix keys = {k->data, at, k->token, k->dim, width, dim};
        struct matrix transposed = {k->data, at, k->dim, k->token, dim, width};
        tame &= k->token == 1 ? copy(call->dtype, &transposed, panel, PANEL, 1, 1.0f)
                              : copy(call->dtype, &keys, panel, 1, PANEL, 1.0f);
    }
    return tame;
}

/* Values as panels [tile_n][PANEL dims side by side]. */
static void pack_values(const struct call *call, const struct span *span, float *to) {
    const struct tensor *v = &call->v;
    for (int64_t i = 0, at, run; i < span->count; i += run) {
        run = run_of(call, v, span, i, &at);
        for (int64_t dim = 0; dim < call->head_dim; dim += PANEL) {
            struct matrix values = {v->data, at + dim * v->dim, v->token, v->dim, run, PANEL};
            copy(call->dtype, &values, to + dim * call->tile_n + i * PANEL, PANEL, 1, 1.0f);
        }
    }
}

#endif
