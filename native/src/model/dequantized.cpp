#include "model/dequantized.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "ggml-backend.h"

namespace lkv {
namespace {

constexpr int64_t floats_at_once = 1 << 20;

void set_type(ggml_tensor* weight, ggml_type type) {
    weight->type = type;
    weight->nb[0] = ggml_type_size(type);
    weight->nb[1] = ggml_row_size(type, weight->ne[0]);
    for (int i = 2; i < GGML_MAX_DIMS; i++) weight->nb[i] = weight->nb[i - 1] * static_cast<size_t>(weight->ne[i - 1]);
}

}  // namespace

std::optional<ggml_type> parse_weights(const std::string& word) {
    if (word == "stored") return std::nullopt;
    if (word == "f32") return GGML_TYPE_F32;
    if (word == "f16") return GGML_TYPE_F16;
    fail("--weights", "expected stored, f32 or f16; got ", quoted(word));
}

std::string weights_word(std::optional<ggml_type> type) { return type ? ggml_type_name(*type) : "stored"; }

Dequantized::Dequantized(std::span<ggml_tensor* const> weights, ggml_type type) {
    for (ggml_tensor* const weight : weights) {
        if (weight->type == GGML_TYPE_F32 || weight->type == type) continue;
        stored_[weight] = weight->type;
        set_type(weight, type);
    }
}

void Dequantized::put(ggml_tensor* weight, const void* source) const {
    const auto found = stored_.find(weight);
    if (found == stored_.end()) {
        ggml_backend_tensor_set(weight, source, 0, ggml_nbytes(weight));
        return;
    }
    const ggml_type_traits* const from = ggml_get_type_traits(found->second);
    const int64_t width = weight->ne[0];
    const int64_t n_rows = ggml_nrows(weight);
    const int64_t rows_at_once = std::clamp<int64_t>(floats_at_once / width, 1, n_rows);
    const size_t stored_row = ggml_row_size(found->second, width);
    std::vector<float> values(static_cast<size_t>(rows_at_once * width));
    std::vector<ggml_fp16_t> halves(weight->type == GGML_TYPE_F16 ? values.size() : 0);
    for (int64_t row = 0; row < n_rows; row += rows_at_once) {
        const int64_t n = std::min(rows_at_once, n_rows - row) * width;
        from->to_float(static_cast<const uint8_t*>(source) + static_cast<size_t>(row) * stored_row, values.data(), n);
        if (!halves.empty()) ggml_fp32_to_fp16_row(values.data(), halves.data(), n);
        const void* const data = halves.empty() ? static_cast<const void*>(values.data()) : halves.data();
        ggml_backend_tensor_set(weight, data, static_cast<size_t>(row) * weight->nb[1],
                                static_cast<size_t>(n) * weight->nb[0]);
    }
}

}  // namespace lkv
