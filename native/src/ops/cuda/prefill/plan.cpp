#include <algorithm>
#include <utility>

#include "ops/cuda/planners.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

bool plan_prefill_rows(int capacity, const Device& device, int k_pitch, int v_pitch, AttnArgs& a, bool any_rows) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    if (a.rebuild != 0) return false;
    const int channels = 64 * a.k_blocks;
    for (const int wc : {1, 2, 4}) {
        if ((!any_rows && rows <= 64 / wc) || 64 * a.v_blocks > prefill_channels[wc] ||
            (wc == 1 && channels > prefill_channels[1])) {
            continue;
        }
        a.prefill = wc;
        a.tile = prefill_tile(wc);
        a.k_pitch = k_pitch;
        a.v_pitch = v_pitch;
        for (const auto& [buffers, stages] : {std::pair{2, 3}, {2, 2}, {2, 1}, {1, 3}, {1, 2}, {1, 1}, {1, 0}}) {
            if ((wc > 1 && buffers > 1) || (wc == 1 && stages == 0)) continue;
            a.buffers = buffers;
            a.stages = stages;
            if (PrefillPlan(a).total(a) > device.shared_bytes) continue;
            const int blocks = a.n_kv / a.unit * ((rows + 128 / wc - 1) / (128 / wc));
            const int tiles = std::max(1, capacity / a.tile);
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(tiles, 128));
            return true;
        }
    }
    return false;
}

bool plan_prefill(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    const auto least_pitch = [](const std::vector<int>& bytes) {
        return pitch_of(*std::min_element(bytes.begin(), bytes.end()));
    };
    return plan_prefill_rows(capacity, device, least_pitch(group_bytes(p, &RegionView::k, a.k_blocks)),
                             least_pitch(group_bytes(p, &RegionView::v, a.v_blocks)), a, false);
}

}  // namespace lkv::cuda
