/* The micro-kernels: up to ROWS rows times one panel, all sums in registers. */
#ifndef BLASST_MATMUL_H
#define BLASST_MATMUL_H

#include "vec.h"

/* c += a[rows, depth] @ panel[depth, PANEL]; `rows` is a constant where this is inlined. */
INLINE void multiply(int rows, const float *a, int64_t a_row, const float *panel, int64_t depth,
                     vec c[ROWS][COLUMNS]) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
        vec b[COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) b[j] = load(panel + k * PANEL + j * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vec x = splat(a[r * a_row + k]);
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) c[r][j] += x * b[j];
        }
    }
}

INLINE void score_rows(int rows, const float *q, int64_t dim, const float *panel, float *scores,
                       int64_t width, vec *peak) {
    vec c[ROWS][COLUMNS] = {0};
    multiply(rows, q, dim, panel, dim, c);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) {
            store(scores + r * width + j * LANES, c[r][j]);
            peak[r] = vmax(peak[r], c[r][j]);
        }
}

INLINE void add_rows(int rows, const float *p, int64_t width, const float *panel, int64_t depth,
                     float *acc, int64_t dim, const float *scale) {
    vec c[ROWS][COLUMNS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++)
            c[r][j] = load(acc + r * dim + j * LANES) * splat(scale[r]);
    multiply(rows, p, width, panel, depth, c);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) store(acc + r * dim + j * LANES, c[r][j]);
}

#define FOR_ROWS(rows, CALL) \
    switch (rows) {          \
    case 6: CALL(6); break;  \
    case 5: CALL(5); break;  \
    case 4: CALL(4); break;  \
    case 3: CALL(3); break;  \
    case 2: CALL(2); break;  \
    default: CALL(1);        \
    }

/* S = Q @ K.T: q [rows, dim] times one panel of keys, into scores [rows, width]. peak: the largest
   score of each row, of each lane by itself. */
static void score_panel(int rows, const float *q, int64_t dim, const float *panel, float *scores,
                        int64_t width, vec *peak) {
#define CALL(n) score_rows(n, q, dim, panel, scores, width, peak)
    FOR_ROWS(rows, CALL)
#undef CALL
}

/* O = O * scale + P @ V: p [rows, depth] (row stride width), one panel of values. */
static void add_panel(int rows, const float *p, int64_t width, const float *panel, int64_t depth,
                      float *acc, int64_t dim, const float *scale) {
#define CALL(n) add_rows(n, p, width, panel, depth, acc, dim, scale)
    FOR_ROWS(rows, CALL)
#undef CALL
}

#endif
