// GGUFs from before May 2025: a layer's attn_kv_b holds both factors of multi-head latent attention.
#pragma once

#include <vector>

#include "decoder/mla.h"
#include "ggml-cpp.h"
#include "gguf/reader.h"

namespace lkv {

// Both factors of every layer in place of its attn_kv_b, as tensors of the list; their memory. None where the file has no such tensor.
// Errors: Error for such a tensor of another shape or type.
std::vector<ggml_backend_buffer_ptr> split_mla_factors(GgufFile& file, const MlaSizes& sizes, int n_head);

}  // namespace lkv
