#include "cache/evict/eviction.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace lkv {
namespace {

constexpr float stays = std::numeric_limits<float>::infinity();  // the mass of a token that no policy gives up

uint64_t bit(int seq) { return uint64_t{1} << seq; }

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
    newest_.fill(-1);
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

void Eviction::begin(std::span<const int32_t> pos, std::span<const int32_t> seq) {
    std::array<int, max_sequences> to_come{};
    for (const int32_t s : seq) to_come[static_cast<size_t>(s)]++;
    weights_.clear();
    for (size_t i = 0; i < seq.size(); i++) {
        const auto s = static_cast<size_t>(seq[i]);
        if (newest_[s] < pos[i]) newest_[s] = pos[i];
    }
    for (size_t s = 0; s < to_come.size(); s++) {
        prompts_[s] = to_come[s] > 1;
        decoded_[s] += to_come[s] == 1 ? 1 : 0;
    }
    for (const int32_t s : seq) {
        const auto at = static_cast<size_t>(s);
        weights_.push_back(policy_->weigh({--to_come[at], decoded_[at]}));
    }
}

float Eviction::first_mass(int32_t seq) const {
    return policy_->prompt_only && !prompts_[static_cast<size_t>(seq)] ? stays : 0.0F;
}

void Eviction::enter_recent(int slot, int32_t seq) {
    for (Layer& layer : layers_) {
        if (layer.evicts) layer.recent[static_cast<size_t>(slot)] = first_mass(seq);
    }
}

bool Eviction::enter(std::span<const Arrival> arrivals) {
    bool some_went = false;
    std::array<int, max_sequences> n_arrivals{};
    for (const Arrival& arrival : arrivals) n_arrivals[static_cast<size_t>(arrival.seq)]++;
    for (Layer& layer : layers_) {
        if (!layer.evicts) continue;
        for (int32_t s = 0; s < max_sequences; s++) {
            if (n_arrivals[static_cast<size_t>(s)] == 0) continue;
            some_went = make_room(layer, s, n_arrivals[static_cast<size_t>(s)]) || some_went;
        }
    }
    for (Layer& layer : layers_) {
        if (!layer.evicts) continue;
        layer.entered.clear();
        for (const Arrival& arrival : arrivals) {
            const int slot = layer.cells.claim(arrival.pos, bit(arrival.seq));
            layer.mass[static_cast<size_t>(slot)] =
                arrival.recent < 0 ? first_mass(arrival.seq) : layer.recent[static_cast<size_t>(arrival.recent)];
            layer.entered.push_back(slot);
        }
    }
    return some_went;
}

bool Eviction::make_room(Layer& layer, int32_t seq, int n_arrivals) {
    std::vector<Held> held;
    for (int slot = 0; slot < layer.cells.end(); slot++) {
        if ((layer.cells.seq(slot) & bit(seq)) != 0) {
            held.push_back({layer.cells.pos(slot), slot, layer.mass[static_cast<size_t>(slot)], 0.0F});
        }
    }
    const int over = static_cast<int>(held.size()) + n_arrivals - sizes_.budget;
    if (over <= 0) return false;
    std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.pos < b.pos; });
    pool(held, policy_->pool);
    const int32_t first_latest = newest_[static_cast<size_t>(seq)] - sizes_.latest + 1;
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
    for (int i = 0; i < n_gone; i++) layer.cells.release(held[static_cast<size_t>(i)].slot);
    return true;
}

void Eviction::release(size_t arrival) {
    for (Layer& layer : layers_) {
        if (layer.evicts && arrival < layer.entered.size()) layer.cells.release(layer.entered[arrival]);
    }
}

void Eviction::forget(const Cells* recent) {
    if (!policy_->prompt_only) return;
    uint64_t mask = 0;
    for (int s = 0; s < max_sequences; s++) mask |= prompts_[static_cast<size_t>(s)] ? bit(s) : 0;
    const auto clear = [mask](const Cells& cells, std::vector<float>& mass) {
        for (int slot = 0; slot < cells.end(); slot++) {
            float& of = mass[static_cast<size_t>(slot)];
            if ((cells.seq(slot) & mask) != 0 && of != stays) of = 0.0F;
        }
    };
    for (Layer& layer : layers_) {
        if (!layer.evicts) continue;
        clear(layer.cells, layer.mass);
        if (recent != nullptr) clear(*recent, layer.recent);
    }
}

void Eviction::remove(int seq) {
    for (Layer& layer : layers_) {
        for (int slot = 0; slot < layer.cells.end(); slot++) {
            if ((layer.cells.seq(slot) & bit(seq)) != 0) layer.cells.release(slot);
        }
    }
    resume(seq, 0, -1);
}

void Eviction::clear() {
    for (Layer& layer : layers_) layer.cells.clear();
    decoded_.fill(0);
    newest_.fill(-1);
}

void Eviction::resume(int seq, int n_decoded, int32_t newest) {
    decoded_[static_cast<size_t>(seq)] = n_decoded;
    newest_[static_cast<size_t>(seq)] = newest;
}

}  // namespace lkv
