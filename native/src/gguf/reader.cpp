#include "gguf/reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"

static_assert(std::endian::native == std::endian::little, "GGUF values are read in place");

namespace lkv {
namespace {

constexpr std::array<uint8_t, 4> magic = {'G', 'G', 'U', 'F'};
constexpr uint32_t max_type = static_cast<uint32_t>(GgufType::f64);
constexpr uint32_t default_alignment = 32;
constexpr uint32_t min_alignment = 8;  // the specification's; ggml reads f32 and block scales in place
constexpr size_t max_key_length = 65535;
constexpr size_t max_tensor_name = GGML_MAX_NAME - 1;

constexpr uint64_t min_value_bytes = 14;   // key length 8, key 1, type 4, value 1
constexpr uint64_t min_tensor_bytes = 33;  // name length 8, name 1, n_dims 4, ne 8, type 4, offset 8

// Bytes of one element of a fixed-size type; for a string, those of its length field.
size_t element_size(GgufType type) {
    switch (type) {
        case GgufType::u8:
        case GgufType::i8:
        case GgufType::boolean:
            return 1;
        case GgufType::u16:
        case GgufType::i16:
            return 2;
        case GgufType::u32:
        case GgufType::i32:
        case GgufType::f32:
            return 4;
        case GgufType::u64:
        case GgufType::i64:
        case GgufType::f64:
        case GgufType::string:
            return 8;
        case GgufType::array:
            break;
    }
    return 0;
}

// Walks the bytes of the header; every step says what it needs, so that a truncated file is named as such.
class Cursor {
public:
    Cursor(std::span<const uint8_t> bytes, const std::string& where) : bytes_(bytes), where_(where) {}

    size_t position() const { return position_; }
    size_t remaining() const { return bytes_.size() - position_; }

    template <typename... Parts>
    [[noreturn]] void refuse(const Parts&... parts) const {
        fail("gguf", parts..., where_);
    }

    std::span<const uint8_t> since(size_t start) const { return bytes_.subspan(start, position_ - start); }

    std::span<const uint8_t> take(uint64_t n, std::string_view what) {
        if (n > remaining()) {
            refuse("expected ", n, " bytes of ", quoted(what), " at offset ", position_, "; got a file of ",
                   bytes_.size(), " bytes (truncated?)");
        }
        const auto taken = bytes_.subspan(position_, n);
        position_ += n;
        return taken;
    }

    template <typename T>
    T number(std::string_view what) {
        T value;
        std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
        return value;
    }

    // A count of entries of at least `smallest` bytes each.
    uint64_t count(uint64_t smallest, std::string_view what) {
        const auto n = number<uint64_t>(what);
        if (n > remaining() / smallest) {
            refuse("expected at most ", remaining() / smallest, " entries in ", quoted(what), " with ", remaining(),
                   " of ", bytes_.size(), " bytes left; got ", n, " (truncated?)");
        }
        return n;
    }

    std::string_view string(std::string_view what) {
        const auto length = number<uint64_t>(what);
        const auto text = take(length, what);
        return {reinterpret_cast<const char*>(text.data()), text.size()};
    }

private:
    std::span<const uint8_t> bytes_;
    const std::string& where_;  // " in 'path'" or empty
    size_t position_ = 0;
};

uint64_t align_up(uint64_t n, uint64_t alignment) { return (n + alignment - 1) / alignment * alignment; }

GgufType read_type(Cursor& cursor, std::string_view key) {
    const auto type = cursor.number<uint32_t>("value type");
    if (type > max_type) {
        cursor.refuse("expected a value type of 0 to ", max_type, " for ", quoted(key), "; got ", type);
    }
    return static_cast<GgufType>(type);
}

GgufValue read_value(Cursor& cursor) {
    const size_t start = cursor.position();
    GgufValue value{};

    value.key = cursor.string("key");
    if (value.key.empty() || value.key.size() > max_key_length || value.key.find('\0') != std::string_view::npos) {
        cursor.refuse("expected a key of 1 to ", max_key_length, " bytes without NUL; got ", value.key.size(),
                      " bytes, ", quoted(value.key));
    }
    value.type = read_type(cursor, value.key);
    value.count = 1;
    if (value.type == GgufType::array) {
        value.is_array = true;
        value.type = read_type(cursor, value.key);
        if (value.type == GgufType::array) {
            cursor.refuse("expected an array of numbers, booleans or strings in ", quoted(value.key),
                          "; got an array of arrays");
        }
        value.count = cursor.count(element_size(value.type), value.key);
    }
    if (value.type == GgufType::string) {
        for (uint64_t i = 0; i < value.count; ++i) {
            value.strings.push_back(cursor.string(value.key));
        }
    } else {
        value.elements = cursor.take(value.count * element_size(value.type), value.key);
    }
    if (value.type == GgufType::boolean) {
        const auto bad = std::find_if(value.elements.begin(), value.elements.end(), [](uint8_t b) { return b > 1; });
        if (bad != value.elements.end()) {
            cursor.refuse("expected booleans stored as 0 or 1 in ", quoted(value.key), "; got ", *bad);
        }
    }
    value.raw = cursor.since(start);
    return value;
}

// Everything but the place of the data, which is known after the last tensor.
TensorInfo read_tensor(Cursor& cursor, uint64_t alignment) {
    TensorInfo tensor{};

    const auto name = cursor.string("tensor name");
    if (name.empty() || name.size() > max_tensor_name || name.find('\0') != std::string_view::npos) {
        cursor.refuse("expected a tensor name of 1 to ", max_tensor_name, " bytes without NUL; got ", name.size(),
                      " bytes, ", quoted(name));
    }
    tensor.name = name;

    const auto n_dims = cursor.number<uint32_t>("tensor dimensions");
    if (n_dims < 1 || n_dims > GGML_MAX_DIMS) {
        cursor.refuse("expected 1 to ", GGML_MAX_DIMS, " dimensions in ", quoted(name), "; got ", n_dims);
    }
    tensor.n_dims = static_cast<int>(n_dims);

    constexpr int64_t largest = std::numeric_limits<int64_t>::max();
    int64_t n_elements = 1;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        tensor.ne[i] = i < tensor.n_dims ? cursor.number<int64_t>("tensor shape") : 1;
        if (tensor.ne[i] < 1 || tensor.ne[i] > largest / n_elements) {
            cursor.refuse("expected ne[", i, "] of ", quoted(name), " to be 1 to ", largest / n_elements, "; got ",
                          tensor.ne[i]);
        }
        n_elements *= tensor.ne[i];
    }

    const auto type = cursor.number<uint32_t>("tensor type");
    tensor.type = static_cast<ggml_type>(type);
    if (type >= GGML_TYPE_COUNT || ggml_blck_size(tensor.type) < 1 || ggml_type_size(tensor.type) < 1) {
        cursor.refuse("expected a ggml type known to this build for ", quoted(name), "; got ", type);
    }
    const int64_t block = ggml_blck_size(tensor.type);
    const uint64_t block_bytes = ggml_type_size(tensor.type);
    if (tensor.ne[0] % block != 0) {
        cursor.refuse("expected ne[0] of ", quoted(name), " to be a multiple of ", block, " (",
                      ggml_type_name(tensor.type), "); got ", tensor.ne[0]);
    }
    const auto n_blocks = static_cast<uint64_t>(n_elements / block);
    if (n_blocks > static_cast<uint64_t>(largest) / block_bytes) {
        cursor.refuse("expected less than 2^63 bytes for ", quoted(name), "; got ", n_elements, " elements of ",
                      ggml_type_name(tensor.type));
    }
    tensor.bytes = n_blocks * block_bytes;

    tensor.offset = cursor.number<uint64_t>("tensor offset");
    if (tensor.offset > static_cast<uint64_t>(largest) - tensor.bytes) {
        cursor.refuse("expected ", quoted(name), " to end below 2^63; got ", tensor.bytes, " bytes at offset ",
                      tensor.offset);
    }
    if (tensor.offset % alignment != 0) {
        cursor.refuse("expected the offset of ", quoted(name), " to be a multiple of ", alignment, "; got ",
                      tensor.offset);
    }
    return tensor;
}

// Points every tensor at its bytes; refuses tensors beyond the end of the file or over one another.
void place_tensors(Cursor& cursor, std::vector<TensorInfo>& tensors, uint64_t alignment,
                   std::span<const uint8_t> bytes) {
    const uint64_t start = align_up(cursor.position(), alignment);

    std::vector<TensorInfo*> by_offset;
    for (auto& tensor : tensors) {
        const uint64_t end = start + tensor.offset + tensor.bytes;
        if (end > bytes.size()) {
            cursor.refuse("expected at least ", end, " bytes (", quoted(tensor.name), " ends there); got a file of ",
                          bytes.size(), " bytes (truncated?)");
        }
        tensor.data = bytes.data() + start + tensor.offset;
        by_offset.push_back(&tensor);
    }
    std::sort(by_offset.begin(), by_offset.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
    for (size_t i = 1; i < by_offset.size(); ++i) {
        const auto& before = *by_offset[i - 1];
        if (before.offset + before.bytes > by_offset[i]->offset) {
            cursor.refuse("expected tensors that do not overlap; got ", quoted(before.name), " ending at ",
                          before.offset + before.bytes, " and ", quoted(by_offset[i]->name), " starting at ",
                          by_offset[i]->offset);
        }
    }
}

}  // namespace

std::string_view gguf_type_name(GgufType type) {
    static constexpr std::string_view names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                 "bool", "string", "array", "u64", "i64", "f64"};
    return names[static_cast<uint32_t>(type)];
}

GgufFile::GgufFile(std::span<const uint8_t> bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {
    parse();
    check_split(0, 1);
}

GgufFile::GgufFile(MappedFile file, std::string name)
    : file_(std::move(file)), bytes_(file_.bytes()), name_(std::move(name)) {
    parse();
}

void GgufFile::parse() {
    where_ = name_.empty() ? "" : " in " + quoted_path(name_);
    Cursor cursor(bytes_, where_);

    const auto first = cursor.take(magic.size(), "magic");
    if (!std::equal(first.begin(), first.end(), magic.begin())) {
        cursor.refuse("expected a file that begins with GGUF; got ",
                      quoted({reinterpret_cast<const char*>(first.data()), 4}));
    }
    version_ = cursor.number<uint32_t>("version");
    if (version_ != 2 && version_ != 3) {
        cursor.refuse("expected GGUF version 2 or 3, little-endian; got ", version_,
                      (version_ & 0xffff) == 0 ? " (a big-endian file?)" : "");
    }
    const auto n_tensors = cursor.count(min_tensor_bytes, "tensor count");
    const auto n_values = cursor.count(min_value_bytes, "key count");

    for (uint64_t i = 0; i < n_values; ++i) {
        values_.push_back(read_value(cursor));
        if (!value_index_.emplace(values_.back().key, i).second) {
            cursor.refuse("expected every key once; got ", quoted(values_.back().key), " twice");
        }
    }
    const uint64_t alignment = find_u32("general.alignment").value_or(default_alignment);
    if (alignment < min_alignment || !std::has_single_bit(alignment)) {
        cursor.refuse("expected general.alignment to be a power of two and at least ", min_alignment, "; got ",
                      alignment);
    }
    for (uint64_t i = 0; i < n_tensors; ++i) {
        tensors_.push_back(read_tensor(cursor, alignment));
        if (!tensor_index_.emplace(tensors_.back().name, i).second) {
            cursor.refuse("expected every tensor once; got ", quoted(tensors_.back().name), " twice");
        }
    }
    place_tensors(cursor, tensors_, alignment, bytes_);
    spans_.push_back(bytes_);
}

size_t GgufFile::size_bytes() const {
    size_t total = 0;
    for (const auto& span : spans_) {
        total += span.size();
    }
    return total;
}

void GgufFile::join(GgufFile other, std::string_view prefix) {
    for (GgufValue& value : other.values_) {
        if (!value.key.starts_with(prefix)) {
            continue;
        }
        const auto [found, is_new] = value_index_.emplace(value.key, values_.size());
        if (is_new) {
            values_.push_back(std::move(value));
        } else {
            values_[found->second] = std::move(value);
        }
    }
    for (TensorInfo& tensor : other.tensors_) {
        tensor.joined = true;
        const auto [found, is_new] = tensor_index_.emplace(tensor.name, tensors_.size());
        if (is_new) {
            tensors_.push_back(std::move(tensor));
        } else {
            tensors_[found->second] = std::move(tensor);
        }
    }
    keep(other);
}

void GgufFile::keep(GgufFile& other) {
    spans_.insert(spans_.end(), other.spans_.begin(), other.spans_.end());
    others_.push_back(std::move(other.file_));
    for (MappedFile& file : other.others_) {
        others_.push_back(std::move(file));
    }
}

void GgufFile::set_tensors(std::vector<TensorInfo> tensors) {
    tensors_ = std::move(tensors);
    tensor_index_.clear();
    for (size_t i = 0; i < tensors_.size(); i++) {
        tensor_index_.emplace(tensors_[i].name, i);
    }
}

}  // namespace lkv
