#include "cache/slots.h"

#include <algorithm>
#include <cmath>

#include "cache/spec/cache_spec.h"
#include "decoder/hparams.h"

namespace lkv {
namespace {

// Slots of an exact window come in multiples of this, so that the rows of every layer start on 64 bytes. No kernel reads
// rows of slots that are not in use, so whole tiles would be room for nothing: 4 sinks took 64 slots.
constexpr int exact_step = 16;

int whole_steps(int64_t n) { return static_cast<int>((n + exact_step - 1) / exact_step * exact_step); }

int recent_slots(const PlacementOptions& options) {
    if (!options.keeps_recent()) return 0;
    const int share = static_cast<int>(std::ceil(options.recent_ratio * options.n_ctx));
    const int64_t slots = int64_t{options.recent + demotion_batch} * options.n_seq_max + share + options.ubatches.exact;
    return whole_steps(std::min<int64_t>(slots, options.n_ctx));
}

// Slots for as many tokens as the windows of all sequences hold, and a ubatch.
int64_t ring_slots(const PlacementOptions& options, int window) {
    return whole_tiles(int64_t{window} * options.n_seq_max + options.ubatches.longest);
}

}  // namespace

bool window_grows(const KvCacheOptions& options, const CacheSpec& spec, const HParams& hparams) {
    const auto any = [](const auto& all, auto&& has) { return std::any_of(all.begin(), all.end(), has); };
    const bool is_count = options.recent > 0 && options.recent_ratio == 0;
    if (!is_count || options.fixed_window || options.evict.policy != nullptr) return false;
    // a ring has as many slots as its windows need
    if (any(hparams.block.layers, [](const auto& layer) { return layer.window > 0; })) return false;
    // keys that are turned anew in every step cost more than compressed ones
    if (any(spec.layers, [](const LayerCacheSpec& layer) { return layer.exact_keys_are_raw(); })) return false;
    return recent_slots(options) < options.n_ctx;
}

CacheSlots count_slots(const KvCacheOptions& options, std::span<const int> windows, bool blocks) {
    CacheSlots slots;
    slots.sink = whole_steps(int64_t{options.sink} * options.n_seq_max);
    slots.recent = recent_slots(options);
    slots.middle = static_cast<int>(whole_tiles(options.n_ctx));
    for (const int window : windows) {
        slots.in_ring.push_back(!blocks && window > 0 && ring_slots(options, window) < slots.middle);
        if (slots.in_ring.back()) slots.window = std::max(slots.window, window);
    }
    if (slots.window > 0) slots.ring = static_cast<int>(ring_slots(options, slots.window));
    // windows, a batch that leaves them and a few new tokens
    const int64_t least = int64_t{options.recent + demotion_batch} * options.n_seq_max + exact_step;
    slots.least_exact = slots.recent / page_slots * page_slots;
    if (slots.least_exact < least) slots.least_exact = whole_pages(static_cast<int>(least));
    return slots;
}

}  // namespace lkv
