// Factors and angles in the order in which kernels read them, made once on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lkv::cuda {

// B [n_kv, rank, head_dim] as f16 words of operand b of mma, 64·blocks channels deep: [n_kv][blocks][dims / 8][4 steps][32 lanes][2 words].
// dims: a head's dimensions in the order wanted, -1 for none.
std::vector<uint32_t> pack_k_b(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                               const std::vector<int>& dims);
std::vector<uint16_t> pack_rows(const float* b, size_t n);  // in its order

// Turns per position of each rotated plane, as 64-bit fractions.
std::vector<uint64_t> pack_phases(const float* freqs, int n_planes);

}  // namespace lkv::cuda
