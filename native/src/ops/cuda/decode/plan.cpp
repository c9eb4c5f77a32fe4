#include "ops/cuda/decode/plan.h"

#include <algorithm>

#include "ops/cuda/planners.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

int decode_kind(const AttnArgs& a) {
    const int blocks = decode_blocks(a);
    const bool has_path = a.k_blocks == blocks && a.v_blocks == blocks && (blocks <= 2 || a.rebuild != 0);
    return has_path ? a.kind : any_kind;
}

int decode_parts(const AttnArgs& a, int capacity, int resident) {
    const int tiles = std::max(1, capacity / (a.tile * a.least_tiles) + a.n_regions);
    return std::clamp(resident / (a.n_kv / a.unit), 1, std::min(tiles, 128));
}

// Whether the decode kernel takes this shape, and with which tiles. Two thread blocks a multiprocessor where they fit.
bool plan_decode(const LatentAttnParams&, int capacity, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    const int blocks = std::max(a.k_blocks, a.v_blocks);
    if (rows > decode_rows || blocks > 4) return false;
    a.kind = decode_kind(a);
    if (decode_reads_k_in_place(a.rebuild != 0, blocks, a.kind)) a.k_pitch = 0;
    struct Choice {
        int tile, stages, warps, resident;
    };
    // K rebuild from 64 channels: sixteen warps share one set of tables where they fit
    constexpr Choice choices[] = {{32, 2, 16, 1}, {32, 1, 16, 1}, {16, 2, 16, 1}, {16, 1, 16, 1}, {32, 3, 8, 2},
                                  {32, 2, 8, 2},  {16, 3, 8, 2},  {16, 2, 8, 2},  {32, 3, 8, 1},  {16, 4, 8, 1},
                                  {16, 3, 8, 1},  {16, 2, 8, 1},  {16, 1, 8, 1}};
    for (const Choice& choice : choices) {
        if (choice.warps > n_warps && (a.rebuild == 0 || blocks > 1)) continue;
        if (choice.stages == 1 && a.rebuild == 0) continue;  // a direct K is copied a tile ahead
        // registers of one thread block fill the multiprocessor
        if (choice.resident == 2 && blocks > (a.rebuild != 0 ? 1 : 2)) continue;
        if (choice.tile == 32 && a.rebuild != 0 && blocks > 2) continue;
        a.tile = choice.tile;
        a.stages = choice.stages;
        a.decode = choice.warps;
        const int room = device.shared_bytes / choice.resident - 1024 * (choice.resident - 1) - decode_static_bytes;
        if (DecodePlan(a).total(a) > room) continue;
        a.least_tiles = 2 * n_warps;
        a.n_split = decode_parts(a, capacity, device.n_multiprocessors * choice.resident);
        return true;
    }
    return false;
}

}  // namespace lkv::cuda
