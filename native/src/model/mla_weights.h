// Weights of a layer with multi-head latent attention (decoder/mla.h).
#pragma once

#include <string>

#include "decoder/mla.h"
#include "ggml.h"
#include "model/file_tensors.h"

namespace lkv {

// Shapes are ne; null where the file has no such tensor. rank: channels of the cached latent.
struct MlaWeights {
    ggml_tensor* q = nullptr;          // [n_embd, n_head·query], or instead:
    ggml_tensor* q_a = nullptr;        // [n_embd, q_rank]
    ggml_tensor* q_a_norm = nullptr;   // [q_rank]
    ggml_tensor* q_b = nullptr;        // [q_rank, n_head·query]
    ggml_tensor* kv_a = nullptr;       // [n_embd, kv_rank + n_rot]: the latent, and what is turned
    ggml_tensor* kv_a_norm = nullptr;  // [kv_rank]
    ggml_tensor* k_b = nullptr;        // [n_key, rank, n_head]
    ggml_tensor* v_b = nullptr;        // [rank, n_value, n_head]
};

// blk: `blk.N.`. Errors: as FileTensors::need.
MlaWeights load_mla(const FileTensors& tensors, const MlaSizes& sizes, int n_embd, int n_head, int rank,
                    const std::string& blk);

}  // namespace lkv
