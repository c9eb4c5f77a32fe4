// GGUF files from strangers: every count, length, offset and type is checked before it is used, and memory grows only
// with bytes that are really there. Format: the GGUF specification in the ggml repository, versions 2 and 3,
// little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "ggml.h"

namespace lkv {

enum class GgufType : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

std::string_view gguf_type_name(GgufType type);

// One key and its value. Scalars are arrays of one element here; `is_array` tells them apart.
struct GgufValue {
    std::string_view key;
    GgufType type;  // type of the elements, never `array`
    bool is_array;
    uint64_t count;                         // elements
    std::span<const uint8_t> elements;      // fixed-size types: [count] packed, unaligned
    std::vector<std::string_view> strings;  // type string: [count]
    std::span<const uint8_t> raw;           // the whole entry as stored: key, types, value

    // Element i of a fixed-size type, converted. i must be below count; the type must be of the named kind.
    bool is_integer() const;
    bool is_float() const { return type == GgufType::f32 || type == GgufType::f64; }
    bool is_negative(size_t i = 0) const;       // integers
    uint64_t integer_bits(size_t i = 0) const;  // integers, sign-extended to 64 bits
    double number(size_t i = 0) const;          // f32, f64
    bool boolean(size_t i = 0) const;
};

struct TensorInfo {
    std::string name;
    ggml_type type;
    int n_dims;
    int64_t ne[4];    // ne[0] is contiguous; 1 beyond n_dims
    uint64_t offset;  // from the start of the tensor data
    size_t bytes;
    const uint8_t* data;  // inside the file's bytes, at least 8-byte aligned when the file is
    bool joined;          // the tensor comes from a joined file (GgufFile::join)
};

class GgufFile {
public:
    // A whole GGUF: one file, or all shards of a split one of which `path` names any (NAME-00001-of-0000N.gguf, as llama.cpp splits).
    // Keys are the first shard's, tensors those of all shards.
    // Errors: Error `[gguf] expected …; got …` for anything that is not well-formed and whole.
    static GgufFile open(const std::string& path, bool use_mmap = true);

    // Parses bytes that the caller keeps alive, 8-byte aligned: a GGUF that is not split. `name` appears in messages.
    explicit GgufFile(std::span<const uint8_t> bytes, std::string name = {});

    const std::string& name() const { return name_; }
    size_t size_bytes() const;  // of all shards and joined files
    uint32_t version() const { return version_; }
    bool mapped() const { return file_.mapped(); }

    // Keys, in file order.
    const std::vector<GgufValue>& values() const { return values_; }
    const GgufValue* find(std::string_view key) const;  // null when absent
    bool has(std::string_view key) const { return find(key) != nullptr; }

    // Typed values. get_*: the key must be there. find_*: nullopt when it is not. Both refuse a value of another kind.
    // Any stored integer type is read as any integer that holds it exactly; f64 is read as f32.
    uint32_t get_u32(std::string_view key) const;
    int32_t get_i32(std::string_view key) const;
    uint64_t get_u64(std::string_view key) const;
    float get_f32(std::string_view key) const;
    bool get_bool(std::string_view key) const;
    std::string_view get_string(std::string_view key) const;

    std::vector<uint32_t> get_u32_array(std::string_view key) const;
    std::vector<int32_t> get_i32_array(std::string_view key) const;
    std::vector<float> get_f32_array(std::string_view key) const;
    std::vector<bool> get_bool_array(std::string_view key) const;
    std::vector<std::string_view> get_string_array(std::string_view key) const;

    std::optional<uint32_t> find_u32(std::string_view key) const;
    std::optional<int32_t> find_i32(std::string_view key) const;
    std::optional<uint64_t> find_u64(std::string_view key) const;
    std::optional<float> find_f32(std::string_view key) const;
    std::optional<bool> find_bool(std::string_view key) const;
    std::optional<std::string_view> find_string(std::string_view key) const;

    std::optional<std::vector<uint32_t>> find_u32_array(std::string_view key) const;
    std::optional<std::vector<int32_t>> find_i32_array(std::string_view key) const;
    std::optional<std::vector<float>> find_f32_array(std::string_view key) const;
    std::optional<std::vector<bool>> find_bool_array(std::string_view key) const;
    std::optional<std::vector<std::string_view>> find_string_array(std::string_view key) const;

    // Tensors in file order, shard after shard.
    const std::vector<TensorInfo>& tensors() const { return tensors_; }
    const TensorInfo* find_tensor(std::string_view name) const;  // null when absent
    const TensorInfo& tensor(std::string_view name) const;       // Error when absent

    // Takes over every tensor of another file, and its keys that begin with `prefix`. They replace those of the same name.
    void join(GgufFile other, std::string_view prefix);
    // Replaces the list of tensors; the bytes stay.
    void set_tensors(std::vector<TensorInfo> tensors);
    // The bytes that hold tensors: those of this file, of its other shards and of joined files.
    const std::vector<std::span<const uint8_t>>& spans() const { return spans_; }

private:
    GgufFile(MappedFile file, std::string name);
    void parse();
    // Whether split.count and split.no agree with the file's name.
    void check_split(int number, int count) const;
    void adopt(GgufFile part);   // a shard after the first: its tensors and their bytes
    void keep(GgufFile& other);  // takes over the bytes of another file

    template <typename T>
    std::optional<T> find_as(std::string_view key) const;
    template <typename T>
    std::optional<std::vector<T>> find_array(std::string_view key) const;
    template <typename T>
    T required(std::string_view key, std::optional<T> found) const;

    MappedFile file_;  // empty when the caller keeps the bytes
    std::span<const uint8_t> bytes_;
    std::vector<MappedFile> others_;  // of other shards and joined files
    std::vector<std::span<const uint8_t>> spans_;
    std::string name_;
    std::string where_;  // " in 'name'", or empty
    uint32_t version_ = 0;
    std::vector<GgufValue> values_;
    std::vector<TensorInfo> tensors_;
    std::map<std::string_view, size_t> value_index_;
    std::map<std::string, size_t, std::less<>> tensor_index_;
};

}  // namespace lkv
