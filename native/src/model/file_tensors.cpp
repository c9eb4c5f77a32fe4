#include "model/file_tensors.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "ggml-cpu.h"

namespace lkv {
namespace {

std::string shape_text(const int64_t* ne, int n_dims) {
    std::string text = "[";
    for (int i = 0; i < n_dims; i++) {
        text += (i == 0 ? "" : ", ") + std::to_string(ne[i]);
    }
    return text + "]";
}

// Refuses types that ggml cannot multiply by or add: it would end the process.
void check_type(const ggml_tensor* weight, bool is_matrix) {
    const ggml_type type = weight->type;
    if (!is_matrix && type != GGML_TYPE_F32) {
        fail("gguf", "expected ", weight->name, " in f32; got ", ggml_type_name(type));
    }
    const bool has_floats = type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    if (!has_floats || ggml_get_type_traits_cpu(type)->vec_dot == nullptr) {
        fail("gguf", "expected ", weight->name, " in a type of weights; got ", ggml_type_name(type));
    }
}

}  // namespace

FileTensors::FileTensors(const GgufFile& file, const std::string& path)
    : context_(tensor_context(ggml_tensor_overhead() * (file.tensors().size() + 1))) {
    // ggml wants the whole span that its tensors point into; it never writes to weights
    for (const auto& span : file.spans()) {
        spans_.emplace_back(ggml_backend_cpu_buffer_from_ptr(const_cast<uint8_t*>(span.data()), span.size()));
        ggml_backend_buffer_set_usage(spans_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    for (const TensorInfo& info : file.tensors()) {
        ggml_tensor* const weight = ggml_new_tensor(context_.get(), info.type, info.n_dims, info.ne);
        ggml_set_name(weight, info.name.c_str());
        const auto place = std::find_if(file.spans().begin(), file.spans().end(), [&](const auto& span) {
            return info.data >= span.data() && info.data < span.data() + span.size();
        });
        const auto index = static_cast<size_t>(place - file.spans().begin());
        if (place == file.spans().end()) {  // made of others, in memory of its own
            spans_.emplace_back(ggml_backend_cpu_buffer_from_ptr(const_cast<uint8_t*>(info.data), info.bytes));
        }
        ggml_backend_buffer_t const buffer = (place == file.spans().end() ? spans_.back() : spans_[index]).get();
        if (ggml_backend_tensor_alloc(buffer, weight, const_cast<uint8_t*>(info.data)) != GGML_STATUS_SUCCESS) {
            fail("gguf", "expected room for ", info.name, "; got a tensor past the data of ", path);
        }
        bytes_ += info.bytes;
        n_params_ += ggml_nelements(weight);
    }
}

std::vector<ggml_tensor*> FileTensors::all() const {
    std::vector<ggml_tensor*> found;
    for (ggml_tensor* t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), t)) {
        found.push_back(t);
    }
    return found;
}

ggml_tensor* FileTensors::optional(const std::string& name, std::initializer_list<int64_t> ne) const {
    ggml_tensor* const found = ggml_get_tensor(context_.get(), name.c_str());
    if (found == nullptr) {
        return nullptr;
    }
    std::array<int64_t, GGML_MAX_DIMS> expected = {1, 1, 1, 1};
    std::copy(ne.begin(), ne.end(), expected.begin());
    if (!std::equal(expected.begin(), expected.end(), found->ne)) {
        fail("gguf", "expected ", name, " with ne ", shape_text(expected.data(), static_cast<int>(ne.size())), "; got ",
             shape_text(found->ne, ggml_n_dims(found)));
    }
    check_type(found, ne.size() > 1 && !name.ends_with(".bias"));
    read_.insert(found);
    return found;
}

ggml_tensor* FileTensors::need(const std::string& name, std::initializer_list<int64_t> ne) const {
    ggml_tensor* const found = optional(name, ne);
    if (found == nullptr) {
        fail("gguf", "expected a tensor ", name, "; got none");
    }
    return found;
}

WeightFactors FileTensors::factors() const {
    const std::string end = ".scale";
    WeightFactors found;
    for (const ggml_tensor* const tensor : all()) {
        const std::string name = tensor->name;
        if (!name.ends_with(end) || read_.contains(tensor)) continue;
        const ggml_tensor* const weight = find(name.substr(0, name.size() - end.size()) + ".weight");
        if (weight != nullptr && read_.contains(weight)) found[weight] = need(name, {weight->ne[2]});
    }
    return found;
}

std::string FileTensors::unread_bias(int first, int n_layer) const {
    for (const ggml_tensor* const tensor : all()) {
        const std::string name = tensor->name;
        int layer = -1;
        int end = 0;
        if (!name.ends_with(".bias") || read_.contains(tensor)) continue;
        if (std::sscanf(name.c_str(), "blk.%d.%n", &layer, &end) != 1) continue;
        if (layer < first || layer >= first + n_layer) continue;
        const std::string role = name.substr(static_cast<size_t>(end));
        if (!role.starts_with("attn_k.") && !role.starts_with("attn_v.") && !role.starts_with("attn_qkv.")) return name;
    }
    return {};
}

std::vector<float> to_floats(const ggml_tensor* tensor) {
    std::vector<uint8_t> copy;
    const void* data = tensor->data;
    if (!ggml_backend_buffer_is_host(tensor->buffer)) {
        copy.resize(ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, copy.data(), 0, copy.size());
        data = copy.data();
    }
    std::vector<float> out(static_cast<size_t>(ggml_nelements(tensor)));
    if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(out.data(), data, ggml_nbytes(tensor));
    } else {
        ggml_get_type_traits(tensor->type)->to_float(data, out.data(), ggml_nelements(tensor));
    }
    return out;
}

}  // namespace lkv
