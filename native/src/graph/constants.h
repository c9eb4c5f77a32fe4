// Constants that a session's graphs read: RoPE factors, Hadamard matrices, ALiBi slopes.
#pragma once

#include <vector>

#include "base/tensor_context.h"
#include "decoder/rope.h"
#include "ggml-cpp.h"

namespace lkv {

// The tensors have their own buffer.
struct GraphConstants {
    TensorContext context;
    ggml_backend_buffer_ptr buffer;
    std::vector<ggml_tensor*> rope_factors;  // Rope::ggml_factors of each of the model's tables; null: no RoPE
    ggml_tensor* hadamard_k = nullptr;       // [b, b], orthonormal and symmetric; null = K is not rotated
    ggml_tensor* hadamard_v = nullptr;
    std::vector<float> alibi_slopes;  // [n_head]
};

// Channels that the Hadamard rotation of full rows mixes.
int hadamard_block(const HParams& h, bool value_side);

// rotate_k/rotate_v: `full` rows are stored Hadamard-rotated (quantized formats), as llama.cpp does for quantized caches.
GraphConstants make_graph_constants(const HParams& hparams, const Ropes& ropes, bool rotate_k, bool rotate_v,
                                    ggml_backend_buffer_type_t memory);

}  // namespace lkv
