#include "graph/constants.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/log.h"

namespace lkv {
namespace {

// Orthonormal symmetric Hadamard matrix (Sylvester): H[i][j] = (−1)^popcount(i & j) / sqrt(n).
std::vector<float> hadamard(int n) {
    std::vector<float> h(static_cast<size_t>(n) * static_cast<size_t>(n));
    const float scale = 1.0F / std::sqrt(static_cast<float>(n));
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) {
            h[static_cast<size_t>(i) * static_cast<size_t>(n) + static_cast<size_t>(j)] =
                std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? scale : -scale;
        }
    }
    return h;
}

// ALiBi (Press et al. 2022) with the usual rule for head counts that are not a power of two.
std::vector<float> alibi_slopes(int n_head, float max_bias) {
    const int n_power = static_cast<int>(std::bit_floor(static_cast<unsigned>(n_head)));
    const double m0 = std::pow(2.0, -max_bias / n_power);
    const double m1 = std::pow(2.0, -max_bias / 2.0 / n_power);
    std::vector<float> slopes;
    for (int head = 0; head < n_head; head++) {
        slopes.push_back(
            static_cast<float>(head < n_power ? std::pow(m0, head + 1) : std::pow(m1, 2 * (head - n_power) + 1)));
    }
    return slopes;
}

}  // namespace

int hadamard_block(const HParams& h, bool value_side) {
    // K: the largest power of two that divides head_dim in every layer; V: at most 64, where smaller measured better in llama.cpp (PR 21038)
    int largest = 1 << 30;
    for (const HeadShape& heads : h.heads) largest = std::min(largest, heads.head_dim & -heads.head_dim);
    if (h.has_mla())
        largest = std::min(largest, h.mla.n_rot & -h.mla.n_rot);  // so that no block has channels of both parts
    return value_side ? std::min(64, largest) : largest;
}

GraphConstants make_graph_constants(const HParams& h, const Ropes& ropes, bool rotate_k, bool rotate_v,
                                    ggml_backend_buffer_type_t memory) {
    GraphConstants constants;
    constants.context = tensor_context(ggml_tensor_overhead() * (4 + ropes.tables.size()));
    ggml_context* const ctx = constants.context.get();
    const int block_k = hadamard_block(h, false);
    const int block_v = hadamard_block(h, true);
    for (const Rope& rope : ropes.tables) {
        const auto n = static_cast<int64_t>(rope.ggml_factors.size());
        constants.rope_factors.push_back(rope.rotates() ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n) : nullptr);
    }
    if (rotate_k) {
        constants.hadamard_k = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, block_k, block_k);
    }
    if (rotate_v) {
        constants.hadamard_v = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, block_v, block_v);
    }
    constants.buffer.reset(quietly([&] { return ggml_backend_alloc_ctx_tensors_from_buft(ctx, memory); }));
    if (constants.buffer == nullptr && ggml_get_first_tensor(ctx) != nullptr) {
        fail("memory", "expected room for the graph's constants; got none in ", ggml_backend_buft_name(memory));
    }
    const auto set = [](ggml_tensor* t, const std::vector<float>& values) {
        if (t != nullptr) {
            ggml_backend_tensor_set(t, values.data(), 0, values.size() * sizeof(float));
        }
    };
    for (size_t i = 0; i < ropes.tables.size(); i++) set(constants.rope_factors[i], ropes.tables[i].ggml_factors);
    set(constants.hadamard_k, hadamard(block_k));
    set(constants.hadamard_v, hadamard(block_v));
    if (h.max_alibi_bias > 0.0F) {
        constants.alibi_slopes = alibi_slopes(h.n_head, h.max_alibi_bias);
    }
    return constants;
}

}  // namespace lkv
