// What a session's graphs read and no step changes: RoPE factors, Hadamard matrices, ALiBi slopes.
#pragma once

#include <vector>

#include "base/tensor_context.h"
#include "decoder/rope.h"
#include "ggml-cpp.h"

namespace lkv {

// Tensors live in a buffer of their own.
struct GraphConstants {
    TensorContext context;
    ggml_backend_buffer_ptr buffer;
    std::vector<ggml_tensor*> rope_factors;  // [n_rot/2] of each of the model's tables; null: nothing is turned
    ggml_tensor* hadamard_k = nullptr;       // [b, b], orthonormal and symmetric; null = K is not rotated
    ggml_tensor* hadamard_v = nullptr;
    std::vector<float> alibi_slopes;  // [n_head]
};

// Channels that the rotation of full rows mixes.
int hadamard_block(const HParams& h, bool value_side);

// rotate_k/rotate_v: `full` rows are stored Hadamard-rotated (quantized formats), as llama.cpp does for quantized caches.
GraphConstants make_graph_constants(const HParams& hparams, const Ropes& ropes, bool rotate_k, bool rotate_v,
                                    ggml_backend_buffer_type_t memory);

}  // namespace lkv
