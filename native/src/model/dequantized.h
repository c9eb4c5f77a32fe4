// Weights that memory holds in another type than the file does. ggml rounds what a quantized or bf16 weight is multiplied with to 8 bits, so
// that the last bit of a cached number moves logits by thousandths of a nat; with f32 weights nothing is rounded on the CPU.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#include "ggml.h"

namespace lkv {

// "f32", "f16", or none for "stored". Errors: Error for another word.
std::optional<ggml_type> parse_weights(const std::string& word);

std::string weights_word(std::optional<ggml_type> type);

class Dequantized {
public:
    Dequantized() = default;
    // Weights get this type, but f32 ones keep theirs; their bytes are the file's until put().
    Dequantized(std::span<ggml_tensor* const> weights, ggml_type type);

    bool has(const ggml_tensor* weight) const { return stored_.contains(weight); }
    // Fills a weight, which has its place, with the file's bytes.
    void put(ggml_tensor* weight, const void* source) const;

private:
    std::unordered_map<const ggml_tensor*, ggml_type> stored_;
};

}  // namespace lkv
