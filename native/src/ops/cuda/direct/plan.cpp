#include <algorithm>
#include <string>

#include "ops/cuda/instances.h"
#include "ops/cuda/plan.h"
#include "ops/cuda/planners.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

namespace {

int row_blocks(const AttnArgs& a, int rows) { return (a.n_tokens * a.unit * (a.n_head / a.n_kv) + rows - 1) / rows; }

}  // namespace

Instance choose_instance(const AttnArgs& args) {
    const int q_blocks = args.rebuild != 0 ? (args.head_dim + 63) / 64 : args.k_blocks;
    const int per_warp = (std::max(q_blocks, args.v_blocks) + 7) / 8;
    const int rows = args.n_tokens * args.unit * (args.n_head / args.n_kv);
    Instance best{16, per_warp <= 1 ? 1 : (per_warp <= 2 ? 2 : 4)};
    for (const Instance& i : instances) {
        if (args.in_blocks == 0 && i.blocks == best.blocks && i.rows > best.rows && i.rows / 2 < rows) best = i;
    }
    return best;
}

bool plan_direct(const LatentAttnParams&, int capacity, const Device& device, AttnArgs& a) {
    const Instance instance = choose_instance(a);

    // Enough bytes in flight, and room for a second thread block where registers allow one.
    const int target =
        instance.rows == 16 && instance.blocks == 1 ? device.shared_bytes / 2 - 2048 : device.shared_bytes;
    const auto fits = [&](int tile, int stages, int limit) {
        a.tile = tile;
        a.stages = stages;
        return SharedPlan(a, instance.rows).total(a, instance.rows) <= limit;
    };
    const auto choose = [&](int limit) {
        const int least_tile = a.in_blocks != 0 ? block_slots : 16;
        for (const int tile : {128, 64, 32, 16}) {
            if (tile < least_tile) continue;
            // rebuilt tiles wait for their products, not for memory; 64 rows fill the tensor cores' tiles
            if (tile > (a.rebuild != 0 ? 64 : max_tile(instance.rows))) continue;
            for (const int stages : {4, 3, 2}) {
                if (fits(tile, stages, limit)) return true;
            }
        }
        return fits(least_tile, 1, limit);
    };
    require(choose(target) || choose(device.shared_bytes),
            "K and V rows of a group that leave room in " + std::to_string(device.shared_bytes) +
                " bytes of shared memory; choose a quantized --kv",
            std::to_string(a.k_pitch) + " and " + std::to_string(a.v_pitch) + " bytes");

    const int blocks = a.n_kv / a.unit * row_blocks(a, instance.rows);
    const int resident = device.n_multiprocessors * (instance.rows == 16 && instance.blocks == 1 ? 2 : 1);
    const int tiles = std::max(1, capacity / a.tile);
    a.n_split = std::clamp(resident / blocks, 1, std::min(tiles, 128));
    return true;
}

}  // namespace lkv::cuda
