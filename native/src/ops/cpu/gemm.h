// One register-blocked f32 matrix product serves every step: scores, weighted values, rebuilding K and V, the last B_v.
//
//   C[m, n] (+)= Σ_k A[m, k] · B[k, n]
//
// B and C are cut in panels of 16 columns, so a tile that a product writes is the layout that the next one reads:
//   A[m, k] at a[m] + k · a_step                                     rows by pointer: queries of scattered tokens
//   B[k, n] at b.data + (n / 16) · b.panel + k · b.row + n % 16
//   C[m, n] at c[m] + (n / 16) · c_panel + n % 16
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/simd.h"

namespace lkv {

constexpr int panel_width = 2 * lanes;

struct Panels {
    const float* data;
    ptrdiff_t row;    // from k to k + 1
    ptrdiff_t panel;  // from n to n + 16
};

// M rows by P panels: 2·M·P accumulators live in registers (at most 12 of AVX2's 16).
template <int M, int P>
__attribute__((noinline)) void multiply_block(int n_k, const float* const* a, ptrdiff_t a_step, Panels b,
                                              float* const* c, ptrdiff_t c_panel, bool accumulate) {
    f32x8 acc[M][2 * P];
    LKV_UNROLL
    for (int m = 0; m < M; m++) {
        LKV_UNROLL
        for (int v = 0; v < 2 * P; v++) {
            acc[m][v] = accumulate ? load8(c[m] + v / 2 * c_panel + v % 2 * lanes) : f32x8{};
        }
    }
    const float* row[M];
    LKV_UNROLL
    for (int m = 0; m < M; m++) row[m] = a[m];
    const float* bk = b.data;
    for (int k = 0; k < n_k; k++, bk += b.row) {
        f32x8 column[2 * P];
        LKV_UNROLL
        for (int v = 0; v < 2 * P; v++) {
            column[v] = load8(bk + v / 2 * b.panel + v % 2 * lanes);
            keep_in_register(column[v]);
        }
        LKV_UNROLL
        for (int m = 0; m < M; m++) {
            const f32x8 x = splat(row[m][k * a_step]);
            LKV_UNROLL
            for (int v = 0; v < 2 * P; v++) acc[m][v] = fma8(x, column[v], acc[m][v]);
        }
    }
    LKV_UNROLL
    for (int m = 0; m < M; m++) {
        LKV_UNROLL
        for (int v = 0; v < 2 * P; v++) store8(c[m] + v / 2 * c_panel + v % 2 * lanes, acc[m][v]);
    }
}

// The last n_rows < 6 rows: few rows take several panels at a time, so that enough accumulators hide the FMA latency.
template <int P>
LKV_INLINE void multiply_rest(int n_rows, int n_k, const float* const* a, ptrdiff_t a_step, Panels b, float* const* c,
                              ptrdiff_t c_panel, bool accumulate) {
    switch (n_rows) {
        case 1:
            return multiply_block<1, P>(n_k, a, a_step, b, c, c_panel, accumulate);
        case 2:
            return multiply_block<2, P>(n_k, a, a_step, b, c, c_panel, accumulate);
        case 3:
            return multiply_block<3, P>(n_k, a, a_step, b, c, c_panel, accumulate);
        case 4:
            return multiply_block<4, 1>(n_k, a, a_step, b, c, c_panel, accumulate);
        case 5:
            return multiply_block<5, 1>(n_k, a, a_step, b, c, c_panel, accumulate);
    }
}

// Only whole panels of B and C are touched, except that the last n_columns % 16 columns are done one by one.
inline void multiply(int n_rows, int n_columns, int n_k, const float* const* a, ptrdiff_t a_step, Panels b,
                     float* const* c, ptrdiff_t c_panel, bool accumulate) {
    constexpr int block_rows = 6;
    constexpr int block_k = 256;  // a panel of 256 rows is 16 KiB, half of L1
    const int n_panels = n_columns / panel_width;
    float* c_at[block_rows];
    const float* a_at[block_rows];
    for (int k0 = 0; k0 == 0 || k0 < n_k; k0 += block_k) {  // n_k = 0 writes zeros
        const int nk = std::min(block_k, n_k - k0);
        const bool add = accumulate || k0 > 0;
        for (int p = 0; p < n_panels;) {
            const int rest = n_rows % block_rows;
            const Panels bp{b.data + k0 * b.row + p * b.panel, b.row, b.panel};
            // Three rows or fewer take two panels at once; otherwise one panel serves all row blocks.
            const int at_once = n_rows <= 3 && p + 2 <= n_panels ? 2 : 1;
            int m = 0;
            for (; m + block_rows <= n_rows; m += block_rows) {
                for (int i = 0; i < block_rows; i++) {
                    a_at[i] = a[m + i] + k0 * a_step;
                    c_at[i] = c[m + i] + p * c_panel;
                }
                multiply_block<block_rows, 1>(nk, a_at, a_step, bp, c_at, c_panel, add);
            }
            for (int i = 0; i < rest; i++) {
                a_at[i] = a[m + i] + k0 * a_step;
                c_at[i] = c[m + i] + p * c_panel;
            }
            if (at_once == 2) {
                multiply_rest<2>(rest, nk, a_at, a_step, bp, c_at, c_panel, add);
            } else {
                multiply_rest<1>(rest, nk, a_at, a_step, bp, c_at, c_panel, add);
            }
            p += at_once;
        }
    }
    for (int m = 0; m < n_rows; m++) {
        for (int i = 0; i < n_columns % panel_width; i++) {
            const float* column = b.data + n_panels * b.panel + i;
            float* out = c[m] + n_panels * c_panel + i;
            float s = accumulate ? *out : 0.0f;
            for (int k = 0; k < n_k; k++) s += a[m][k * a_step] * column[k * b.row];
            *out = s;
        }
    }
}

}  // namespace lkv
