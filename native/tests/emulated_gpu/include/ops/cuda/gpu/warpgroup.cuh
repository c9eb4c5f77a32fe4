// ops/cuda/warpgroup.cuh on the emulated GPU: products happen when they are asked for.
#pragma once

#include <cstddef>

#include "ops/cuda/gpu/mma.cuh"

namespace lkv::cuda {

constexpr bool has_warpgroup_products = true;

class Operand {
public:
    explicit Operand(uint32_t shared_address, uint32_t next_rows = 256)
        : address_(shared_address), next_rows_(next_rows) {}
    uint64_t at(uint32_t bytes) const { return uint64_t{address_ + bytes} | uint64_t{next_rows_} << 32; }

    // Row (or column) `row`, channel k.
    static float element(uint64_t operand, int row, int k) {
        const auto* const at = static_cast<const uint8_t*>(emulated::at_address(static_cast<uint32_t>(operand)));
        const auto next_rows = static_cast<ptrdiff_t>(operand >> 32);
        return __half2float(
            *reinterpret_cast<const __half*>(at + row / 8 * next_rows + k / 8 * 128 + row % 8 * 16 + k % 8 * 2));
    }

private:
    uint32_t address_, next_rows_;
};

inline void warpgroup_begin() { emulated::exchange(0); }
inline void warpgroup_commit() {}
inline void warpgroup_wait_all() {}
inline void warpgroup_wait_all(uint32_t (&)[2][2][4]) {}
inline void warpgroup_wait_all(uint32_t (&)[2][4]) {}
template <int n>
void warpgroup_wait(float (&)[n]) {
    emulated::exchange(0);
}

template <int n>
void warpgroup_mma(float (&d)[n], uint64_t a, uint64_t b, bool add) {
    const int lane = emulated::lane();
    const int first_row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    float rows[2][16];
    for (int h = 0; h < 2; h++) {
        for (int k = 0; k < 16; k++) rows[h][k] = Operand::element(a, first_row + 8 * h, k);
    }
    for (int i = 0; i < n; i += i % 2 == 0 ? 1 : 3) {  // elements 0 and 1 of each four, with those of row + 8
        double sum[2] = {add ? d[i] : 0.0, add ? d[i + 2] : 0.0};
        for (int k = 0; k < 16; k++) {
            const double x = Operand::element(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
            sum[0] += rows[0][k] * x;
            sum[1] += rows[1][k] * x;
        }
        d[i] = static_cast<float>(sum[0]);
        d[i + 2] = static_cast<float>(sum[1]);
    }
}

inline void warpgroup_mma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
    const auto* const at = static_cast<const uint8_t*>(emulated::at_address(static_cast<uint32_t>(b)));
    const auto next_rows = static_cast<ptrdiff_t>(b >> 32);
    for (int n = 0; n < 16; n++) {
        float c[4];
        for (int e = 0; e < 4; e++) c[e] = add ? d[4 * n + e] : 0.0f;
        const auto pair = [&](int k) {  // channels k and k + 1 of column g
            const auto element = [&](int i) {
                const int column = emulated::lane() / 4;
                return uint32_t{
                    *reinterpret_cast<const uint16_t*>(at + n * next_rows + i / 8 * 128 + i % 8 * 16 + column * 2)};
            };
            return element(k) | element(k + 1) << 16;
        };
        const int first = emulated::lane() % 4 * 2;
        mma(c, a, pair(first), pair(first + 8));
        for (int e = 0; e < 4; e++) d[4 * n + e] = c[e];
    }
}

inline void store_four(void* at, const uint32_t (&x)[4]) {
    const uint64_t* const rows = emulated::exchange(emulated::word_of(at));
    const int lane = emulated::lane();
    for (int m = 0; m < 4; m++) emulated::from_word<uint32_t*>(rows[8 * m + lane / 4])[lane % 4] = x[m];
    emulated::exchange(0);
}

}  // namespace lkv::cuda
