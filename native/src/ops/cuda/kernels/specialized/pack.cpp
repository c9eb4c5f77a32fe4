#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "ops/cuda/kernels/specialized/layout.h"
#include "ops/cuda/pack.h"

namespace lkv::cuda {

namespace {

// [n_kv, rank, head_dim] f32 -> f16, dimensions padded with zeros to batches of 128, `blocks` being decode_blocks, as 8 x 8 matrices of one
// word a lane (warpgroup.cuh): [n_kv][batches][blocks][4 steps][16][2 words][32 lanes]. Behind them, where dims are 128, those that may be
// absorbed (absorb.cuh) transposed, as operand a of mma: [n_kv][blocks][4 steps][product_tiles - rebuilt_tiles][32 lanes][4 words].
std::vector<uint32_t> pack_k_b_cores(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                                     const std::vector<int>& dims) {
    const PackedFactor factor{k_b, rank, head_dim, dims};
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

// The angles of the planes of n_tiles tiles of 16 dimensions at every position of a span, as RebuildTables has them:
// f16 [wide_angle_span][angle_pitch(n_tiles)][2 cosines, 2 sines]. Planes without a phase don't turn.
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

size_t angle_words(int n_tiles) { return wide_angle_span * static_cast<size_t>(angle_pitch(n_tiles)) * 2; }

}  // namespace

PackedWords::PackedWords(int n_kv, int head_dim, int n_rot, int blocks) {
    const int tiles = plane_tiles(head_dim, n_rot);
    const auto steps = static_cast<size_t>(n_kv) * 4 * static_cast<size_t>(blocks);
    cores = steps * static_cast<size_t>(round_up(tiles, product_tiles)) * 128;
    if (tiles == product_tiles) cores += steps * (product_tiles - rebuilt_tiles) * 128;
    angles = cores;
    rebuilt_angles = angles + angle_words(all_turned_tiles(head_dim, n_rot));
}

std::vector<uint32_t> pack_specialized(const KeyFactor& f, const Device& device) {
    if (!device.warpgroups || !has_specialized_shape(f.k_blocks, f.v_blocks)) return {};
    const int blocks = decode_blocks(f.k_blocks, f.v_blocks);
    std::vector<uint32_t> words =
        pack_k_b_cores(f.k_b, f.n_kv, f.rank, f.head_dim, blocks, dims_by_plane(f.head_dim, f.n_rot, f.neox));
    for (const int tiles : {all_turned_tiles(f.head_dim, f.n_rot), rebuilt_tiles}) {
        const std::vector<uint16_t> angles = pack_angles(f.phases, tiles);
        const size_t at = words.size();
        words.resize(at + angles.size() / 2);
        std::memcpy(words.data() + at, angles.data(), angles.size() * sizeof(uint16_t));
    }
    return words;
}

}  // namespace lkv::cuda
