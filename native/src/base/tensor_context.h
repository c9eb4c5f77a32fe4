// A ggml context of tensors without data, in memory of our own: ggml_init ends the program where its own allocation fails.
#pragma once

#include <cstddef>
#include <memory>

#include "ggml.h"

namespace lkv {

struct FreeTensorContext {
    std::unique_ptr<std::byte[]> memory;

    void operator()(ggml_context* context) const { ggml_free(context); }
};
using TensorContext = std::unique_ptr<ggml_context, FreeTensorContext>;

// bytes: of ggml_tensor_overhead() a tensor, and of a graph's. Throws std::bad_alloc.
inline TensorContext tensor_context(size_t bytes) {
    auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    ggml_context* const context = ggml_init({bytes, memory.get(), /*no_alloc=*/true});
    return {context, FreeTensorContext{std::move(memory)}};
}

}  // namespace lkv
