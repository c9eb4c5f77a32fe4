// What the file says about the cache: per layer, for K and V, the path, the groups, their ranks and segments.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cache/formats.h"
#include "cache/spec/master.h"
#include "decoder/hparams.h"
#include "gguf/reader.h"

namespace lkv {

using schema::KPath;
using schema::Prefill;
using schema::VPath;

struct TensorSpec {
    int group = 1;                                            // KV heads that share one latent
    std::vector<int> ranks;                                   // [n_kv / group]
    std::vector<std::vector<int>> segments;                   // [n_kv / group][n_segments] widths
    std::optional<std::vector<std::vector<Format>>> formats;  // the file's plan, same shape
    std::optional<float> energy;                              // kept share, informational
    bool encoded = false;  // form E: latents are E of the projection's output; else form A, of the layer's input

    // Full rows: one segment per head.
    static TensorSpec full(int n_kv, int head_dim);
    // Full rows of MLA: a segment of turned channels, then those of the latent.
    static TensorSpec mla(const MlaSizes& sizes);
    int rank_sum() const;
    int rank_max() const;
};

struct LayerCacheSpec {
    KPath k_path = KPath::full;
    VPath v_path = VPath::full;
    TensorSpec k;
    TensorSpec v;
    // With MLA the first channels of V's rows, which are of the key alone: a key is the whole row as it is. Else 0.
    int key_only = 0;

    // Whether tokens have rows: not in one that reads another layer's, or mixes them by a recurrence.
    bool has_rows() const { return !v.ranks.empty(); }
    // Whether K has no rows: keys are V's rows, or made of them.
    bool key_of_value() const { return k_path == KPath::value; }
    bool is_mla() const { return key_only > 0; }
    bool rebuilds_key_of_value() const { return key_of_value() && !is_mla(); }
    // With MLA: channels of the latent that every head's values are made of.
    int mla_rank() const { return v.ranks.front() - key_only; }
    // Whether exact tokens are stored as full rows of K and V, unlike those of the middle.
    bool exact_is_full() const;
    // Whether those keys are stored before bias, norm and RoPE.
    bool exact_keys_are_raw() const { return exact_is_full() && (k_path == KPath::rebuild || key_of_value()); }
};

struct CacheSpec {
    std::vector<LayerCacheSpec> layers;
    int sink = 0;
    int recent = 0;
    float recent_ratio = 0;  // share of the sequence after its sinks
    Format sink_format = Format::f16;
    Format recent_format = Format::f16;
    Prefill prefill = Prefill::eager;
    int fitted_context = 0;  // 0 = any
    bool plain = true;       // every layer full/full
    std::optional<Master> master;

    // Whether in every layer exact tokens are stored as full rows, others as latents.
    bool full_beside_latents() const;
    // One tensor's segments over all layers and groups, in the file's order.
    std::vector<int> widths(TensorSpec LayerCacheSpec::* tensor) const;
    // Replaces the file's plan: one format per segment, in the same order. flag: the option that messages name.
    // Errors: Error for another number of formats, a stored segment after a dropped one, or a width that a format cannot take.
    void set_formats(TensorSpec LayerCacheSpec::* tensor, std::span<const Format> formats, std::string_view flag);
};

// Full rows in every layer that makes some.
CacheSpec full_rows(const HParams& hparams);

// Errors: every refusal of docs/gguf.md.
CacheSpec read_cache_spec(const GgufFile& file, const HParams& hparams);

std::string_view path_name(KPath path);
std::string_view path_name(VPath path);

}  // namespace lkv
