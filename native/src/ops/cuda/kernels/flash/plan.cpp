#include <algorithm>

#include "ops/cuda/kernels/flash/layout.h"
#include "ops/cuda/routes.h"

namespace lkv::cuda {

namespace {

constexpr int most_flash_parts = 128;
// In tiles that a thread block walks: what a thread block does besides, and merging a part of the query rows of one.
constexpr float block_cost = 4.0f;
constexpr float merge_cost = 0.04f;

// Thread blocks run in waves of a multiprocessor each: as many parts as leave few of them idle in the last one. Steps of several sequences
// have few query rows of a long cache: 48 sequences of 2048 in eight parts of two KV heads took 25 ms a step.
int parts_of(int blocks, int n_multiprocessors, int tiles, int most) {
    int best = 1;
    float least = 0.0f;
    for (int n = 1; n <= most; n++) {
        const auto waves = static_cast<float>((blocks * n + n_multiprocessors - 1) / n_multiprocessors);
        const auto parts = static_cast<float>(n);
        const float cost = waves * (static_cast<float>(tiles) / parts + block_cost) +
                           parts * merge_cost * static_cast<float>(blocks + 8);
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

cudaError_t launch(const Plan& plan, cudaStream_t stream) { return launch_flash({plan, {}, 0}, plan.items, stream); }

}  // namespace

bool plan_flash(int capacity, const Device& device, CutProblem& p) {
    const int rows = p.n_tokens * (p.n_head / p.n_kv);
    if (!device.warpgroups || rows < least_flash_rows ||
        (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != most_flash_head) || 64 * p.k_blocks != p.head_dim ||
        64 * p.v_blocks != p.head_dim || flash_shared(p.head_dim) + 2048 > device.shared_bytes) {
        return false;
    }
    p.unit = 1;
    p.tile = flash_slots(p.head_dim);
    const int blocks = p.n_kv * ((rows + flash_rows - 1) / flash_rows);
    p.least_tiles = blocks >= device.n_multiprocessors ? 32 : 8;
    const int tiles = std::max(1, capacity / p.tile);
    p.n_split =
        parts_of(blocks, device.n_multiprocessors, tiles, std::clamp(tiles / p.least_tiles, 1, most_flash_parts));
    return true;
}

namespace kernels {
extern const Kernel flash{.name = "flash", .takes = take, .launch = launch};
}

}  // namespace lkv::cuda
