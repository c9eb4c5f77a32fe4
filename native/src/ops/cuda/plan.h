// From the contract's params to what the kernels run: tables of chunks, and how the work is cut.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cuda/args.h"
#include "ops/cuda/instances.h"
#include "ops/latent_attn.h"

namespace lkv::cuda {

// One region's K and V rows of one layer as tables, host side.
struct RegionTables {
    std::vector<GroupTable> k_groups;
    std::vector<GroupTable> v_groups;
    std::vector<Chunk> chunks;
};

// 64-channel blocks of the widest group of one side over all regions.
int side_blocks(const LatentAttnParams& params, RowLayout RegionView::* side);

// Rows start on multiples of 16 bytes when row_bytes does; storage itself is aligned, and a multiple of 16 bytes.
RegionTables region_tables(const RowLayout& k, const RowLayout& v, int k_blocks, int v_blocks);

// Fills the shape and the plan of `args` from params' shapes and layouts; no pointer is read or set.
// capacity: slots of all regions.
// Throws std::invalid_argument, "[cuda] expected …; got …", for shapes the kernels do not take.
void plan_attention(const LatentAttnParams& params, int capacity, const Device& device, AttnArgs& args);

Instance choose_instance(const AttnArgs& args);

RegionTables expanded_tables(int n_kv, int head_dim);
// AttnArgs::expanded, one for all layers. keep: of a host vector, its copy on the device
template <class Keep>
RegionArgs expanded_region(int n_kv, int head_dim, Keep&& keep) {
    const RegionTables tables = expanded_tables(n_kv, head_dim);
    RegionArgs region{};
    region.k_groups = keep(tables.k_groups);
    region.v_groups = keep(tables.v_groups);
    region.chunks = keep(tables.chunks);
    region.k_row_bytes = region.v_row_bytes = static_cast<uint32_t>(n_kv * head_dim * 2);
    return region;
}
// Attention on the full rows that a chunk was expanded to, as AttnArgs::expand plans it.
AttnArgs on_expanded_rows(const AttnArgs& args);

// Sums of all parts, then what merging needs: where combine_wide does it [v_blocks, n_tokens, n_head, head_dim], else one
// part's sums; then ExpandedRows.
size_t parts_floats(const AttnArgs& args);  // without ExpandedRows
size_t partial_floats(const AttnArgs& args);
size_t partial_ml_floats(const AttnArgs& args);

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
