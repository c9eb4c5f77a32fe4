// attn_mass: what the slots of a layer gather from a batch's queries. The contract of every implementation (CPU, CUDA).
//
//   mass[t] = Σ over queries i, heads h of weight_i · softmax_t((x(i, h, t) + ζ(h, i, t)) / temperature_i)
//
// x(i, h, t) is the score of ops/latent_attn.h (scaled, capped, with ALiBi), over the slots that query i sees, in all regions of all problems;
// the attention sink takes part without noise. ζ is gumbel() of cache/evict/gumbel.h where there is noise, else 0.
#pragma once

#include <span>

#include "cache/evict/policy.h"
#include "ops/latent_attn.h"

namespace lkv {

struct AttnMassParams {
    std::span<const LatentAttnParams> problems;  // of the same queries; `out` is not used
    const QueryWeight* weights;                  // [n_tokens]
    bool has_noise;
    int layer;  // which noise

    // Slots of all regions, one region after the other.
    int n_slots() const {
        int n = 0;
        for (const LatentAttnParams& p : problems) {
            for (int r = 0; r < p.n_regions; r++) n += p.regions[r].n_slots;
        }
        return n;
    }
};

}  // namespace lkv
