#include "ops/cuda/pack.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/half.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

namespace {

// B [n_kv, rank, head_dim] as words of operand b.
struct KeyFactor {
    const float* k_b;
    int rank;
    int head_dim;
    const std::vector<int>& dims;

    // Tile t of eight dimensions, step s of 64-channel block b: lane 4g + c has dimension g, channels of pair s or s + 4 of chunk c.
    uint32_t word(int head, int b, size_t t, int s, int lane, int of) const {
        const int channel = 64 * b + 16 * (lane % 4) + pair_channel(s + 4 * of);
        const int d = dim(8 * t + static_cast<size_t>(lane / 4));
        return at(head, channel, d) | static_cast<uint32_t>(at(head, channel + 2, d)) << 16;
    }
    // The same 8 x 8 transposed: lane 4g + c has dimensions 2c and 2c + 1, the channel that lanes c = g / 2 have first or second.
    uint32_t transposed(int head, int b, size_t t, int s, int lane, int of) const {
        const int g = lane / 4;
        const int channel = 64 * b + 16 * (g / 2) + pair_channel(s + 4 * of) + g % 2 * 2;
        const size_t place = 8 * t + 2 * static_cast<size_t>(lane % 4);
        return at(head, channel, dim(place)) | static_cast<uint32_t>(at(head, channel, dim(place + 1))) << 16;
    }

private:
    int dim(size_t place) const { return place < dims.size() ? dims[place] : -1; }
    uint16_t at(int head, int channel, int d) const {
        return channel < rank && d >= 0 ? half_saturate(k_b[(ptrdiff_t{head} * rank + channel) * head_dim + d])
                                        : uint16_t{0};
    }
};

}  // namespace

std::vector<int> dims_in_order(int head_dim) {
    std::vector<int> dims(static_cast<size_t>(head_dim));
    std::iota(dims.begin(), dims.end(), 0);
    return dims;
}

std::vector<int> dims_by_plane(int head_dim, int n_rot, bool neox) {
    std::vector<int> dims;
    for (int i = 0; i < 16 * plane_tiles(head_dim, n_rot); i++) dims.push_back(plane_dim(head_dim, n_rot, neox, i));
    return dims;
}

std::vector<uint32_t> pack_k_b(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                               const std::vector<int>& dims) {
    const KeyFactor factor{k_b, rank, head_dim, dims};
    std::vector<uint32_t> out;
    out.reserve(static_cast<size_t>(n_kv) * static_cast<size_t>(blocks) * 64 * dims.size() / 2);
    for (int j = 0; j < n_kv; j++) {
        for (int b = 0; b < blocks; b++) {
            for (size_t t = 0; t < dims.size() / 8; t++) {
                for (int s = 0; s < 4; s++) {
                    for (int lane = 0; lane < 32; lane++) {
                        for (int of = 0; of < 2; of++) out.push_back(factor.word(j, b, t, s, lane, of));
                    }
                }
            }
        }
    }
    return out;
}

std::vector<uint32_t> pack_k_b_cores(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                                     const std::vector<int>& dims) {
    const KeyFactor factor{k_b, rank, head_dim, dims};
    constexpr size_t batch = 2 * product_tiles;  // tiles of eight dimensions
    const size_t batches = (dims.size() / 8 + batch - 1) / batch;
    std::vector<uint32_t> out;
    out.reserve(static_cast<size_t>(n_kv) * static_cast<size_t>(blocks) * batches * batch * 256);
    for (int j = 0; j < n_kv; j++) {
        for (size_t d = 0; d < batches; d++) {
            for (int step = 0; step < 4 * blocks; step++) {
                for (size_t t = batch * d; t < batch * (d + 1); t++) {
                    for (int of = 0; of < 2; of++) {
                        for (int lane = 0; lane < 32; lane++) {
                            out.push_back(factor.word(j, step / 4, t, step % 4, lane, of));
                        }
                    }
                }
            }
        }
    }
    if (dims.size() != 16 * product_tiles) return out;
    for (int j = 0; j < n_kv; j++) {
        for (int step = 0; step < 4 * blocks; step++) {
            for (size_t t = 2 * rebuilt_tiles; t < batch; t += 2) {
                for (int lane = 0; lane < 32; lane++) {
                    for (int i = 0; i < 4; i++) {
                        out.push_back(
                            factor.transposed(j, step / 4, t + static_cast<size_t>(i) / 2, step % 4, lane, i % 2));
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

std::vector<uint16_t> pack_angles(const std::vector<uint64_t>& phases, int n_tiles) {
    const auto pitch = static_cast<size_t>(angle_pitch(n_tiles)) * 4;
    std::vector<uint16_t> out(wide_angle_span * pitch);
    for (size_t position = 0; position < wide_angle_span; position++) {
        for (size_t plane = 0; plane < static_cast<size_t>(8 * n_tiles); plane++) {
            const uint64_t phase = plane < phases.size() ? phases[plane] : 0;
            const double angle = std::ldexp(static_cast<double>(position * phase), -63) * 3.14159265358979323846;
            uint16_t* const to = out.data() + position * pitch + plane / 2 * 4 + plane % 2;
            to[0] = half_saturate(static_cast<float>(std::cos(angle)));
            to[2] = half_saturate(static_cast<float>(std::sin(angle)));
        }
    }
    return out;
}

}  // namespace lkv::cuda
