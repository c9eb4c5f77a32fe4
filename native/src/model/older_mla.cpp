#include "model/older_mla.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "ggml-backend.h"

namespace lkv {
namespace {

using Buffers = std::vector<ggml_backend_buffer_ptr>;

constexpr std::string_view both_leaf = "attn_kv_b.weight";

// A tensor of three dimensions in memory of its own.
TensorInfo placed(std::string name, ggml_type type, std::array<int64_t, 3> ne, Buffers& memory) {
    TensorInfo info{};
    info.name = std::move(name);
    info.type = type;
    info.n_dims = 3;
    std::copy(ne.begin(), ne.end(), info.ne);
    info.ne[3] = 1;
    info.bytes = ggml_row_size(type, ne[0]) * static_cast<size_t>(ne[1] * ne[2]);
    memory.emplace_back(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), info.bytes));
    if (memory.back() == nullptr) fail("memory", "expected room for ", info.name, "; got none");
    info.data = static_cast<const uint8_t*>(ggml_backend_buffer_get_base(memory.back().get()));
    return info;
}

// What multiplies keys, transposed: blocks of weights lie along the latent, so these become f16.
void put_keys(const TensorInfo& both, const MlaSizes& sizes, TensorInfo& keys) {
    const int64_t rank = sizes.kv_rank;
    const size_t row_bytes = ggml_row_size(both.type, rank);
    const ggml_type_traits* const from = ggml_get_type_traits(both.type);
    const ggml_type_traits* const to = ggml_get_type_traits(keys.type);
    std::vector<float> row(static_cast<size_t>(rank));
    std::vector<float> head(static_cast<size_t>(rank * sizes.n_key));  // [rank][n_key]
    const size_t head_bytes = ggml_row_size(keys.type, sizes.n_key) * static_cast<size_t>(rank);
    for (int64_t h = 0; h < keys.ne[2]; h++) {
        for (int64_t d = 0; d < sizes.n_key; d++) {
            const uint8_t* const at =
                both.data + static_cast<size_t>(h * (sizes.n_key + sizes.n_value) + d) * row_bytes;
            if (from->to_float != nullptr) {
                from->to_float(at, row.data(), rank);
            } else {
                std::copy_n(reinterpret_cast<const float*>(at), rank, row.data());
            }
            for (int64_t c = 0; c < rank; c++)
                head[static_cast<size_t>(c * sizes.n_key + d)] = row[static_cast<size_t>(c)];
        }
        auto* const put = const_cast<uint8_t*>(keys.data) + static_cast<size_t>(h) * head_bytes;
        if (to->from_float_ref != nullptr) {
            to->from_float_ref(head.data(), put, static_cast<int64_t>(head.size()));
        } else {
            std::copy(head.begin(), head.end(), reinterpret_cast<float*>(put));
        }
    }
}

// What makes values, as it is.
void put_values(const TensorInfo& both, const MlaSizes& sizes, TensorInfo& values) {
    const size_t row_bytes = ggml_row_size(both.type, sizes.kv_rank);
    const size_t head_bytes = static_cast<size_t>(sizes.n_value) * row_bytes;
    for (int64_t h = 0; h < values.ne[2]; h++) {
        const auto first = static_cast<size_t>(h * (sizes.n_key + sizes.n_value) + sizes.n_key);
        std::copy_n(both.data + first * row_bytes, head_bytes,
                    const_cast<uint8_t*>(values.data) + static_cast<size_t>(h) * head_bytes);
    }
}

}  // namespace

std::vector<ggml_backend_buffer_ptr> split_mla_factors(GgufFile& file, const MlaSizes& sizes, int n_head) {
    Buffers memory;
    std::vector<TensorInfo> tensors;
    for (const TensorInfo& both : std::vector<TensorInfo>(file.tensors())) {
        if (!both.name.ends_with(both_leaf)) {
            tensors.push_back(both);
            continue;
        }
        const std::string blk = both.name.substr(0, both.name.size() - both_leaf.size());
        if (file.find_tensor(blk + "attn_k_b.weight") != nullptr) continue;  // a sidecar's
        const int64_t rows = int64_t{n_head} * (sizes.n_key + sizes.n_value);
        if (both.n_dims != 2 || both.ne[0] != sizes.kv_rank || both.ne[1] != rows) {
            fail("gguf", "expected ", both.name, " with ne [", sizes.kv_rank, ", ", rows, "]; got [", both.ne[0], ", ",
                 both.ne[1], "]");
        }
        const bool is_f32 = both.type == GGML_TYPE_F32;
        if (!is_f32 && ggml_get_type_traits(both.type)->to_float == nullptr) {
            fail("gguf", "expected ", both.name, " in a type of weights; got ", ggml_type_name(both.type));
        }
        const ggml_type of_keys = is_f32 || both.type == GGML_TYPE_BF16 ? both.type : GGML_TYPE_F16;
        TensorInfo keys = placed(blk + "attn_k_b.weight", of_keys, {sizes.n_key, sizes.kv_rank, n_head}, memory);
        TensorInfo values = placed(blk + "attn_v_b.weight", both.type, {sizes.kv_rank, sizes.n_value, n_head}, memory);
        put_keys(both, sizes, keys);
        put_values(both, sizes, values);
        tensors.push_back(std::move(keys));
        tensors.push_back(std::move(values));
    }
    file.set_tensors(std::move(tensors));
    return memory;
}

}  // namespace lkv
