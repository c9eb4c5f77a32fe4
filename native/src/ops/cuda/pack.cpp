#include "ops/cuda/pack.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

std::vector<uint32_t> pack_k_b(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                               const std::vector<int>& dims) {
    const auto at = [&](int head, int channel, int d) {
        return channel < rank && d >= 0 ? half_saturate(k_b[(ptrdiff_t{head} * rank + channel) * head_dim + d])
                                        : uint16_t{0};
    };
    // Tile t of eight dimensions, step s of block b: lane 4g + c has dimension g, channels of pair s or s + 4 of chunk c.
    const auto word = [&](int head, int b, size_t t, int s, int lane, int of) {
        const int channel = 64 * b + 16 * (lane % 4) + pair_channel(s + 4 * of);
        const int d = dims[8 * t + static_cast<size_t>(lane / 4)];
        return at(head, channel, d) | static_cast<uint32_t>(at(head, channel + 2, d)) << 16;
    };
    std::vector<uint32_t> out;
    out.reserve(static_cast<size_t>(n_kv) * static_cast<size_t>(blocks) * 64 * dims.size() / 2);
    for (int j = 0; j < n_kv; j++) {
        for (int b = 0; b < blocks; b++) {
            for (size_t t = 0; t < dims.size() / 8; t++) {
                for (int s = 0; s < 4; s++) {
                    for (int lane = 0; lane < 32; lane++) {
                        for (int of = 0; of < 2; of++) out.push_back(word(j, b, t, s, lane, of));
                    }
                }
            }
        }
    }
    return out;
}

std::vector<uint16_t> pack_rows(const float* b, size_t n) {
    std::vector<uint16_t> out(n);
    std::transform(b, b + n, out.begin(), half_saturate);
    return out;
}

std::vector<uint64_t> pack_phases(const float* freqs, int n_planes) {
    std::vector<uint64_t> out;
    for (int i = 0; i < n_planes; i++) {
        const double turns = double{freqs[i]} * 0.15915494309189533577;  // 1/2π
        out.push_back(static_cast<uint64_t>(std::ldexp(turns - std::floor(turns), 64)));
    }
    return out;
}

}  // namespace lkv::cuda
