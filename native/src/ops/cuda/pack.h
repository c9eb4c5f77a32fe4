// Factors and angles in the order in which kernels read them, made once on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lkv::cuda {

// B [n_kv, rank, head_dim] as f16 words of operand b of mma. dims: a head's dimensions in the order wanted, -1 for none.
struct PackedFactor {
    const float* k_b;
    int rank;
    int head_dim;
    const std::vector<int>& dims;

    // Tile t of eight dimensions, step s of 64-channel block b: lane 4g + c has dimension g, channels of pair s or s + 4 of chunk c.
    uint32_t word(int head, int b, size_t t, int s, int lane, int of) const;
    // The same 8 x 8 transposed: lane 4g + c has dimensions 2c and 2c + 1, the channel that lanes c = g / 2 have first or second.
    uint32_t transposed(int head, int b, size_t t, int s, int lane, int of) const;

private:
    int dim(size_t place) const { return place < dims.size() ? dims[place] : -1; }
    uint16_t at(int head, int channel, int d) const;
};

// 64·blocks channels deep: [n_kv][blocks][dims / 8][4 steps][32 lanes][2 words].
std::vector<uint32_t> pack_k_b(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                               const std::vector<int>& dims);
std::vector<uint16_t> pack_rows(const float* b, size_t n);  // in its order

// Turns per position of each rotated plane, as 64-bit fractions.
std::vector<uint64_t> pack_phases(const float* freqs, int n_planes);

}  // namespace lkv::cuda
