// A GGUF as one file, or as the parts NAME-00001-of-0000N.gguf, … that llama.cpp splits it into: each has split.no, from 0, and split.count,
// and the first has split.tensors.count. A file without split.count is whole, whatever its name.
#include <algorithm>
#include <filesystem>
#include <optional>
#include <regex>

#include "base/error.h"
#include "gguf/reader.h"

namespace lkv {
namespace {

constexpr size_t number_width = 5;

std::string part_name(const std::string& stem, uint32_t number, uint32_t count) {
    const auto padded = [](uint32_t n) {
        const std::string digits = std::to_string(n);
        return std::string(number_width - std::min(number_width, digits.size()), '0') + digits;
    };
    return stem + "-" + padded(number) + "-of-" + padded(count) + ".gguf";
}

// The path of every part, in order. The files need not exist.
std::vector<std::string> part_paths(const std::string& path) {
    static const std::regex name("(.*)-([0-9]{5})-of-([0-9]{5})\\.gguf");
    std::smatch match;
    const std::filesystem::path whole(path);
    const std::string file = whole.filename().string();
    if (!std::regex_match(file, match, name) || std::stoi(match[3]) < 2) {
        return {path};
    }
    const auto count = static_cast<uint32_t>(std::stoi(match[3]));
    std::vector<std::string> paths;
    for (uint32_t number = 1; number <= count; number++) {
        paths.push_back((whole.parent_path() / part_name(match[1], number, count)).string());
    }
    return paths;
}

// Each part says how many there are.
uint32_t split_count(const GgufFile& file) { return std::max(1U, file.find_u32("split.count").value_or(1)); }

}  // namespace

GgufFile GgufFile::open(const std::string& path, bool use_mmap) {
    std::vector<std::string> paths = part_paths(path);
    std::optional<GgufFile> named;
    if (paths.size() == 1 || std::filesystem::exists(path)) {
        named = GgufFile(MappedFile(path, use_mmap), path);
        if (split_count(*named) == 1) paths = {path};
    }
    const auto count = static_cast<int>(paths.size());
    for (const std::string& part : paths) {
        if (count == 1 || std::filesystem::exists(part)) continue;
        fail("gguf", "expected all ", count, " parts of ", quoted_path(path), "; got no ", quoted_path(part));
    }
    std::vector<GgufFile> parts;
    for (const std::string& part : paths) {
        parts.push_back(named && part == path ? std::move(*named) : GgufFile(MappedFile(part, use_mmap), part));
        parts.back().check_split(static_cast<int>(parts.size()) - 1, count);
    }
    GgufFile whole = std::move(parts.front());
    for (size_t i = 1; i < parts.size(); i++) {
        whole.adopt(std::move(parts[i]));
    }
    const auto total = whole.find_u64("split.tensors.count");
    if (count > 1 && total && *total != whole.tensors_.size()) {
        fail("gguf", "expected ", *total, " tensors in all parts, as split.tensors.count says; got ",
             whole.tensors_.size(), whole.where_);
    }
    return whole;
}

void GgufFile::check_split(int number, int count) const {
    const uint32_t said = split_count(*this);
    if (said != static_cast<uint32_t>(count)) {
        fail("gguf", "expected ", said, " parts, as split.count says, ", part_name("NAME", 1, said), " and so on; got ",
             count, where_);
    }
    const std::optional<uint32_t> no = find_u32("split.no");
    if (count > 1 && no != static_cast<uint32_t>(number)) {
        fail("gguf", "expected split.no ", number, "; got ", no ? std::to_string(*no) : "none", where_);
    }
}

void GgufFile::adopt(GgufFile part) {
    for (TensorInfo& tensor : part.tensors_) {
        tensors_.push_back(std::move(tensor));
        if (!tensor_index_.emplace(tensors_.back().name, tensors_.size() - 1).second) {
            fail("gguf", "expected every tensor in one part; got ", lkv::quoted(tensors_.back().name), " again",
                 part.where_);
        }
    }
    keep(part);
}

}  // namespace lkv
