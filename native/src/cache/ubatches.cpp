#include "cache/ubatches.h"

#include <algorithm>

#include "cache/options.h"
#include "cache/slots.h"
#include "cache/spec/cache_spec.h"
#include "decoder/hparams.h"

namespace lkv {
namespace {

// A prompt on a GPU takes more tokens at once: weights and the latents of the whole context are read less often.
constexpr int long_on_gpu = 2048;
// A ubatch enters the recent region whole before the rest is demoted: 512 exact tokens more would cost 1.6 % of an f16 cache at 32K, half
// the budget that an exact window is for.
constexpr int longest_exact = 128;
// On a GPU, whose products want long ubatches, they cost that where tokens cannot see each other's rows.
constexpr int longest_exact_on_gpu = 512;
constexpr size_t most_results = 512;  // a row of logits each

bool on_gpu(const KvCacheOptions& cache) { return !cache.runs.empty() && cache.runs.front().on_gpu(); }

// Ubatches are as short as an exact window needs them. Where in every layer exact rows are full ones and others latents, tokens of a long
// ubatch on a GPU may attend to each other's rows before these are stored.
Ubatches beside_recent(int n, const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& cache) {
    const bool sees_own_rows = on_gpu(cache) && spec.full_beside_latents() && cache.evict.policy == nullptr &&
                               cache.recent <= longest_exact_on_gpu && cache.recent_ratio == 0;
    // a longer one brings a whole window of exact tokens, beside those that have not left yet
    const int exact = std::min(n, sees_own_rows   ? std::max(longest_exact, cache.recent)
                                  : on_gpu(cache) ? longest_exact_on_gpu
                                                  : longest_exact);
    const bool grows = window_grows(cache, spec, hparams);  // more enter whole while there is room
    return {sees_own_rows || grows ? n : exact, exact, sees_own_rows};
}

Ubatches at_most(int n, const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& cache) {
    n = std::min(n, cache.n_ctx);
    Ubatches found = cache.keeps_recent() ? beside_recent(n, hparams, spec, cache) : Ubatches{n, n};
    if (cache.evict.policy != nullptr) {
        // the tokens of a ubatch take at most a quarter of the slots that a layer has for those it keeps
        found.longest = std::min(found.longest, cache.evict_budget() / 4);
        found.exact = std::min(found.exact, found.longest);
    }
    return found;
}

// Whether a length that nobody chose may be a long one. A ring has room for a ubatch, and eviction looks at its tokens.
bool may_be_long(const HParams& hparams, const KvCacheOptions& cache) {
    const auto& layers = hparams.block.layers;
    return on_gpu(cache) && cache.evict.policy == nullptr &&
           std::none_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.window > 0; });
}

}  // namespace

Ubatches Ubatches::of(const Asked& asked, const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& cache,
                      const HasRoom& has_room) {
    const auto chosen = [&](int n) {
        return at_most(asked.n_batch > 0 ? std::min(n, asked.n_batch) : n, hparams, spec, cache);
    };
    if (asked.n_ubatch > 0) return chosen(asked.n_ubatch);
    const Ubatches found = chosen(may_be_long(hparams, cache) ? long_on_gpu : usual);
    return found.longest <= usual || !has_room || has_room(found) ? found : chosen(usual);
}

size_t Ubatches::next(std::span<const int32_t> seq, std::span<const uint8_t> output, int most_exact,
                      bool settles) const {
    size_t n = std::min(static_cast<size_t>(longest), seq.size());
    const auto one_sequence = [&] {
        return std::all_of(seq.begin(), seq.begin() + static_cast<ptrdiff_t>(n),
                           [&](int32_t s) { return s == seq.front(); });
    };
    const auto whole = static_cast<size_t>(most_exact);
    if (n > whole && !(settles && sees_own_rows && one_sequence())) n = whole;
    if (n <= most_results) return n;
    const auto wanted = std::count_if(output.begin(), output.begin() + static_cast<ptrdiff_t>(n),
                                      [](uint8_t each) { return each != 0; });
    return static_cast<size_t>(wanted) > most_results ? most_results : n;
}

}  // namespace lkv
