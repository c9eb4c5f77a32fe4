#include "gguf/content_hash.h"

#include <algorithm>
#include <vector>

#include "base/sha256.h"

namespace lkv {
namespace {

constexpr size_t piece = 4096;  // bytes, a page
constexpr size_t n_pieces = 8;

template <typename T>
void add_number(Sha256& hash, T value) {
    hash.add({reinterpret_cast<const uint8_t*>(&value), sizeof(value)});  // little-endian, as this build is
}

void add_text(Sha256& hash, std::string_view text) {
    add_number(hash, uint64_t{text.size()});
    hash.add({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

// Adds a small tensor whole; of a larger one the first piece, the last, and pieces evenly between.
void add_sample(Sha256& hash, const TensorInfo& tensor) {
    if (tensor.bytes <= piece * n_pieces) {
        hash.add({tensor.data, tensor.bytes});
        return;
    }
    for (size_t i = 0; i < n_pieces; i++) {
        hash.add({tensor.data + i * (tensor.bytes - piece) / (n_pieces - 1), piece});
    }
}

bool shapes_the_model(std::string_view key, const std::string& own) {
    return key == "general.architecture" || key.starts_with(own) || key.starts_with("latentkv.block.") ||
           key.starts_with("latentkv.rope.");
}

}  // namespace

std::string content_hash(const GgufFile& file) {
    const std::string own = std::string(file.get_string("general.architecture")) + ".";
    std::vector<const GgufValue*> values;
    for (const GgufValue& value : file.values()) {
        if (shapes_the_model(value.key, own)) values.push_back(&value);
    }
    std::vector<const TensorInfo*> tensors;
    for (const TensorInfo& tensor : file.tensors()) {
        tensors.push_back(&tensor);
    }
    std::sort(values.begin(), values.end(), [](auto* a, auto* b) { return a->key < b->key; });
    std::sort(tensors.begin(), tensors.end(), [](auto* a, auto* b) { return a->name < b->name; });

    Sha256 hash;
    add_text(hash, "latentkv base 1");
    for (const GgufValue* value : values) {
        hash.add(value->raw);
    }
    for (const TensorInfo* tensor : tensors) {
        add_text(hash, tensor->name);
        add_number(hash, static_cast<uint32_t>(tensor->type));
        for (const int64_t n : tensor->ne) {
            add_number(hash, n);
        }
        add_sample(hash, *tensor);
    }
    return hash.hex();
}

}  // namespace lkv
