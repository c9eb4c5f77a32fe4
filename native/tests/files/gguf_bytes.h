// GGUF files written by hand for tests, good and bad: nothing here checks what it is told.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ggml.h"
#include "gguf/reader.h"

namespace lkv::test {

using Bytes = std::vector<uint8_t>;
using lkv::GgufType;

template <typename T>
void put(Bytes& out, T value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    out.insert(out.end(), bytes, bytes + sizeof(T));
}

inline void put_string(Bytes& out, std::string_view text) {
    put<uint64_t>(out, text.size());
    out.insert(out.end(), text.begin(), text.end());
}

struct GgufBytes {
    uint32_t version = 3;
    uint64_t alignment = 32;  // of the data; write the key yourself
    Bytes values;             // entries
    uint64_t n_values = 0;
    Bytes infos;  // tensor entries
    uint64_t n_tensors = 0;
    Bytes data;

    template <typename T>
    GgufBytes& value(std::string_view key, GgufType type, T v) {
        begin(key, type);
        put(values, v);
        return *this;
    }

    GgufBytes& string(std::string_view key, std::string_view text) {
        begin(key, GgufType::string);
        put_string(values, text);
        return *this;
    }

    template <typename T>
    GgufBytes& array(std::string_view key, GgufType type, const std::vector<T>& elements) {
        begin_array(key, type, elements.size());
        for (const T& element : elements) put(values, element);
        return *this;
    }

    GgufBytes& strings(std::string_view key, const std::vector<std::string>& elements) {
        begin_array(key, GgufType::string, elements.size());
        for (const auto& element : elements) put_string(values, element);
        return *this;
    }

    void begin(std::string_view key, GgufType type) {
        ++n_values;
        put_string(values, key);
        put(values, static_cast<uint32_t>(type));
    }

    void begin_array(std::string_view key, GgufType type, uint64_t count) {
        begin(key, GgufType::array);
        put(values, static_cast<uint32_t>(type));
        put(values, count);
    }

    GgufBytes& info(std::string_view name, const std::vector<int64_t>& ne, uint32_t type, uint64_t offset) {
        ++n_tensors;
        put_string(infos, name);
        put(infos, static_cast<uint32_t>(ne.size()));
        for (int64_t n : ne) put(infos, n);
        put(infos, type);
        put(infos, offset);
        return *this;
    }

    // A tensor of zeros behind the ones already there.
    GgufBytes& tensor(std::string_view name, const std::vector<int64_t>& ne, ggml_type type) {
        data.resize((data.size() + alignment - 1) / alignment * alignment);
        info(name, ne, type, data.size());
        size_t bytes = ggml_row_size(type, ne[0]);
        for (size_t i = 1; i < ne.size(); ++i) bytes *= static_cast<size_t>(ne[i]);
        data.resize(data.size() + bytes);
        return *this;
    }

    Bytes bytes() const {
        Bytes out = {'G', 'G', 'U', 'F'};
        put(out, version);
        put(out, n_tensors);
        put(out, n_values);
        out.insert(out.end(), values.begin(), values.end());
        out.insert(out.end(), infos.begin(), infos.end());
        if (n_tensors > 0) out.resize((out.size() + alignment - 1) / alignment * alignment);
        out.insert(out.end(), data.begin(), data.end());
        return out;
    }
};

// A small file with every value type, arrays and four tensors.
inline GgufBytes sample_file() {
    GgufBytes file;
    file.string("general.architecture", "llama")
        .value<uint32_t>("general.alignment", GgufType::u32, 32)
        .value<uint8_t>("t.u8", GgufType::u8, 200)
        .value<int8_t>("t.i8", GgufType::i8, -5)
        .value<uint16_t>("t.u16", GgufType::u16, 60000)
        .value<int16_t>("t.i16", GgufType::i16, -300)
        .value<uint32_t>("t.u32", GgufType::u32, 4000000000u)
        .value<int32_t>("t.i32", GgufType::i32, -70000)
        .value<uint64_t>("t.u64", GgufType::u64, uint64_t{1} << 63)
        .value<int64_t>("t.i64", GgufType::i64, -(int64_t{1} << 40))
        .value<float>("t.f32", GgufType::f32, 1.5f)
        .value<double>("t.f64", GgufType::f64, 0.1)
        .value<uint8_t>("t.bool", GgufType::boolean, 1)
        .array<uint32_t>("t.ranks", GgufType::u32, {16, 32, 48})
        .array<float>("t.energy", GgufType::f32, {0.5f, 0.25f})
        .array<uint8_t>("t.flags", GgufType::boolean, {1, 0, 1})
        .array<int64_t>("t.empty", GgufType::i64, {})
        .strings("t.words", {"full", "", "rebuild"})
        .tensor("token_embd.weight", {32, 3}, GGML_TYPE_F32)
        .tensor("blk.0.attn_k_a.weight", {64, 2, 2}, GGML_TYPE_Q8_0)
        .tensor("blk.0.attn_k_a.bias", {5}, GGML_TYPE_F16)
        .tensor("output_norm.weight", {3}, GGML_TYPE_F32);
    return file;
}

// A copy of bytes that ends where the process's memory ends: a read past it crashes in every build, sanitized or not.
class GuardedBytes {
public:
    explicit GuardedBytes(std::span<const uint8_t> bytes) : size_(bytes.size()) {
        const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
        const size_t usable = (size_ + page - 1) / page * page;
        mapped_ = usable + page;
        void* const base = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || ::mprotect(static_cast<uint8_t*>(base) + usable, page, PROT_NONE) != 0) {
            throw std::runtime_error("mmap failed");
        }
        base_ = static_cast<uint8_t*>(base);
        begin_ = base_ + usable - size_;
        if (size_ > 0) std::memcpy(begin_, bytes.data(), size_);
    }
    ~GuardedBytes() { ::munmap(base_, mapped_); }
    GuardedBytes(const GuardedBytes&) = delete;
    GuardedBytes& operator=(const GuardedBytes&) = delete;

    uint8_t& operator[](size_t i) { return begin_[i]; }
    std::span<const uint8_t> first(size_t n) const { return {begin_, n}; }
    std::span<const uint8_t> all() const { return {begin_, size_}; }

private:
    uint8_t* base_ = nullptr;
    uint8_t* begin_ = nullptr;
    size_t size_;
    size_t mapped_ = 0;
};

// Reads every key and the edges of every tensor; the sum keeps the reads from being optimised away.
inline uint64_t touch(const lkv::GgufFile& file) {
    uint64_t sum = file.version();
    for (const auto& value : file.values()) {
        sum += value.raw.front() + value.raw.back() + value.key.size();
        for (std::string_view text : value.strings) sum += text.empty() ? 0 : static_cast<uint8_t>(text.back());
        for (uint64_t i = 0; i < (value.strings.empty() ? value.count : 0); ++i) {
            sum += value.is_integer() ? value.integer_bits(i)
                   : value.is_float() ? value.number(i) > 0
                                      : value.boolean(i);
        }
        sum += file.find(value.key) == &value;
    }
    for (const auto& tensor : file.tensors()) {
        sum += tensor.data[0] + tensor.data[tensor.bytes - 1];
        sum += file.find_tensor(tensor.name) == &tensor;
    }
    return sum;
}

}  // namespace lkv::test
