// The segments of K and V in every layer, as a file lists them, and what every list of segments obeys.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/spec/cache_spec.h"

namespace lkv {

// Reads groups, ranks, widths, formats and energies of K or V. The paths of `layers` are known.
// Errors: Error for a missing key, an array of another length, or segments that docs/gguf.md refuses.
void read_segments(const GgufFile& file, const HParams& hparams, bool is_key, std::vector<LayerCacheSpec>& layers);

// Errors: Error for a format that cannot come after `plan` in a group, or does not take `width` channels. where: what messages name.
void check_next_format(std::string_view where, const std::vector<Format>& plan, Format format, int width);
// Errors: Error for a row of which some groups begin with scales (formats/normal.h) and others do not.
void check_scales(std::string_view where, const std::vector<std::vector<Format>>& plan);
void expect_length(std::string_view key, size_t expected, size_t got);

// The value of a key that a file with a latent cache must have.
template <typename T>
T need(std::optional<T> value, std::string_view key) {
    if (!value) {
        fail("gguf", "expected ", "the key ", key, " beside the other latentkv.k.* and latentkv.v.* keys; got none");
    }
    return std::move(*value);
}

}  // namespace lkv
