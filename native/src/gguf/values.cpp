// Typed access to the keys of a parsed GGUF.
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/error.h"
#include "gguf/reader.h"

namespace lkv {
namespace {

template <typename T>
T load(std::span<const uint8_t> elements, size_t i) {
    T value;
    std::memcpy(&value, elements.data() + i * sizeof(T), sizeof(T));
    return value;
}

template <typename T>
constexpr std::string_view wanted() {
    if constexpr (std::is_same_v<T, bool>) {
        return "a boolean";
    } else if constexpr (std::is_same_v<T, std::string_view>) {
        return "a string";
    } else if constexpr (std::is_same_v<T, float>) {
        return "a float";
    } else if constexpr (std::is_same_v<T, uint32_t>) {
        return "an integer from 0 to 2^32 - 1";
    } else if constexpr (std::is_same_v<T, int32_t>) {
        return "an integer from -2^31 to 2^31 - 1";
    } else {
        static_assert(std::is_same_v<T, uint64_t>);
        return "an integer from 0 to 2^64 - 1";
    }
}

template <typename T>
bool holds(const GgufValue& value, size_t i) {
    if constexpr (std::is_same_v<T, bool>) {
        return value.type == GgufType::boolean;
    } else if constexpr (std::is_same_v<T, std::string_view>) {
        return value.type == GgufType::string;
    } else if constexpr (std::is_same_v<T, float>) {
        return value.is_float();
    } else {
        if (!value.is_integer()) {
            return false;
        }
        const uint64_t bits = value.integer_bits(i);
        if (value.is_negative(i)) {
            return std::is_signed_v<T> &&
                   static_cast<int64_t>(bits) >= static_cast<int64_t>(std::numeric_limits<T>::min());
        }
        return bits <= static_cast<uint64_t>(std::numeric_limits<T>::max());
    }
}

template <typename T>
T convert(const GgufValue& value, size_t i) {
    if constexpr (std::is_same_v<T, bool>) {
        return value.boolean(i);
    } else if constexpr (std::is_same_v<T, std::string_view>) {
        return value.strings[i];
    } else if constexpr (std::is_same_v<T, float>) {
        return static_cast<float>(value.number(i));
    } else {
        return static_cast<T>(value.integer_bits(i));
    }
}

std::string described(const GgufValue& value, size_t i) {
    if (value.is_integer()) {
        return value.is_negative(i) ? concat(static_cast<int64_t>(value.integer_bits(i)))
                                    : concat(value.integer_bits(i));
    }
    return concat("a value of type ", gguf_type_name(value.type));
}

}  // namespace

bool GgufValue::is_integer() const {
    return type != GgufType::boolean && type != GgufType::string && type != GgufType::array && !is_float();
}

bool GgufValue::is_negative(size_t i) const {
    const bool is_signed =
        type == GgufType::i8 || type == GgufType::i16 || type == GgufType::i32 || type == GgufType::i64;
    return is_signed && static_cast<int64_t>(integer_bits(i)) < 0;
}

uint64_t GgufValue::integer_bits(size_t i) const {
    switch (type) {
        case GgufType::u8:
            return load<uint8_t>(elements, i);
        case GgufType::i8:
            return static_cast<uint64_t>(static_cast<int64_t>(load<int8_t>(elements, i)));
        case GgufType::u16:
            return load<uint16_t>(elements, i);
        case GgufType::i16:
            return static_cast<uint64_t>(static_cast<int64_t>(load<int16_t>(elements, i)));
        case GgufType::u32:
            return load<uint32_t>(elements, i);
        case GgufType::i32:
            return static_cast<uint64_t>(static_cast<int64_t>(load<int32_t>(elements, i)));
        case GgufType::u64:
        case GgufType::i64:
            return load<uint64_t>(elements, i);
        default:
            fail("gguf", "expected an integer in ", quoted(key), "; got ", gguf_type_name(type));
    }
}

double GgufValue::number(size_t i) const {
    if (!is_float()) {
        fail("gguf", "expected a float in ", quoted(key), "; got ", gguf_type_name(type));
    }
    return type == GgufType::f32 ? load<float>(elements, i) : load<double>(elements, i);
}

bool GgufValue::boolean(size_t i) const {
    if (type != GgufType::boolean) {
        fail("gguf", "expected a boolean in ", quoted(key), "; got ", gguf_type_name(type));
    }
    return elements[i] != 0;
}

const GgufValue* GgufFile::find(std::string_view key) const {
    const auto found = value_index_.find(key);
    return found == value_index_.end() ? nullptr : &values_[found->second];
}

const TensorInfo* GgufFile::find_tensor(std::string_view name) const {
    const auto found = tensor_index_.find(name);
    return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

const TensorInfo& GgufFile::tensor(std::string_view name) const {
    const TensorInfo* const found = find_tensor(name);
    if (found == nullptr) {
        fail("gguf", "expected the tensor ", quoted(name), "; got none of that name among ", tensors_.size(), where_);
    }
    return *found;
}

template <typename T>
std::optional<T> GgufFile::find_as(std::string_view key) const {
    const GgufValue* const value = find(key);
    if (value == nullptr) {
        return std::nullopt;
    }
    if (value->is_array) {
        fail("gguf", "expected ", wanted<T>(), " in ", quoted(key), "; got an array of ", value->count, where_);
    }
    if (!holds<T>(*value, 0)) {
        fail("gguf", "expected ", wanted<T>(), " in ", quoted(key), "; got ", described(*value, 0), where_);
    }
    return convert<T>(*value, 0);
}

template <typename T>
std::optional<std::vector<T>> GgufFile::find_array(std::string_view key) const {
    const GgufValue* const value = find(key);
    if (value == nullptr) {
        return std::nullopt;
    }
    if (!value->is_array) {
        fail("gguf", "expected an array in ", quoted(key), "; got a single ", gguf_type_name(value->type), where_);
    }
    std::vector<T> out;
    out.reserve(value->count);
    for (uint64_t i = 0; i < value->count; ++i) {
        if (!holds<T>(*value, i)) {
            fail("gguf", "expected ", wanted<T>(), " in ", quoted(key), "[", i, "]; got ", described(*value, i),
                 where_);
        }
        out.push_back(convert<T>(*value, i));
    }
    return out;
}

template <typename T>
T GgufFile::required(std::string_view key, std::optional<T> found) const {
    if (!found) {
        fail("gguf", "expected the key ", quoted(key), "; got none of that name among ", values_.size(), where_);
    }
    return *std::move(found);
}

#define LKV_GGUF_ACCESS(suffix, T)                                                                  \
    T GgufFile::get_##suffix(std::string_view key) const { return required(key, find_as<T>(key)); } \
    std::optional<T> GgufFile::find_##suffix(std::string_view key) const { return find_as<T>(key); }

#define LKV_GGUF_ARRAY_ACCESS(suffix, T)                                                        \
    std::vector<T> GgufFile::get_##suffix##_array(std::string_view key) const {                 \
        return required(key, find_array<T>(key));                                               \
    }                                                                                           \
    std::optional<std::vector<T>> GgufFile::find_##suffix##_array(std::string_view key) const { \
        return find_array<T>(key);                                                              \
    }

LKV_GGUF_ACCESS(u64, uint64_t)
LKV_GGUF_ACCESS(u32, uint32_t)
LKV_GGUF_ACCESS(i32, int32_t)
LKV_GGUF_ACCESS(f32, float)
LKV_GGUF_ACCESS(bool, bool)
LKV_GGUF_ACCESS(string, std::string_view)
LKV_GGUF_ARRAY_ACCESS(u32, uint32_t)
LKV_GGUF_ARRAY_ACCESS(i32, int32_t)
LKV_GGUF_ARRAY_ACCESS(f32, float)
LKV_GGUF_ARRAY_ACCESS(bool, bool)
LKV_GGUF_ARRAY_ACCESS(string, std::string_view)

#undef LKV_GGUF_ACCESS
#undef LKV_GGUF_ARRAY_ACCESS

}  // namespace lkv
