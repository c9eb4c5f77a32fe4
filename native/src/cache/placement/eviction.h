// Eviction: which tokens of the middle each layer still has. Every layer keeps a fixed number of tokens of each sequence, and evicts
// others on its own. Eviction is a kind of placement: it knows cells and masses, and no rows.
//
// The middle's cells still list every token of a sequence. Each layer has cells of its own for the tokens that it keeps of all sequences;
// new tokens take the slots of evicted ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/evict/policy.h"
#include "cache/placement/selection.h"

namespace lkv {

struct EvictOptions {
    const EvictPolicy* policy = nullptr;  // null: every token stays
    int keep = 0;  // tokens of a sequence that a layer keeps, its sinks and recent ones among them
};

// The fewest tokens that are evicted at once, unless the budget is small: amortises the pass over a layer.
constexpr int evicted_batch = 32;

// A token that enters the middle.
struct Arrival {
    int32_t pos;
    int32_t seq;
    int recent;  // its slot in the recent region, -1: it is new
};

class Eviction : public Selection {
public:
    struct Sizes {
        int budget;    // tokens of the middle that a layer keeps of a sequence
        int latest;    // of all tokens of a sequence so many, the latest, stay
        int n_slots;   // of a layer's middle
        int n_recent;  // slots of the recent region
    };

    // in_layer: whether each layer evicts.
    Eviction(const EvictPolicy& policy, const Sizes& sizes, const std::vector<bool>& in_layer);

    const EvictPolicy& policy() const { return *policy_; }
    const Sizes& sizes() const { return sizes_; }
    bool evicts(int layer) const { return layers_[static_cast<size_t>(layer)].evicts; }
    size_t bytes() const;   // cells and masses, all layers
    int most_used() const;  // of a layer's slots

    // What the tokens of a slot have gathered, [slots]: of a layer's middle, and of the recent region in this layer.
    const float* mass(int layer) const { return layers_[static_cast<size_t>(layer)].mass.data(); }
    const float* recent_mass(int layer) const { return layers_[static_cast<size_t>(layer)].recent.data(); }
    float* mass(int layer) { return layers_[static_cast<size_t>(layer)].mass.data(); }
    float* recent_mass(int layer) { return layers_[static_cast<size_t>(layer)].recent.data(); }

    std::span<const QueryWeight> weights() const {
        return weights_;
    }  // [n_tokens] of the last ubatch: how its queries count

    void allocate() override;
    const Cells& cells(int layer) const override { return layers_[static_cast<size_t>(layer)].cells; }
    int slot_of(const SlotRef& at, int layer) const override {
        return layers_[static_cast<size_t>(layer)].entered[static_cast<size_t>(at.arrival)];
    }
    uint64_t n_visited() const override;
    // Tokens of the middle take slots in every layer; those of the least mass are evicted where their sequence has no room. True: some
    // were. Errors: Error when too few may be evicted; nothing has changed then.
    bool enter(const Placement& all, const NewTokens& tokens, std::span<SlotRef> slots) override;
    void demote(const Placement& all, std::span<RowMove> moves) override;
    void release(const SlotRef& at) override;
    void take_back() override { seen_ = seen_before_; }
    Cells* follower() override { return nullptr; }
    void forget(int seq) override;
    void clear() override;
    bool is_complete(const Placement&, uint64_t) const override { return true; }

    // For states.
    Cells& cells(int layer) { return layers_[static_cast<size_t>(layer)].cells; }
    static constexpr int most_decoded = 1 << 30;  // the count stays there
    int n_decoded(int seq) const { return seen_.decoded[static_cast<size_t>(seq)]; }
    void resume(int seq, int n_decoded, int32_t newest);

private:
    struct Layer {
        bool evicts;
        Cells cells;
        std::vector<float> mass;    // [n_slots]
        std::vector<float> recent;  // [n_recent]
        std::vector<int> entered;   // slots of the last arrivals
    };

    // For every sequence.
    struct Seen {
        Seen() { newest.fill(-1); }
        std::array<int, max_sequences> decoded{};     // tokens that came one by one
        std::array<int32_t, max_sequences> newest{};  // position of the latest token
    };
    using Leaving = std::vector<std::vector<int>>;  // slots by layer

    Seen seen_with(const NewTokens& tokens) const;
    void weigh(std::span<const int32_t> seq);
    float first_mass(int32_t seq) const;
    Leaving room_for(std::span<const Arrival> arrivals, const Seen& seen) const;
    void choose(const Layer& layer, int32_t seq, int n_arrivals, const Seen& seen, std::vector<int>& gone) const;
    bool exchange(const Leaving& leaving, std::span<const Arrival> arrivals);
    void forget_prompts(const Cells* recent);

    const EvictPolicy* policy_;
    Sizes sizes_;
    std::vector<Layer> layers_;
    std::vector<QueryWeight> weights_;
    std::array<bool, max_sequences> prompts_{};  // of the ubatch: several tokens of the sequence come at once
    Seen seen_;
    Seen seen_before_;  // the last ubatch
};

}  // namespace lkv
