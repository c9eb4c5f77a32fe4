#include <algorithm>

#include "ops/cuda/kernels/expand/layout.h"
#include "ops/cuda/routes.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/softmax/merge.h"

namespace lkv::cuda {

PrefillArgs on_expanded_rows(const CutProblem& p, const PrefillPlan& plan) {
    PrefillArgs full{p, plan};
    full.rebuild = 0;
    full.k_extras = 0;
    full.n_rot = 0;
    full.v_b = nullptr;
    full.v_rank_max = 0;
    full.q_width = p.head_dim;
    full.k_group = full.v_group = full.unit = 1;
    full.n_regions = 1;
    full.late_slots = 1;
    full.regions[0] = p.whole;
    full.kind = any_kind;
    full.k_blocks = full.v_blocks = (p.head_dim + 63) / 64;
    return full;
}

size_t chunk_parts_floats(const Plan& plan) {
    return plan.as<ExpandPlan>().carries(plan) ? 0 : parts_floats(on_expanded_rows(plan, {}));
}

namespace {

// Bytes of expanded rows, at most: about an L2 cache. Of more query rows than a wave of thread blocks takes, every chunk's sums pass through
// memory once more, and fewer chunks are worth more than that.
constexpr int most_bytes = 32 << 20;
constexpr int long_bytes = 64 << 20;
constexpr int longest_chunk = 8192;  // slots
constexpr int longest_of_few =
    32768;  // with less than a wave of thread blocks, whose launches are as long as their work

int row_bytes(const Problem& p) { return p.n_kv * p.head_dim * 2; }

ExpandBy by_units(const Request& request, const Problem& a, bool with_values) {
    const bool has_norm = request.params.k_norm != nullptr;
    // full rows have no factor
    const bool has_factors = request.params.k_b != nullptr && (!with_values || request.params.v_b != nullptr);
    return has_factors && plan_resident(request.device, a, has_norm, with_values) ? ExpandBy::resident
                                                                                  : ExpandBy::units;
}

// Query rows of a KV head from which on full rows of other formats are expanded: the prefill kernel makes each tile for 128 of them, and
// fills the GPU with the few that a step of many sequences has.
constexpr int least_expanded_rows = 513;

// A chunk of the context is expanded to full rows of f16 before it is attended to. So are full rows of other formats, for the flash kernel.
const char* take_rows(const Request& request, Plan& a) {
    static_assert(most_expanded_head <= prefill_channels[1]);
    const LatentAttnParams& p = request.params;
    const bool full = a.rebuild == 0 && !request.windows && a.kind != kind_f16_wide && a.k_group == 1 &&
                      a.v_group == 1 && a.v_b == nullptr && a.q_width == a.head_dim;
    if (a.rebuild != 0 && a.in_blocks != 0) return "K is rebuilt from blocks of tokens";
    if (a.rebuild == 0 && !full) return "K is not rebuilt";
    if (full && a.in_blocks == 0 && rows_of(a) < least_expanded_rows) return "too few query rows";
    ExpandPlan own{};
    own.multiprocessors = request.device.n_multiprocessors;
    PrefillArgs expanded = on_expanded_rows(a, {});
    const int blocks = a.n_kv * ((rows_of(expanded) + flash_rows - 1) / flash_rows);
    const bool many = blocks > request.device.n_multiprocessors;
    const int longest = many ? longest_chunk : longest_of_few;
    own.flash = plan_flash(longest, request.device, expanded) ? 1 : 0;
    // halves of heads are no place for RoPE, and only the flash kernel takes such heads
    const bool finishes = a.rebuild != 0 && (a.n_rot > 0 || a.k_bias != nullptr || a.k_norm != nullptr);
    if (a.head_dim > most_expanded_head && (own.flash == 0 || finishes)) return "heads are too wide";
    if (own.flash == 0 && full) return "full rows are not what the flash kernel takes";
    const int bytes = own.flash != 0 && many ? long_bytes : most_bytes;
    a.chunk = std::min(std::clamp(bytes / (2 * row_bytes(a)) / expand_slots * expand_slots, 1024, longest),
                       round_up(request.capacity + expand_tile * p.n_regions, expand_slots));
    a.tile = expand_tile;
    if (!full && side_has_units(p, &RegionView::k, a.k_blocks) && side_has_units(p, &RegionView::v, a.v_blocks)) {
        own.by = by_units(request, a, true);
    }
    const int pitch = pitch_of(2 * a.head_dim);
    if (own.flash == 0 &&
        (!plan_prefill_rows(a.chunk, request.device, pitch, pitch, expanded, true) || expanded.wc != 1)) {
        return "the prefill kernel does not take its full rows";
    }
    own.prefill = expanded;
    a.n_split = expanded.n_split;
    a.least_tiles = expanded.least_tiles;
    a.keep(own);
    return nullptr;
}

// K alone is expanded, for the MLA kernel: of as many KV heads at once as it has units for.
const char* take_keys(const Request& request, Plan& a) {
    const LatentAttnParams& p = request.params;
    if (a.rebuild == 0) return "K is not rebuilt";
    if (a.head_dim % unit_channels != 0 || a.head_dim > most_expanded_head) return "heads are no units, or too wide";
    for (int n = 1; n <= a.v_group && n * a.head_dim <= most_units * unit_channels; n++) {
        if (a.v_group % n == 0) a.unit = n;
    }
    ExpandKeysPlan own{};
    own.multiprocessors = request.device.n_multiprocessors;
    if (side_has_units(p, &RegionView::k, a.k_blocks)) {
        own.score_blocks = plan_scores(request.device, a);
        own.by = own.score_blocks > 0 ? ExpandBy::scores : by_units(request, a, false);
    }
    const bool scores = own.by == ExpandBy::scores;
    own.mla.keys.as = scores ? MlaK::scores : MlaK::rows;
    if (const char* const reason = plan_mla_rows(request, a, own.mla)) return reason;
    const int slot_bytes = scores ? 4 * a.n_tokens * a.n_head : row_bytes(a);
    a.chunk = std::min(most_bytes / slot_bytes / expand_slots * expand_slots,
                       round_up(request.capacity + expand_tile * p.n_regions, expand_slots));
    a.keep(own);
    return nullptr;
}

// All of it is behind the parts of full rows, which come first.
cudaError_t nothing(const Plan&, cudaStream_t) { return cudaSuccess; }

size_t rows_floats(const Plan& a) {
    return chunk_parts_floats(a) + static_cast<size_t>(ExpandedRows(a, a.chunk).total) / sizeof(float);
}

size_t keys_floats(const Plan& a) {
    if (a.as<ExpandKeysPlan>().by == ExpandBy::scores) return mla_parts_floats(a) + score_floats(a);
    return mla_parts_floats(a) + static_cast<size_t>(ExpandedRows(a, a.chunk).v) / sizeof(float);
}

// A long kernel: what the real one waits for is little of it.
std::optional<Plan> no_warm_up(const Plan&) { return std::nullopt; }

}  // namespace

namespace kernels {
extern const Kernel expand{.name = "expand",
                           .takes = take_rows,
                           .launch = nothing,
                           .takes_blocks = true,
                           .finish = attend_expanded,
                           .sums_floats = rows_floats,
                           .warm_up = no_warm_up};
extern const Kernel expand_keys{.name = "expand keys",
                                .takes = take_keys,
                                .launch = launch_expanded_keys,
                                .finish = merge_expanded_keys,
                                .sums_floats = keys_floats,
                                .warm_up = no_warm_up};
}  // namespace kernels

}  // namespace lkv::cuda
