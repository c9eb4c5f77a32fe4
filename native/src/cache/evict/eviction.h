// Eviction: which tokens of the middle each layer still has. A layer keeps so many tokens of every sequence; one that goes is gone from this
// layer alone. Knows cells and masses, no rows.
//
// The middle's own cells still say which tokens the sequences have had. A layer's slots are in cells of its own, as many as it keeps of all
// sequences; the next tokens take those of evicted ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/cells.h"
#include "cache/evict/policy.h"

namespace lkv {

struct EvictOptions {
    const EvictPolicy* policy = nullptr;  // null: every token stays
    int keep = 0;  // tokens of a sequence that a layer keeps, its sinks and recent ones among them
};

// Tokens that are given up at once at least, where the budget is not small: amortises the pass over a layer.
constexpr int evicted_batch = 32;

// A token that enters the middle.
struct Arrival {
    int32_t pos;
    int32_t seq;
    int recent;  // its slot in the recent region, -1: it is new
};

class Eviction {
public:
    struct Sizes {
        int budget;    // tokens of the middle that a layer keeps of a sequence
        int latest;    // of all tokens of a sequence so many, the latest, stay
        int n_slots;   // of a layer's middle
        int n_recent;  // slots of the recent region
    };

    // in_layer: whether each layer evicts.
    Eviction(const EvictPolicy& policy, const Sizes& sizes, const std::vector<bool>& in_layer);
    void allocate();

    const EvictPolicy& policy() const { return *policy_; }
    const Sizes& sizes() const { return sizes_; }
    bool evicts(int layer) const { return layers_[static_cast<size_t>(layer)].evicts; }
    const Cells& cells(int layer) const { return layers_[static_cast<size_t>(layer)].cells; }
    size_t bytes() const;   // cells and masses, all layers
    int most_used() const;  // of a layer's slots

    // What the tokens of a slot have gathered, [slots]: of a layer's middle, and of the recent region in this layer.
    const float* mass(int layer) const { return layers_[static_cast<size_t>(layer)].mass.data(); }
    const float* recent_mass(int layer) const { return layers_[static_cast<size_t>(layer)].recent.data(); }
    float* mass(int layer) { return layers_[static_cast<size_t>(layer)].mass.data(); }
    float* recent_mass(int layer) { return layers_[static_cast<size_t>(layer)].recent.data(); }

    // Before the tokens of a ubatch are placed: how its queries count.
    void begin(std::span<const int32_t> pos, std::span<const int32_t> seq);
    std::span<const QueryWeight> weights() const { return weights_; }  // [n_tokens] of that ubatch
    // A new token of that ubatch enters this slot of the recent region.
    void enter_recent(int slot, int32_t seq);
    // These take slots in every layer; tokens of the least mass go where their sequence has no room. Whether some went. Errors: Error when
    // too few may go.
    bool enter(std::span<const Arrival> arrivals);
    int slot(int layer, size_t arrival) const { return layers_[static_cast<size_t>(layer)].entered[arrival]; }
    void release(size_t arrival);
    // After that: parts of a prompt start from no mass where the policy has it so. recent: its cells, or null.
    void forget(const Cells* recent);

    // A sequence goes, or every one.
    void remove(int seq);
    void clear();

    // For states.
    Cells& cells(int layer) { return layers_[static_cast<size_t>(layer)].cells; }
    int n_decoded(int seq) const { return decoded_[static_cast<size_t>(seq)]; }
    void resume(int seq, int n_decoded, int32_t newest);

private:
    struct Layer {
        bool evicts;
        Cells cells;
        std::vector<float> mass;    // [n_slots]
        std::vector<float> recent;  // [n_recent]
        std::vector<int> entered;   // slots of the last arrivals
    };

    float first_mass(int32_t seq) const;
    bool make_room(Layer& layer, int32_t seq, int n_arrivals);

    const EvictPolicy* policy_;
    Sizes sizes_;
    std::vector<Layer> layers_;
    std::vector<QueryWeight> weights_;
    std::array<bool, max_sequences> prompts_{};    // of the ubatch: several tokens of the sequence come at once
    std::array<int, max_sequences> decoded_{};     // tokens of the sequence that came one by one
    std::array<int32_t, max_sequences> newest_{};  // position of the sequence's latest token
};

}  // namespace lkv
