// Row layouts as the kernels read them: chunks of 16 channels and where their bytes lie.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/cuda/problem.h"
#include "ops/latent_attn.h"

namespace lkv::cuda {

// Throws std::invalid_argument, "[cuda] expected …; got …".
void require(bool holds, const std::string& expected, const std::string& got);

// One region's K and V rows of one layer as tables, host side.
struct RegionTables {
    std::vector<GroupTable> k_groups;
    std::vector<GroupTable> v_groups;
    std::vector<Chunk> chunks;
};

// Whether K's rows are V's too, which is what lies behind their first channels (MLA).
bool is_one_row(const LatentAttnParams& params);

// 64-channel blocks of the widest group of one side over all regions.
int side_blocks(const LatentAttnParams& params, RowLayout RegionView::* side);

// Rows start on multiples of 16 bytes when row_bytes does; storage itself is aligned, and a multiple of 16 bytes.
RegionTables region_tables(const RowLayout& k, const RowLayout& v, int k_blocks, int v_blocks);

RegionTables whole_tables(int n_kv, int head_dim);
// Problem::whole, one for all layers. keep: of a host vector, its copy on the device
template <class Keep>
RegionArgs whole_region(int n_kv, int head_dim, Keep&& keep) {
    const RegionTables tables = whole_tables(n_kv, head_dim);
    RegionArgs region{};
    region.k_groups = keep(tables.k_groups);
    region.v_groups = keep(tables.v_groups);
    region.chunks = keep(tables.chunks);
    region.k_row_bytes = region.v_row_bytes = static_cast<uint32_t>(n_kv * head_dim * 2);
    region.k_page = region.v_page = bytes_of_page(region.k_row_bytes);
    region.k_block = 1;
    return region;
}
using ChunkIterator = std::vector<Chunk>::const_iterator;

// What all these chunks are, if they are the same and kernels have a path for it.
int kind_of(ChunkIterator begin, ChunkIterator end);
// The same of all chunks of all regions.
int common_kind(const LatentAttnParams& p, int k_blocks, int v_blocks);

// One group of a row; its chunks are added to `chunks`, as many as `blocks` have.
GroupTable group_table(const RowLayout& row, const GroupLayout& group, int blocks, std::vector<Chunk>& chunks);

// use(region, its rows of this side, a group's table, its chunks), of every group.
template <class Use>
void for_groups(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks, Use&& use) {
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& row = p.regions[r].*side;
        for (int g = 0; g < row.n_groups; g++) {
            std::vector<Chunk> chunks;
            const GroupTable table = group_table(row, row.groups[g], blocks, chunks);
            use(r, row, table, chunks);
        }
    }
}

// Staged bytes of the widest group of each region.
std::vector<int> group_bytes(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks);
// Bytes from row to row of a tile that has room for any region.
int widest_pitch(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks);

}  // namespace lkv::cuda
