#include "cache/placement/eviction.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "cache/placement/placement.h"

namespace lkv {
namespace {

constexpr float stays = std::numeric_limits<float>::infinity();  // the mass of a token that no policy gives up

struct Held {
    int32_t pos;
    int slot;
    float mass;
    float pooled;
};

// pooled: the mean mass of `width` neighbours in the order of positions, fewer at the ends and beside tokens that stay anyway.
void pool(std::vector<Held>& held, int width) {
    const auto n = static_cast<int>(held.size());
    for (int i = 0; i < n; i++) {
        float sum = 0.0F;
        int count = 0;
        for (int j = std::max(0, i - width / 2); j < std::min(n, i + width / 2 + 1); j++) {
            if (held[static_cast<size_t>(j)].mass == stays) continue;
            sum += held[static_cast<size_t>(j)].mass;
            count++;
        }
        held[static_cast<size_t>(i)].pooled = count == 0 ? stays : sum / static_cast<float>(count);
    }
}

}  // namespace

Eviction::Eviction(const EvictPolicy& policy, const Sizes& sizes, const std::vector<bool>& in_layer)
    : policy_(&policy), sizes_(sizes) {
    for (const bool evicts : in_layer) layers_.push_back({evicts, Cells(evicts ? sizes.n_slots : 0), {}, {}, {}});
}

void Eviction::allocate() {
    for (Layer& layer : layers_) {
        if (!layer.evicts) continue;
        layer.cells.allocate();
        layer.mass.assign(static_cast<size_t>(sizes_.n_slots), 0.0F);
        layer.recent.assign(static_cast<size_t>(sizes_.n_recent), 0.0F);
    }
}

size_t Eviction::bytes() const {
    const auto n_layers = static_cast<size_t>(
        std::count_if(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.evicts; }));
    const auto n_slots = static_cast<size_t>(sizes_.n_slots);
    return n_layers *
           (n_slots * (Cells::bytes_per_slot() + sizeof(float)) + static_cast<size_t>(sizes_.n_recent) * sizeof(float));
}

int Eviction::most_used() const {
    int most = 0;
    for (const Layer& layer : layers_) most = std::max(most, layer.cells.n_used());
    return most;
}

// What is known of the sequences once these tokens have come.
Eviction::Seen Eviction::seen_with(const NewTokens& tokens) const {
    Seen seen = seen_;
    std::array<int, max_sequences> n_new{};
    for (size_t i = 0; i < tokens.size(); i++) {
        const auto s = static_cast<size_t>(tokens.seq[i]);
        n_new[s]++;
        seen.newest[s] = std::max(seen.newest[s], tokens.pos[i]);
    }
    for (size_t s = 0; s < n_new.size(); s++) {
        if (n_new[s] == 1) seen.decoded[s] = std::min(seen.decoded[s] + 1, most_decoded);
    }
    return seen;
}

void Eviction::weigh(std::span<const int32_t> seq) {
    std::array<int, max_sequences> to_come{};
    for (const int32_t s : seq) to_come[static_cast<size_t>(s)]++;
    for (size_t s = 0; s < to_come.size(); s++) prompts_[s] = to_come[s] > 1;
    weights_.clear();
    for (const int32_t s : seq) {
        const auto at = static_cast<size_t>(s);
        weights_.push_back(policy_->weigh({--to_come[at], seen_.decoded[at]}));
    }
}

float Eviction::first_mass(int32_t seq) const {
    return policy_->prompt_only && !prompts_[static_cast<size_t>(seq)] ? stays : 0.0F;
}

bool Eviction::enter(const Placement& all, const NewTokens& tokens, std::span<SlotRef> slots) {
    std::vector<Arrival> arrivals;
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i].region == all.middle()) arrivals.push_back({tokens.pos[i], tokens.seq[i], -1});
    }
    const Seen seen = seen_with(tokens);
    const Leaving leaving = room_for(arrivals, seen);
    seen_before_ = std::exchange(seen_, seen);
    weigh(tokens.seq);
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i].region != all.recent()) continue;
        for (Layer& layer : layers_) {
            if (layer.evicts) layer.recent[static_cast<size_t>(slots[i].slot)] = first_mass(tokens.seq[i]);
        }
    }
    const bool some_went = exchange(leaving, arrivals);
    int n = 0;
    for (SlotRef& at : slots) {
        if (at.region == all.middle()) at.arrival = n++;
    }
    forget_prompts(all.recent() < 0 ? nullptr : &all.cells(all.recent()));
    return some_went;
}

void Eviction::demote(const Placement& all, std::span<RowMove> moves) {
    const Cells& recent = all.cells(all.recent());
    std::vector<Arrival> arrivals;
    for (const RowMove& move : moves) {
        arrivals.push_back({recent.pos(move.from), std::countr_zero(recent.seq(move.from)), move.from});
    }
    exchange(room_for(arrivals, seen_), arrivals);
}

// For every layer, the slots whose tokens have to go.
Eviction::Leaving Eviction::room_for(std::span<const Arrival> arrivals, const Seen& seen) const {
    std::array<int, max_sequences> n_arrivals{};
    for (const Arrival& arrival : arrivals) n_arrivals[static_cast<size_t>(arrival.seq)]++;
    Leaving leaving(layers_.size());
    for (size_t il = 0; il < layers_.size(); il++) {
        for (int32_t s = 0; layers_[il].evicts && s < max_sequences; s++) {
            const int n = n_arrivals[static_cast<size_t>(s)];
            if (n > 0) choose(layers_[il], s, n, seen, leaving[il]);
        }
    }
    return leaving;
}

bool Eviction::exchange(const Leaving& leaving, std::span<const Arrival> arrivals) {
    bool some_went = false;
    for (size_t il = 0; il < layers_.size(); il++) {
        Layer& layer = layers_[il];
        layer.entered.clear();
        if (!layer.evicts) continue;
        some_went = some_went || !leaving[il].empty();
        for (const int slot : leaving[il]) layer.cells.release(slot);
        for (const Arrival& arrival : arrivals) {
            // The lowest: a rounding may decide what goes, so the order of a sequence's sums must not depend on other sequences.
            const int slot = layer.cells.lowest_free();
            layer.cells.put(slot, {arrival.pos, bit(arrival.seq)});
            layer.mass[static_cast<size_t>(slot)] =
                arrival.recent < 0 ? first_mass(arrival.seq) : layer.recent[static_cast<size_t>(arrival.recent)];
            layer.entered.push_back(slot);
        }
    }
    return some_went;
}

void Eviction::choose(const Layer& layer, int32_t seq, int n_arrivals, const Seen& seen, std::vector<int>& gone) const {
    const int over = layer.cells.count(seq) + n_arrivals - sizes_.budget;
    if (over <= 0) return;
    std::vector<Held> held;
    for (const int slot : layer.cells.slots_of(seq)) {
        held.push_back({layer.cells.pos(slot), slot, layer.mass[static_cast<size_t>(slot)], 0.0F});
    }
    std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.pos < b.pos; });
    pool(held, policy_->pool);
    const int32_t first_latest = seen.newest[static_cast<size_t>(seq)] - sizes_.latest + 1;
    std::erase_if(held, [&](const Held& token) { return token.mass == stays || token.pos >= first_latest; });
    const auto n_held = static_cast<int>(held.size());
    if (over > n_held) {
        fail("keep_tokens", "expected room for ", n_arrivals, " more tokens beside the latest ", sizes_.latest,
             policy_->prompt_only ? " and those generated, which stay" : "", "; got ", n_held,
             " that may go; raise --keep-tokens");
    }
    const int n_gone = std::min(n_held, std::max(over, std::min(evicted_batch, sizes_.budget / 8)));
    const auto less = [](const Held& a, const Held& b) {
        return a.pooled != b.pooled ? a.pooled < b.pooled : a.pos < b.pos;
    };
    std::nth_element(held.begin(), held.begin() + (n_gone - 1), held.end(), less);
    for (int i = 0; i < n_gone; i++) gone.push_back(held[static_cast<size_t>(i)].slot);
}

uint64_t Eviction::n_visited() const {
    uint64_t n = 0;
    for (const Layer& layer : layers_) n += layer.cells.n_visited();
    return n;
}

void Eviction::release(const SlotRef& at) {
    for (Layer& layer : layers_) {
        if (at.arrival >= 0 && static_cast<size_t>(at.arrival) < layer.entered.size()) {
            layer.cells.release(layer.entered[static_cast<size_t>(at.arrival)]);
        }
    }
}

// Parts of a prompt start from no mass where the policy has it so. recent: its cells, or null.
void Eviction::forget_prompts(const Cells* recent) {
    uint64_t mask = 0;
    for (int s = 0; s < max_sequences; s++) mask |= prompts_[static_cast<size_t>(s)] ? bit(s) : 0;
    if (!policy_->prompt_only || mask == 0) return;
    const auto clear = [mask](const Cells& cells, std::vector<float>& mass) {
        for (int slot = 0; slot < cells.end(); slot++) {
            float& gathered = mass[static_cast<size_t>(slot)];
            if ((cells.seq(slot) & mask) != 0 && gathered != stays) gathered = 0.0F;
        }
    };
    for (Layer& layer : layers_) {
        if (!layer.evicts) continue;
        clear(layer.cells, layer.mass);
        if (recent != nullptr) clear(*recent, layer.recent);
    }
}

void Eviction::forget(int seq) {
    for (Layer& layer : layers_) {
        for (const int slot : layer.cells.slots_of(seq)) layer.cells.release(slot);
    }
    resume(seq, 0, -1);
}

void Eviction::clear() {
    for (Layer& layer : layers_) layer.cells.clear();
    seen_ = {};
}

void Eviction::resume(int seq, int n_decoded, int32_t newest) {
    seen_.decoded[static_cast<size_t>(seq)] = n_decoded;
    seen_.newest[static_cast<size_t>(seq)] = newest;
}

}  // namespace lkv
