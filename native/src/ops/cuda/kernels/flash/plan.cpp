#include <algorithm>

#include "ops/cuda/kernels/flash/layout.h"

namespace lkv::cuda {

namespace {

constexpr int least_rows = 33;        // fewer are the wide kernel's
constexpr int least_part_tiles = 32;  // that are worth a part
constexpr int most_flash_parts = 8;
constexpr float part_cost = 0.03f;  // of a part, as a share of a thread block's whole work

// Thread blocks run in waves of a multiprocessor each: as many parts as leave few of them idle in the last one.
int parts_of(int blocks, int n_multiprocessors, int most) {
    int best = 1;
    float least = 0.0f;
    for (int n = 1; n <= most; n++) {
        const int waves = (blocks * n + n_multiprocessors - 1) / n_multiprocessors;
        const float cost = static_cast<float>(waves) / static_cast<float>(n) + part_cost * static_cast<float>(n);
        if (n > 1 && cost >= least) continue;
        best = n;
        least = cost;
    }
    return best;
}

const char* take(const Request& request, Plan& plan) {
    if (plan.rebuild != 0) return "K is rebuilt";
    if (plan.kind != kind_f16_wide || plan.k_group != 1 || plan.v_group != 1 || plan.v_b != nullptr ||
        plan.q_width != plan.head_dim) {
        return "rows are not full ones of f16";
    }
    return plan_flash(request.capacity, request.device, plan)
               ? nullptr
               : "no warpgroups, too few query rows, or another head_dim";
}

cudaError_t launch(const Plan& plan, cudaStream_t stream) { return launch_flash({plan, {}}, stream); }

}  // namespace

bool plan_flash(int capacity, const Device& device, CutProblem& p) {
    const int rows = p.n_tokens * (p.n_head / p.n_kv);
    if (!device.warpgroups || rows < least_rows || (p.head_dim != 64 && p.head_dim != 128) ||
        64 * p.k_blocks != p.head_dim || 64 * p.v_blocks != p.head_dim ||
        flash_shared(p.head_dim) + 2048 > device.shared_bytes) {
        return false;
    }
    p.unit = 1;
    p.tile = flash_tile;
    p.least_tiles = least_part_tiles;
    const int blocks = p.n_kv * ((rows + flash_rows - 1) / flash_rows);
    p.n_split = parts_of(blocks, device.n_multiprocessors,
                         std::clamp(capacity / (flash_tile * least_part_tiles), 1, most_flash_parts));
    return true;
}

namespace kernels {
extern const Kernel flash{.name = "flash", .takes = take, .launch = launch};
}

}  // namespace lkv::cuda
