#include <algorithm>
#include <utility>

#include "ops/cuda/kernels/prefill/layout.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::cuda {

namespace {

// Parts with which the last round of thread blocks is the fullest: 160 on 132 multiprocessors are two rounds, in quarters five fourths.
int even_parts(int blocks, int multiprocessors) {
    constexpr int most = 4;  // each writes sums of all rows
    const auto rounds = [&](int parts) { return (blocks * parts + multiprocessors - 1) / multiprocessors; };
    int best = 1;
    for (int parts = 2; parts <= most; parts++) {
        if (rounds(parts) * best < rounds(best) * parts) best = parts;
    }
    return best;
}

}  // namespace

bool plan_prefill_rows(int capacity, const Device& device, int k_pitch, int v_pitch, PrefillArgs& a, bool any_rows) {
    const int rows = rows_of(a);
    const int channels = 64 * a.k_blocks;
    for (const int wc : {1, 2, 4, 8}) {
        if ((!any_rows && rows <= 64 / std::min(wc, 4)) || 64 * a.v_blocks > prefill_channels[wc] ||
            (wc == 1 && channels > prefill_channels[1])) {
            continue;
        }
        a.wc = wc;
        a.tile = prefill_tile(wc);
        a.k_pitch = k_pitch;
        a.v_pitch = v_pitch;
        for (const auto& [buffers, stages] : {std::pair{2, 3}, {2, 2}, {2, 1}, {1, 3}, {1, 2}, {1, 1}, {1, 0}}) {
            if ((wc > 1 && buffers > 1) || (wc == 1 && stages == 0)) continue;
            a.buffers = buffers;
            a.stages = stages;
            if (PrefillLayout(a).total(a) > device.shared_bytes) continue;
            const int blocks = a.n_kv / a.unit * ((rows + 128 / wc - 1) / (128 / wc));
            const int tiles = std::max(1, capacity / a.tile);
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(tiles, 128));
            if (a.values_at > 0 && blocks > device.n_multiprocessors) {
                a.n_split = even_parts(blocks, device.n_multiprocessors);
            }
            return true;
        }
    }
    return false;
}

namespace {

PrefillArgs args_of(const Plan& plan) { return {plan, plan.as<PrefillPlan>()}; }

// PrefillPlan::values_at, where sums' blocks of 64 channels are such of K too; tiles of narrow rows have K beside V.
int values_in_keys(const LatentAttnParams& p, int k_blocks) {
    if (!is_one_row(p) || 64 * k_blocks <= prefill_channels[1]) return 0;
    const int turned = p.regions[0].k.groups[0].width - p.regions[0].v.groups[0].width;
    return turned % 64 == 0 ? 2 * turned : 0;
}

const char* take(const Request& request, Plan& plan) {
    if (plan.rebuild != 0) return "K is rebuilt";
    const auto least_pitch = [&](RowLayout RegionView::* side, int blocks) {
        const std::vector<int> bytes = group_bytes(request.params, side, blocks);
        return pitch_of(*std::min_element(bytes.begin(), bytes.end()));
    };
    PrefillArgs args{plan, {}};
    args.values_at = values_in_keys(request.params, plan.k_blocks);
    const int v_pitch = args.values_at > 0 ? 0 : least_pitch(&RegionView::v, plan.v_blocks);
    if (!plan_prefill_rows(request.capacity, request.device, least_pitch(&RegionView::k, plan.k_blocks), v_pitch, args,
                           false)) {
        return "too few query rows, or groups that are too wide";
    }
    static_cast<CutProblem&>(plan) = args;
    plan.keep(static_cast<const PrefillPlan&>(args));
    return nullptr;
}

cudaError_t launch(const Plan& plan, cudaStream_t stream) { return launch_prefill(args_of(plan), stream); }

}  // namespace

namespace kernels {
extern const Kernel prefill{
    .name = "prefill", .takes = take, .launch = launch, .takes_blocks = true, .widest_head = most_head_dim};
}

}  // namespace lkv::cuda
