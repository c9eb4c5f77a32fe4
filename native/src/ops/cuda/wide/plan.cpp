#include <algorithm>
#include <utility>

#include "ops/cuda/planners.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

namespace {

// Bytes from row to row of the wide kernel's tiles, of the region with the largest. Rows of one group that start on no 16 bytes
// lie as in memory: copied by 16 bytes, not by 4.
int wide_pitch(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    int pitch = 16;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& row = p.regions[r].*side;
        const auto bytes = static_cast<uint32_t>(row.row_bytes);
        for (int g = 0; g < row.n_groups; g++) {
            std::vector<Chunk> chunks;
            const GroupTable table = group_table(row, row.groups[g], blocks, chunks);
            pitch =
                std::max(pitch, copied_whole(bytes, table) ? row.row_bytes : pitch_of(static_cast<int>(table.bytes)));
        }
    }
    return pitch;
}

}  // namespace

// Whether the wide kernel takes this shape, and with which tiles.
bool plan_wide(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    if (a.rebuild != 0 || rows > 32) return false;
    a.k_pitch = wide_pitch(p, &RegionView::k, a.k_blocks);
    a.v_pitch = wide_pitch(p, &RegionView::v, a.v_blocks);
    a.wide = rows <= 16 || a.v_blocks > n_wide_warps ? 16 : 32;
    for (const auto& [tile, stages] :
         {std::pair{128, 2}, {128, 1}, {64, 2}, {64, 1}, {32, 2}, {32, 1}, {16, 2}, {16, 1}}) {
        a.tile = tile;
        a.stages = stages;
        for (const int columns : {most_k_columns, least_k_columns(tile)}) {
            a.k_columns = columns;
            if (WidePlan(a, a.wide).total > device.shared_bytes - wide_fixed) continue;
            const int blocks = a.n_kv / a.unit * ((rows + a.wide - 1) / a.wide);
            const int tiles = std::max(1, capacity / std::min(tile, least_wide_tile) + a.n_regions);
            // a short cache's parts are shared by two thread blocks
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(2 * tiles, most_parts));
            return true;
        }
    }
    return false;
}

}  // namespace lkv::cuda
