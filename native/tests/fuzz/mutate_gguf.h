// Seeded mutations of what a GGUF says: its keys, values and tensors, written anew so that lengths and places fit.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "files/gguf_bytes.h"
#include "fuzz/mutate.h"
#include "gguf_schema.h"

namespace lkv::test {

// A GGUF taken apart. Nothing here has to be consistent.
struct GgufPieces {
    struct Value {
        std::string key;
        GgufType type = GgufType::u32;
        bool is_array = false;
        uint64_t count = 1;
        Bytes elements;
        std::vector<std::string> strings;
    };
    struct Tensor {
        std::string name;
        std::vector<int64_t> ne;
        uint32_t type = 0;
        Bytes data;
        bool lies_elsewhere = false;
        uint64_t offset = 0;
    };
    std::vector<Value> values;
    std::vector<Tensor> tensors;

    explicit GgufPieces(const lkv::GgufFile& file) {
        for (const auto& value : file.values()) {
            values.push_back({std::string(value.key), value.type, value.is_array, value.count,
                              Bytes(value.elements.begin(), value.elements.end()),
                              std::vector<std::string>(value.strings.begin(), value.strings.end())});
        }
        for (const auto& tensor : file.tensors()) {
            tensors.push_back({tensor.name, std::vector<int64_t>(tensor.ne, tensor.ne + tensor.n_dims), tensor.type,
                               Bytes(tensor.data, tensor.data + tensor.bytes), false, 0});
        }
    }

    Bytes bytes() const {
        GgufBytes file;
        for (const Value& value : values) {
            if (value.is_array) {
                file.begin_array(value.key, value.type, value.count);
            } else {
                file.begin(value.key, value.type);
            }
            for (const std::string& text : value.strings) put_string(file.values, text);
            file.values.insert(file.values.end(), value.elements.begin(), value.elements.end());
        }
        for (const Tensor& tensor : tensors) {
            file.data.resize((file.data.size() + file.alignment - 1) / file.alignment * file.alignment);
            file.info(tensor.name, tensor.ne, tensor.type, tensor.lies_elsewhere ? tensor.offset : file.data.size());
            Bytes data = tensor.data;
            data.resize(size_of(tensor));
            file.data.insert(file.data.end(), data.begin(), data.end());
        }
        return file.bytes();
    }

    // Bytes by shape and type, if there is such a tensor and it is a small one.
    static size_t size_of(const Tensor& tensor) {
        constexpr int64_t most = 1 << 16;
        const auto type = static_cast<ggml_type>(tensor.type);
        if (tensor.type >= GGML_TYPE_COUNT || ggml_blck_size(type) < 1) return tensor.data.size();
        int64_t bytes = static_cast<int64_t>(ggml_type_size(type));
        for (size_t i = 0; i < tensor.ne.size(); i++) {
            const int64_t n = i == 0 ? tensor.ne[i] / ggml_blck_size(type) : tensor.ne[i];
            if (n < 1 || n > most / bytes) return tensor.data.size();
            bytes *= n;
        }
        return static_cast<size_t>(bytes);
    }
};

inline std::string word(Rng& rng) {
    const auto of = [&rng](const auto& words) { return std::string(words[below(rng, words.size())]); };
    switch (below(rng, 6)) {
        case 0:
            return of(lkv::schema::k_path_words);
        case 1:
            return of(lkv::schema::v_path_words);
        case 2:
            return of(lkv::schema::prefill_words);
        case 3:
            return of(lkv::schema::position_words);
        default:
            return of(lkv::schema::format_words);
    }
}

// Elements of a fixed-size type, all of them `n` bytes wide.
inline size_t width_of(GgufType type) {
    static constexpr std::array<size_t, 13> widths = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return widths[static_cast<size_t>(type)];
}

inline void mutate_element(GgufPieces::Value& value, Rng& rng) {
    if (!value.strings.empty()) {
        std::string& text = value.strings[below(rng, value.strings.size())];
        text = below(rng, 3) == 0 ? value.strings[below(rng, value.strings.size())] : word(rng);
        return;
    }
    const size_t width = width_of(value.type);
    if (width == 0 || value.elements.size() < width) return;
    uint8_t* const at = value.elements.data() + below(rng, value.elements.size() / width) * width;
    if (value.type == GgufType::f32) {
        static constexpr std::array<uint32_t, 8> floats = {0x7fc00000, 0x7f800000, 0xff800000, 0x80000000,
                                                           1,          0xbf800000, 0x7f7fffff, 0x3f800000};
        std::memcpy(at, &floats[below(rng, floats.size())], sizeof(float));
    } else {
        const uint64_t number = below(rng, 2) ? 16 * below(rng, 6) : edge(rng);
        std::memcpy(at, &number, width);
    }
}

inline void mutate_length(GgufPieces::Value& value, Rng& rng) {
    value.is_array = true;
    const size_t width = width_of(value.type);
    const bool longer = below(rng, 2) > 0;
    if (!value.strings.empty()) {
        if (longer) {
            value.strings.push_back(value.strings[below(rng, value.strings.size())]);
        } else {
            value.strings.pop_back();
        }
        value.count = value.strings.size();
    } else if (width > 0 && value.elements.size() >= width) {
        const Bytes first(value.elements.begin(), value.elements.begin() + static_cast<ptrdiff_t>(width));
        if (longer) {
            value.elements.insert(value.elements.end(), first.begin(), first.end());
        } else {
            value.elements.resize(value.elements.size() - width);
        }
        value.count = value.elements.size() / width;
    }
}

inline void mutate_value(GgufPieces& file, Rng& rng) {
    if (file.values.empty()) return;
    GgufPieces::Value& value = file.values[below(rng, file.values.size())];
    switch (below(rng, 8)) {
        case 0:
            std::swap(value, file.values.back());
            file.values.pop_back();
            break;
        case 1: {  // what another key says
            std::string key = value.key;
            value = file.values[below(rng, file.values.size())];
            value.key = std::move(key);
            break;
        }
        case 2:
            value.key = lkv::key::all[below(rng, lkv::key::all.size())];
            break;
        case 3: {  // what another key says, under a third
            GgufPieces::Value more = file.values[below(rng, file.values.size())];
            more.key = lkv::key::all[below(rng, lkv::key::all.size())];
            file.values.push_back(std::move(more));
            break;
        }
        case 4:
            if (value.strings.empty()) value.type = static_cast<GgufType>(below(rng, 13));
            break;
        case 5:
            mutate_length(value, rng);
            break;
        default:
            mutate_element(value, rng);
            break;
    }
}

inline void mutate_tensor(GgufPieces& file, Rng& rng) {
    if (file.tensors.empty()) return;
    GgufPieces::Tensor& tensor = file.tensors[below(rng, file.tensors.size())];
    const auto any = [&]() -> GgufPieces::Tensor& { return file.tensors[below(rng, file.tensors.size())]; };
    switch (below(rng, 9)) {
        case 0:
            std::swap(tensor, file.tensors.back());
            file.tensors.pop_back();
            break;
        case 1:
            std::swap(tensor.name, any().name);
            break;
        case 2: {  // another leaf, layer or letter
            std::string& name = tensor.name;
            const std::string other = any().name;
            const size_t at = name.rfind('.');
            const size_t from = other.rfind('.');
            if (at != std::string::npos && from != std::string::npos) name = name.substr(0, at) + other.substr(from);
            break;
        }
        case 3:
            if (!tensor.name.empty()) tensor.name[below(rng, tensor.name.size())] = "kvqabe0123_."[below(rng, 12)];
            break;
        case 4:
            tensor.type = static_cast<uint32_t>(below(rng, GGML_TYPE_COUNT + 1));
            break;
        case 5:
            std::swap(tensor.ne[0], tensor.ne[below(rng, tensor.ne.size())]);
            if (below(rng, 2)) tensor.ne.resize(below(rng, 5) + 1, 1);
            break;
        case 6: {
            int64_t& n = tensor.ne[below(rng, tensor.ne.size())];
            n = below(rng, 2) ? static_cast<int64_t>(edge(rng))
                              : static_cast<int64_t>(static_cast<uint64_t>(n) + 16 * below(rng, 5) - 32);
            break;
        }
        case 7:
            tensor.lies_elsewhere = true;
            tensor.offset = below(rng, 2) ? edge(rng) : 32 * below(rng, 64);
            break;
        default: {  // numbers that are none, or large
            const std::array<uint8_t, 4> pattern = {0xff, 0x7f, 0x00, 0xfc};
            for (size_t i = below(rng, 64); i < tensor.data.size(); i += 1 + below(rng, 64)) {
                tensor.data[i] = pattern[below(rng, pattern.size())];
            }
            break;
        }
    }
}

// Leaves bytes that are no GGUF as they are.
inline void mutate_gguf(Bytes& bytes, Rng& rng) {
    Bytes changed;
    try {
        GgufPieces file{lkv::GgufFile(bytes)};
        for (size_t m = 1 + below(rng, 8) / 6; m > 0; --m) {
            if (below(rng, 5) < 3) {
                mutate_value(file, rng);
            } else {
                mutate_tensor(file, rng);
            }
        }
        changed = file.bytes();
    } catch (const lkv::Error&) {
        mutate(bytes, rng);
        return;
    }
    bytes = std::move(changed);
}

// The file without one of its keys, or of its tensors.
inline std::vector<Bytes> less_of_gguf(const Bytes& bytes) {
    std::vector<Bytes> all;
    try {
        const GgufPieces whole{lkv::GgufFile(bytes)};
        for (size_t i = whole.tensors.size(); i > 0; i--) {
            GgufPieces less = whole;
            less.tensors.erase(less.tensors.begin() + static_cast<ptrdiff_t>(i - 1));
            all.push_back(less.bytes());
        }
        for (size_t i = whole.values.size(); i > 0; i--) {
            GgufPieces less = whole;
            less.values.erase(less.values.begin() + static_cast<ptrdiff_t>(i - 1));
            all.push_back(less.bytes());
        }
    } catch (const lkv::Error&) {
        return all;
    }
    return all;
}

}  // namespace lkv::test
