#include <algorithm>
#include <numeric>
#include <string>

#include "cache/formats.h"
#include "ops/cuda/kernels/direct/layout.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::cuda {

namespace {

DirectArgs args_of(const Plan& plan) { return {plan, plan.as<DirectPlan>(), plan.packed}; }

int row_blocks(const CutProblem& a, int rows) { return (rows_of(a) + rows - 1) / rows; }

Instance choose_instance(const CutProblem& p) {
    const int q_blocks = p.rebuild != 0 ? (p.head_dim + 63) / 64 : p.k_blocks;
    const int per_warp = (std::max(q_blocks, p.v_blocks) + 7) / 8;
    const int rows = rows_of(p);
    Instance best{16, per_warp <= 1 ? 1 : (per_warp <= 2 ? 2 : 4)};
    for (const Instance& i : instances) {
        if (p.in_blocks == 0 && i.blocks == best.blocks && i.rows > best.rows && i.rows / 2 < rows) best = i;
    }
    return best;
}

const char* take(const Request& request, Plan& a) {
    const Device& device = request.device;
    Instance instance = choose_instance(a);
    DirectPlan plan{};
    plan.blocks = instance.blocks;
    plan.k_pitch = widest_pitch(request.params, &RegionView::k, a.k_blocks);
    plan.v_pitch = widest_pitch(request.params, &RegionView::v, a.v_blocks);

    const auto fits = [&](int tile, int stages, int limit) {
        a.tile = tile;
        plan.rows = instance.rows;
        plan.stages = stages;
        a.keep(plan);
        const DirectArgs args = args_of(a);
        return DirectLayout(args, instance.rows).total(args, instance.rows) <= limit;
    };
    const auto choose = [&](int limit) {
        const int least_tile = a.in_blocks != 0 ? token_block_slots : 16;
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
    // Enough bytes in flight, and room for a second thread block where registers allow one. Wide heads leave less for query rows.
    const auto chooses = [&] {
        const bool pairs = instance.rows == 16 && instance.blocks == 1;
        return choose(pairs ? device.shared_bytes / 2 - 2048 : device.shared_bytes) || choose(device.shared_bytes);
    };
    while (!chooses() && instance.rows > 16) instance.rows /= 2;
    require(chooses(),
            "K and V rows of a group that leave room in " + std::to_string(device.shared_bytes) +
                " bytes of shared memory; choose a quantized --kv",
            std::to_string(plan.k_pitch) + " and " + std::to_string(plan.v_pitch) + " bytes");

    const int blocks = a.n_kv / a.unit * row_blocks(a, instance.rows);
    const int resident = device.n_multiprocessors * (instance.rows == 16 && instance.blocks == 1 ? 2 : 1);
    const int tiles = std::max(1, request.capacity / a.tile);
    a.n_split = std::clamp(resident / blocks, 1, std::min(tiles, 128));
    return nullptr;
}

cudaError_t launch(const Plan& plan, cudaStream_t stream) {
    const DirectArgs args = args_of(plan);
    if (args.in_blocks != 0) return launch_blocks(args, stream);
    return args.rebuild != 0 ? launch_rebuild(args, stream) : launch_direct(args, stream);
}

std::vector<uint32_t> pack(const KeyFactor& f) {
    std::vector<int> in_order(static_cast<size_t>(f.head_dim));
    std::iota(in_order.begin(), in_order.end(), 0);
    return pack_k_b(f.k_b, f.n_kv, f.rank, f.head_dim, f.k_blocks, in_order);
}

}  // namespace

namespace kernels {
extern const Kernel direct{.name = "direct",
                           .takes = take,
                           .launch = launch,
                           .takes_caps = true,
                           .takes_blocks = true,
                           .widest_head = most_head_dim,
                           .pack_keys = pack};
}

}  // namespace lkv::cuda
