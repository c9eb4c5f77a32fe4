// Full rows become latents on the host, where tokens leave the exact window: a product with E, by ggml.
#pragma once

#include "cache/kv_cache.h"
#include "ggml-backend.h"
#include "model/model.h"

namespace lkv {

class GgmlRowEncoder final : public RowEncoder {
public:
    GgmlRowEncoder(const Model& model, ggml_backend_t backend) : model_(model), backend_(backend) {}
    void encode(int layer, bool value_side, std::span<const float> rows, int n, std::span<float> z) override;

private:
    const Model& model_;
    ggml_backend_t backend_;
};

}  // namespace lkv
