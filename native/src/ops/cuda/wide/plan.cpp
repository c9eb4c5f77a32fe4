#include <algorithm>
#include <utility>

#include "ops/cuda/planners.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

namespace {

// Bytes from row to row of the wide kernel's tiles, of the region with the largest. Rows of one group that start on no 16 bytes
// lie as in memory: copied by 16 bytes, not by 4.
int wide_pitch(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks, bool pair) {
    int pitch = 16;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& row = p.regions[r].*side;
        const auto bytes = static_cast<uint32_t>(row.row_bytes);
        for (int g = 0; g < row.n_groups; g++) {
            std::vector<Chunk> chunks;
            const GroupTable table = group_table(row, row.groups[g], blocks, chunks);
            if (pair && wide_halves(table, chunks.data(), 4 * blocks)) {
                const int middle = (blocks + 1) / 2 * 4;
                pitch = std::max({pitch, WideHalf(table, bytes, chunks.data(), 0, middle).pitch,
                                  WideHalf(table, bytes, chunks.data(), middle, 4 * blocks).pitch});
            } else {
                pitch = std::max(pitch,
                                 copied_whole(bytes, table) ? row.row_bytes : pitch_of(static_cast<int>(table.bytes)));
            }
        }
    }
    return pitch;
}

}  // namespace

// Whether the wide kernel takes this shape, and with which tiles.
bool plan_wide(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    if (a.rebuild != 0 || rows > 32) return false;
    a.pair = a.v_blocks > n_wide_warps && device.pairs ? 1 : 0;
    a.k_pitch = wide_pitch(p, &RegionView::k, a.k_blocks, a.pair != 0);
    a.v_pitch = wide_pitch(p, &RegionView::v, a.v_blocks, a.pair != 0);
    a.wide = a.pair == 0 && (rows <= 16 || a.v_blocks > n_wide_warps) ? 16 : 32;
    for (const auto& [tile, stages] :
         {std::pair{128, 2}, {128, 1}, {64, 2}, {64, 1}, {32, 2}, {32, 1}, {16, 2}, {16, 1}}) {
        if (a.pair != 0 && tile > pair_tile) continue;
        a.tile = tile;
        a.stages = stages;
        // of a pair half the warps fetch V meanwhile: q8 rows of 2048 channels take 217 us a layer at 65536 slots, else 226
        for (const int columns : {a.pair != 0 ? least_k_columns(tile) : most_k_columns, least_k_columns(tile)}) {
            a.k_columns = columns;
            if (WidePlan(a, a.wide).total > device.shared_bytes - wide_fixed) continue;
            const int blocks = a.n_kv / a.unit * (a.pair != 0 ? 2 : (rows + a.wide - 1) / a.wide);
            const int tiles = std::max(1, capacity / std::min(tile, least_wide_tile) + a.n_regions);
            // a short cache's parts are shared by two thread blocks
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(2 * tiles, most_parts));
            return true;
        }
    }
    return false;
}

}  // namespace lkv::cuda
