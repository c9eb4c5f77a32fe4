// The tensors of a file as ggml tensors over its mapped bytes, found by name and checked.
#pragma once

#include <initializer_list>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/tensor_context.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf/reader.h"

namespace lkv {

// Weight -> what its products are multiplied with: f32 [1], or [n_expert] of experts.
using WeightFactors = std::unordered_map<const ggml_tensor*, ggml_tensor*>;

class FileTensors {
public:
    FileTensors() = default;
    // Errors: Error for a tensor past the data of `path`.
    FileTensors(const GgufFile& file, const std::string& path);

    // Shapes are ne. Errors of both: Error for another shape, or a type that ggml cannot compute with; of need() for no such tensor.
    ggml_tensor* need(const std::string& name, std::initializer_list<int64_t> ne) const;
    ggml_tensor* optional(const std::string& name, std::initializer_list<int64_t> ne) const;  // null: no such tensor
    // The tensor in any shape and type; null: no such tensor.
    const ggml_tensor* find(const std::string& name) const { return ggml_get_tensor(context_.get(), name.c_str()); }

    // Factors (NVFP4) of the weights that were asked for. Errors: Error for another shape.
    WeightFactors factors() const;
    // A bias of n_layer layers from the first one on that nobody asked for, though results need it; "": none. K's and V's are left out, as a sidecar
    // replaces them.
    std::string unread_bias(int first, int n_layer) const;

    std::vector<ggml_tensor*> all() const;
    bool was_asked_for(const ggml_tensor* tensor) const { return read_.contains(tensor); }
    size_t bytes() const { return bytes_; }
    int64_t n_params() const { return n_params_; }

private:
    std::vector<ggml_backend_buffer_ptr> spans_;  // one for every span of the file
    TensorContext context_;
    mutable std::set<const ggml_tensor*> read_;
    size_t bytes_ = 0;
    int64_t n_params_ = 0;
};

// A tensor's values, wherever it lies.
std::vector<float> to_floats(const ggml_tensor* tensor);

}  // namespace lkv
