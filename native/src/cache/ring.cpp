// The ring: the middle of layers with a sliding window, as many slots as their windows need. Its tokens are those of the middle
// that some sequence's next token may see in the longest of these windows, and as many older ones as there is room for: what is removed from
// the end of a sequence brings them back into sight.
#include <algorithm>

#include "base/error.h"
#include "cache/kv_cache.h"

namespace lkv {
namespace {

constexpr int least_freed = 64;  // slots that are given back at once: a device copies the cells anew each time

uint64_t bit(int seq) { return uint64_t{1} << seq; }

// Calls with every sequence of a mask.
template <typename F>
void each_sequence(uint64_t mask, F&& visit) {
    for (int s = 0; mask != 0; s++, mask >>= 1) {
        if ((mask & 1) != 0) visit(s);
    }
}

}  // namespace

int KvCache::choose_ring(const HParams& hparams) {
    const int64_t whole = whole_tiles(options_.n_ctx);
    const auto slots = [this](int window) {
        return whole_tiles(int64_t{window} * options_.n_seq_max + options_.n_ubatch);
    };
    const auto& layers = hparams.block.layers;
    for (size_t il = 0; il < layers.size(); il++) {
        const int window = layers[il].window;
        in_ring_[il] = window > 0 && slots(window) < whole;
        if (in_ring_[il]) ring_window_ = std::max(ring_window_, window);
    }
    return ring_window_ == 0 ? 0 : static_cast<int>(slots(ring_window_));
}

int KvCache::ring_share(size_t n_tokens) const {
    if (!ring_) return 0;
    if (n_tokens <= static_cast<size_t>(options_.n_ubatch)) return options_.n_ubatch;  // they may see each other there
    return std::max(ring_window_, ring_->cells.capacity() / options_.n_seq_max);
}

std::vector<int32_t> KvCache::next_positions() const {
    std::vector<int32_t> next(max_sequences, 0);
    each_slot([&](const Cells& cells, int slot) {
        each_sequence(cells.seq(slot), [&](int s) {
            int32_t& of = next[static_cast<size_t>(s)];
            of = std::max(of, cells.pos(slot) + 1);
        });
    });
    return next;
}

bool KvCache::is_seen_again(int32_t pos, uint64_t seq_mask, std::span<const int32_t> next) const {
    bool seen = false;
    each_sequence(seq_mask, [&](int s) { seen = seen || next[static_cast<size_t>(s)] - pos < ring_window_; });
    return seen;
}

void KvCache::make_ring_room(int n) {
    Cells& cells = ring_->cells;
    if (cells.n_free() >= n) {
        return;
    }
    const std::vector<int32_t> next = next_positions();
    std::vector<std::pair<int32_t, int>>
        gone;  // how far a token is from the nearest of its sequences' next ones, its slot
    for (int slot = 0; slot < cells.end(); slot++) {
        if (!cells.used(slot) || is_seen_again(cells.pos(slot), cells.seq(slot), next)) {
            continue;
        }
        int32_t distance = INT32_MAX;
        each_sequence(cells.seq(slot),
                      [&](int s) { distance = std::min(distance, next[static_cast<size_t>(s)] - cells.pos(slot)); });
        gone.emplace_back(distance, slot);
    }
    std::sort(gone.begin(), gone.end(), std::greater<>());
    const int wanted = std::max(n, least_freed) - cells.n_free();
    for (size_t i = 0; i < gone.size() && static_cast<int>(i) < wanted; i++) {
        cells.release(gone[i].second);
    }
    cells_version_++;
    if (cells.n_free() < n) {
        fail("context", "expected room for ", n, " tokens in the windows of ", options_.n_seq_max,
             " sequences; raise n_seq_max; got ", cells.n_free());
    }
}

bool KvCache::ring_is_complete() const {
    const std::vector<int32_t> next = next_positions();
    using Token = std::pair<int, int32_t>;  // sequence, position
    std::vector<Token> wanted;
    std::vector<Token> there;
    const auto add = [&](const Cells& cells, std::vector<Token>& tokens) {
        for (int slot = 0; slot < cells.end(); slot++) {
            each_sequence(cells.seq(slot), [&](int s) {
                if (is_seen_again(cells.pos(slot), bit(s), next)) tokens.emplace_back(s, cells.pos(slot));
            });
        }
    };
    add(regions_.back().cells, wanted);
    add(ring_->cells, there);
    std::sort(wanted.begin(), wanted.end());
    std::sort(there.begin(), there.end());
    return wanted == there;
}

std::vector<RowMove> KvCache::moves_of(int layer, std::span<const RowMove> moved) const {
    std::vector<RowMove> moves;
    for (size_t i = 0; i < moved.size(); i++) {
        const RowMove& move = moved[i];
        const int to = in_ring(layer) ? move.ring : evicts(layer) ? eviction_->slot(layer, i) : move.to;
        if (to >= 0) moves.push_back({move.from, to, move.ring});
    }
    return moves;
}

}  // namespace lkv
