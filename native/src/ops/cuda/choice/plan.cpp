#include <algorithm>

#include "ops/cuda/choice/choice.h"
#include "ops/cuda/kernels/mla/layout.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::cuda {

namespace {

constexpr int of_channels = 4;  // one of so many leads

}  // namespace

const char* refuses_choice(const LatentAttnParams& p, const Device& device) {
    if (p.n_regions != 1) return "exact windows in one problem with compressed rows";
    if (p.rebuilds()) return "keys that are rebuilt";
    if (p.softcap > 0.0f) return "scores with a soft cap";
    if (p.alibi_slopes != nullptr) return "scores with slopes";
    if (in_token_blocks(p.regions[0].k)) return "K in blocks of tokens";
    if (is_one_row(p)) return "rows that are K and V";
    if (!side_has_units(p, &RegionView::k, side_blocks(p, &RegionView::k)))
        return "rows of K that are not in units of 32 channels";
    if (p.n_head > most_choosing_heads) return "more than 256 heads";
    if (!scores_fit(scored_units(p), p.k_group * (p.n_head / p.n_kv), device)) {
        return "rows of K that are too wide for the GPU's shared memory";
    }
    return nullptr;
}

ScoredUnits scored_units(const LatentAttnParams& p) {
    const int blocks = side_blocks(p, &RegionView::k);
    ScoredUnits units{};
    units.lead = (p.q_width / of_channels + unit_channels - 1) / unit_channels;
    for_groups(
        p, &RegionView::k, blocks,
        [&](int, const RowLayout&, const GroupTable& table, const std::vector<Chunk>& chunks) {
            const auto next = 2 * static_cast<size_t>(units.lead);
            const bool has_rest = next < chunks.size() && chunks[next].kind != kind_none;
            const auto kept = static_cast<int32_t>(
                std::count_if(chunks.begin(), chunks.end(), [](const Chunk& c) { return c.kind != kind_none; }) / 2);
            units.of_mean = std::max(units.of_mean, kept - units.lead);
            units.lead_bytes =
                std::max(units.lead_bytes, has_rest ? int32_t{chunks[next].codes} : static_cast<int32_t>(table.bytes));
            units.mean_bytes = std::max(units.mean_bytes, static_cast<int32_t>(table.bytes));
        });
    return units;
}

int parts_of_choice(const ChoiceArgs& args, const Device& device) {
    const int heads = args.k_group * (args.n_head / args.n_kv);
    const int blocks = args.n_kv / args.k_group * ((heads + 31) / 32) * args.n_tokens;
    return std::clamp(device.n_multiprocessors / blocks, 1, most_parts);
}

}  // namespace lkv::cuda
