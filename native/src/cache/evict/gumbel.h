// Noise of a score: a Gumbel(0, 1) number that layer, head and both positions decide, whatever the ubatch, the thread and the device.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define LKV_ANYWHERE __host__ __device__
#else
#define LKV_ANYWHERE
#endif

namespace lkv {

// Steps of splitmix64 (Steele et al. 2014).
LKV_ANYWHERE inline uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
    x = (x ^ x >> 27) * 0x94D049BB133111EBU;
    return x ^ x >> 31;
}

LKV_ANYWHERE inline uint64_t noise_seed(int layer, int head, int32_t q_pos) {
    const uint64_t place = static_cast<uint64_t>(layer) << 32 | static_cast<uint32_t>(head);
    return mixed(mixed(place) + static_cast<uint32_t>(q_pos));
}

LKV_ANYWHERE inline float gumbel(uint64_t seed, int32_t pos) {
    const auto bits = static_cast<float>(mixed(seed + static_cast<uint32_t>(pos)) >> 41);  // 23: the sum is exact
    return -logf(-logf((bits + 0.5F) * 0x1p-23F));
}

}  // namespace lkv
