// Factors and angles in the order in which kernels read them, made once on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lkv::cuda {

// A head's dimensions as they are, and as plane_dim orders them (-1: none).
std::vector<int> dims_in_order(int head_dim);
std::vector<int> dims_by_plane(int head_dim, int n_rot, bool neox);

// [n_kv, rank, head_dim] f32 -> f16 in the order of mma's operand b, 64·blocks channels deep:
// [n_kv][blocks][dims / 8][4 steps][32 lanes][2 words].
std::vector<uint32_t> pack_k_b(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                               const std::vector<int>& dims);
// The same, dimensions padded with zeros to batches of 128, `blocks` being decode_blocks, as 8 x 8 matrices of one word a lane
// (warpgroup.cuh): [n_kv][batches][blocks][4 steps][16][2 words][32 lanes]. Behind them, where dims are 128, those that may be absorbed
// (absorb.cuh) transposed, as operand a of mma: [n_kv][blocks][4 steps][product_tiles - rebuilt_tiles][32 lanes][4 words].
std::vector<uint32_t> pack_k_b_cores(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                                     const std::vector<int>& dims);
std::vector<uint16_t> pack_rows(const float* b, size_t n);  // in its order

// Turns per position of each rotated plane, as 64-bit fractions.
std::vector<uint64_t> pack_phases(const float* freqs, int n_planes);
// The angles of the planes of n_tiles tiles of 16 dimensions at every position of a span, as RebuildTables has them:
// f16 [wide_angle_span][angle_pitch(n_tiles)][2 cosines, 2 sines]. Planes without a phase don't turn.
std::vector<uint16_t> pack_angles(const std::vector<uint64_t>& phases, int n_tiles);

}  // namespace lkv::cuda
