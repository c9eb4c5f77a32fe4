// ops/cuda/warpgroup.cuh on the emulated GPU: products happen when they are asked for.
#pragma once

#include <cstddef>

#include "ops/cuda/gpu/mma.cuh"

namespace lkv::cuda {

constexpr bool has_warpgroup_products = true;

class Operand {
public:
    explicit Operand(uint32_t shared_address, uint32_t next_rows = 256, uint32_t next_channels = 128)
        : address_(shared_address), next_rows_(next_rows), next_channels_(next_channels) {}
    uint64_t at(uint32_t bytes) const {
        if ((address_ + bytes | next_rows_ | next_channels_) % 16 != 0) emulated::fail("operands at multiples of 16");
        return uint64_t{address_ + bytes} | uint64_t{next_rows_} << 32 | uint64_t{next_channels_} << 48;
    }

private:
    uint32_t address_, next_rows_, next_channels_;  // strides below 2^16
};

inline void warpgroup_begin() {
    emulated::needs_hopper("a GPU with products by warpgroups");
    emulated::exchange(0);
}
inline void warpgroup_commit() {}
inline void warpgroup_wait_all() {}
inline void warpgroup_wait_all(uint32_t (&)[2][2][4]) {}
inline void warpgroup_wait_all(uint32_t (&)[2][4]) {}
template <int n>
void warpgroup_wait(float (&)[n]) {
    emulated::exchange(0);
}

template <int n>
void warpgroup_wait_but() {}
template <int n>
void hold(float (&)[n]) {
    emulated::exchange(0);
}
template <int n>
void hold(uint32_t (&)[n][4]) {}

// COLUMNS: b lies as its columns come.
template <bool COLUMNS, int n_d>
void multiply(float (&d)[n_d], const uint32_t (&a)[4], uint64_t b, bool add) {
    const auto* const at = static_cast<const uint8_t*>(emulated::at_address(static_cast<uint32_t>(b)));
    const auto next_rows = static_cast<ptrdiff_t>(b >> 32 & 0xffff);
    const auto next_channels = static_cast<ptrdiff_t>(b >> 48);
    for (int n = 0; n < n_d / 4; n++) {
        float c[4];
        for (int e = 0; e < 4; e++) c[e] = add ? d[4 * n + e] : 0.0f;
        const auto pair = [&](int k) {  // channels k and k + 1 of column g
            const auto element = [&](int i) {
                const int column = emulated::lane() / 4;
                const int inside = COLUMNS ? column * 16 + i % 8 * 2 : i % 8 * 16 + column * 2;
                return uint32_t{
                    *reinterpret_cast<const uint16_t*>(at + n * next_rows + i / 8 * next_channels + inside)};
            };
            return element(k) | element(k + 1) << 16;
        };
        const int first = emulated::lane() % 4 * 2;
        mma(c, a, pair(first), pair(first + 8));
        for (int e = 0; e < 4; e++) d[4 * n + e] = c[e];
    }
}

template <int n>
void warpgroup_mma(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool add) {
    multiply<false>(d, a, b, add);
}
template <int n>
void warpgroup_mma_columns(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool add) {
    multiply<true>(d, a, b, add);
}

}  // namespace lkv::cuda
