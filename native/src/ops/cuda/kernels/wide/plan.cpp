#include <algorithm>
#include <utility>

#include "ops/cuda/kernels/wide/layout.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::cuda {

namespace {

// Bytes from row to row of the wide kernel's tiles, of the region with the largest. Rows of one group that start on no 16 bytes
// lie as in memory: copied by 16 bytes, not by 4.
int wide_pitch(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    int pitch = 16;
    for_groups(p, side, blocks, [&](int, const RowLayout& row, const GroupTable& table, const auto&) {
        const bool whole = copied_whole(static_cast<uint32_t>(row.row_bytes), table);
        pitch = std::max(pitch, whole ? row.row_bytes : pitch_of(static_cast<int>(table.bytes)));
    });
    return pitch;
}

const char* take(const Request& request, Plan& a) {
    const LatentAttnParams& p = request.params;
    const Device& device = request.device;
    const int rows = rows_of(a);
    if (a.rebuild != 0) return "K is rebuilt";
    if (rows > 32) return "too many query rows";
    WidePlan plan{};
    plan.k_pitch = wide_pitch(p, &RegionView::k, a.k_blocks);
    plan.v_pitch = wide_pitch(p, &RegionView::v, a.v_blocks);
    plan.rows = rows <= 16 || a.v_blocks > n_wide_warps ? 16 : 32;
    a.shrinks = 1;
    a.halves = plan.rows == max_wide_rows ? 1 : 0;
    for (const auto& [tile, stages] :
         {std::pair{128, 2}, {128, 1}, {64, 2}, {64, 1}, {32, 2}, {32, 1}, {16, 2}, {16, 1}}) {
        a.tile = tile;
        plan.stages = stages;
        for (const int columns : {most_k_columns, least_k_columns(tile)}) {
            plan.k_columns = columns;
            if (WideLayout(WideArgs{a, plan}, plan.rows).total > device.shared_bytes - wide_fixed) continue;
            const int blocks = a.n_kv / a.unit * ((rows + plan.rows - 1) / plan.rows);
            const int tiles = std::max(1, request.capacity / std::min(tile, least_shrunk_tile) + a.n_regions);
            // a short cache's parts are shared by two thread blocks
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(2 * tiles, most_parts));
            a.keep(plan);
            return nullptr;
        }
    }
    return "no tile fits shared memory";
}

}  // namespace

namespace kernels {
extern const Kernel wide{.name = "wide", .takes = take, .launch = launch_wide};
}

}  // namespace lkv::cuda
