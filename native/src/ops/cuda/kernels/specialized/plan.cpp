#include <algorithm>
#include <numeric>
#include <utility>

#include "ops/cuda/kernels/specialized/layout.h"

namespace lkv::cuda {

namespace {

// For so many positions on either side of one the planes that absorb.cuh takes are linear in the position: the fastest of them turns by
// no more than 0.08, which is off by 0.0016 at the ends; over all of them and the span the mean is below f16's own rounding. 0: for
// too few to be worth it, or the shape is not one for it.
int absorbed_span(const LatentAttnParams& p, const CutProblem& a) {
    const int rep = a.n_head / a.n_kv;
    // a head's query rows r have the columns r and r ^ 4 of eight
    const bool has_columns = a.n_tokens * rep * a.unit <= 4 || (a.n_tokens == 1 && rep <= 4);
    const bool has_sets = a.unit == 2 || column_sets(decode_blocks(a)) == 2;
    if (a.k_extras != 0 || a.n_rot != a.head_dim || a.head_dim != 16 * product_tiles || !has_columns || !has_sets)
        return 0;
    constexpr float most = 0.08f;
    constexpr int least_span = 256;
    constexpr int most_span = 1 << 20;
    const float fastest = *std::max_element(p.rope_freqs + 8 * rebuilt_tiles, p.rope_freqs + a.n_rot / 2);
    int span = most_span;
    while (span >= least_span && static_cast<float>(span) * fastest > most) span /= 2;
    return span >= least_span ? span : 0;
}

// Two KV heads that share their latents have them decoded once.
const char* take(const Request& request, Plan& a) {
    const Device& device = request.device;
    const int rows = a.n_tokens * (a.n_head / a.n_kv);
    if (!device.warpgroups) return "the device has no products by warpgroups";
    if (a.rebuild == 0) return "K is not rebuilt";
    if (rows > decode_rows) return "too many query rows";
    if (!has_specialized_shape(a.k_blocks, a.v_blocks)) return "groups are too wide";
    a.kind = decode_kind(a);
    a.tile = specialized_tile;
    a.least_tiles = 1;
    a.merge = request.params.v_b != nullptr ? Merge::heads : Merge::by_kernel;
    SpecializedPlan plan{};
    const int shared_by = std::gcd(a.k_group, a.v_group);
    const int blocks = decode_blocks(a);
    for (const auto& [unit, buffers] : {std::pair{2, 8}, {2, 4}, {2, 2}, {1, 8}, {1, 4}, {1, 2}, {2, 1}}) {
        if (shared_by % unit != 0 || rows * unit > decode_rows) continue;
        if (buffers < least_latent_buffers(blocks, unit, false) || buffers > std::max(4, 2 * tiles_at_once(blocks)))
            continue;
        a.unit = unit;
        plan.stages = buffers;
        plan.absorbed_span = absorbed_span(request.params, a);
        plan.pair = device.pairs && plan.absorbed_span != 0 && blocks == 4 && unit == 2 &&
                            shared_by % (2 * unit) == 0 && buffers >= least_latent_buffers(blocks, unit, true)
                        ? 1
                        : 0;
        // a thread block takes a whole multiprocessor; some are left to the warm-up beside which the real one starts
        const int items = a.n_kv / unit;
        const int at_once = device.n_multiprocessors - items_of_group(a);
        a.n_split = decode_parts(a, request.capacity, at_once);
        // one more part begins when the warm-up ends
        a.late_parts = a.n_split == at_once / items && (a.n_split + 1) * items <= device.n_multiprocessors;
        a.n_split += a.late_parts;
        const SpecializedArgs args{a, plan, nullptr, nullptr, nullptr};
        if (SpecializedLayout(args).total(args) > device.shared_bytes - specialized_fixed) continue;
        // A short cache in many parts, unless their thread blocks fill the device, where the next kernel starts late: 256 slots took
        // 13.2 us in 8 thread blocks and 10.6 in 16, but 9.3 in 64 and 11.3 in 128.
        a.least_tiles = a.n_split >= 16 ? 1 : 2;
        a.keep(plan);
        return nullptr;
    }
    return "no tile fits shared memory";
}

// Nothing merges its parts: that would be set up while it runs, and keep multiprocessors from the real one (8B, 256 channels of four heads:
// 276 tokens/s at depth 4096 with it, 283 without).
std::optional<Plan> warm_up(const Plan& plan) {
    Plan of = warm_up_plan(plan, items_of_group(plan), 2 * plan.n_regions);
    of.merge = Merge::by_kernel;
    return of;
}

void shrink(Plan& plan, int, int stages) {
    auto own = plan.as<SpecializedPlan>();
    const int least = least_latent_buffers(decode_blocks(plan), plan.unit, own.pair != 0);
    own.stages = std::min(std::max(stages, least), own.stages);
    plan.keep(own);
}

}  // namespace

namespace kernels {
extern const Kernel specialized{.name = "specialized",
                                .takes = take,
                                .launch = launch_specialized,
                                .warm_up = warm_up,
                                .pack_keys = pack_specialized,
                                .shrink = shrink};
}

}  // namespace lkv::cuda
