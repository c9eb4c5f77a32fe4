// The sizes of multi-head latent attention (MLA, arXiv 2405.04434). A token's row is what all heads read: n_rot turned channels of the
// key, then a latent of kv_rank channels, of which a layer's attn_k_b and attn_v_b make every head's other key channels, and its values.
#pragma once

#include <string>

#include "gguf/reader.h"

namespace lkv {

struct MlaSizes {
    int kv_rank = 0;  // 0: the model has no MLA
    int q_rank = 0;   // of the latent that queries are made of, where the file has its tensors
    int n_rot = 0;    // turned channels of a key
    int n_key = 0;    // other channels of a head's key
    int n_value = 0;  // channels of a head's value
    int64_t row() const { return int64_t{n_rot} + kv_rank; }
    int64_t query() const { return int64_t{n_key} + n_rot; }  // of one head; its n_rot turned channels come last
};

// From the stock keys `<architecture>.attention.*`, which an architecture without MLA lacks. Errors: Error when one is missing, out of
// range, or contradicts another, and for older files, whose attn_kv_b holds both factors.
MlaSizes read_mla(const GgufFile& file, const std::string& architecture);

}  // namespace lkv
