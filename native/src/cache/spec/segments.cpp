#include "cache/spec/segments.h"

#include <algorithm>
#include <span>
#include <string>

namespace lkv {

void expect_length(std::string_view key, size_t expected, size_t got) {
    if (expected != got) {
        fail(key, "expected an array of ", expected, " entries", "; got ", got);
    }
}

void check_next_format(std::string_view where, const std::vector<Format>& plan, Format format, int width) {
    if (!plan.empty() && plan.back() == Format::none && format != Format::none) {
        fail(where, "expected only trailing segments dropped", "; got ", format_name(format), " after none");
    }
    if (width % format_width_multiple(format) != 0) {
        fail(where, "expected ", format_name(format), " segments in multiples of ", format_width_multiple(format),
             " channels", "; got ", width);
    }
}

void check_scales(std::string_view where, const std::vector<std::vector<Format>>& plan) {
    std::optional<Format> first;
    for (const std::vector<Format>& group : plan) {
        for (const Format format : group) {
            if (format == Format::none) continue;
            if (first && format_scaled_by_group(*first) != format_scaled_by_group(format)) {
                fail(where, "expected formats n8 … n1 throughout a row, or none of them; got ", format_name(*first),
                     " and ", format_name(format));
            }
            first = format;
        }
    }
}

namespace {

struct TensorKeys {
    std::string_view group;
    std::string_view ranks;
    std::string_view segment_counts;
    std::string_view segment_widths;
    std::string_view segment_formats;
    std::string_view energy;
};

constexpr TensorKeys k_keys = {key::k_group,          key::k_ranks,           key::k_segment_counts,
                               key::k_segment_widths, key::k_segment_formats, key::k_energy};
constexpr TensorKeys v_keys = {key::v_group,          key::v_ranks,           key::v_segment_counts,
                               key::v_segment_widths, key::v_segment_formats, key::v_energy};

// Cursor over one flattened array of the file.
template <typename T>
struct Flat {
    std::string_view key;
    std::vector<T> values;
    size_t at = 0;

    const T& next() {
        if (at == values.size()) {
            fail(key, "expected more than ", values.size(), " entries", "; got ", values.size());
        }
        return values[at++];
    }
    void expect_end() const { expect_length(key, at, values.size()); }
};

void check_rank(std::string_view key, int64_t rank, int width) {
    if (rank < 1 || rank > width || (rank % static_cast<int64_t>(schema::rank_pad) != 0 && rank != width)) {
        fail(key, "expected ranks that are multiples of ", schema::rank_pad, " up to group · head_dim = ", width,
             "; got ", rank);
    }
}

template <typename T>
Flat<T> flat(std::string_view key, std::optional<std::vector<T>> found) {
    return {key, std::move(found).value_or(std::vector<T>{})};
}

// Ranks, segments and formats of K or V in every layer, whose paths are known.
class TensorReader {
public:
    TensorReader(const GgufFile& file, const HParams& h, bool is_key, std::vector<LayerCacheSpec>& layers)
        : file_(file),
          h_(h),
          is_key_(is_key),
          keys_(is_key ? k_keys : v_keys),
          layers_(layers),
          groups_(need(file.find_u32_array(keys_.group), keys_.group)),
          // with MLA K has none, as keys are in V's rows
          ranks_{keys_.ranks,
                 h.has_mla() && is_key ? std::vector<uint32_t>{} : need(file.find_u32_array(keys_.ranks), keys_.ranks)},
          counts_(flat(keys_.segment_counts, file.find_u32_array(keys_.segment_counts))),
          widths_(flat(keys_.segment_widths, file.find_u32_array(keys_.segment_widths))),
          formats_(flat(keys_.segment_formats, file.find_string_array(keys_.segment_formats))) {}

    void read() {
        expect_length(keys_.group, layers_.size(), groups_.size());
        for (size_t il = 0; il < layers_.size(); il++) {
            read_group(il);
            if (has_segments(il)) read_layer(il);
        }
        read_energy();
        ranks_.expect_end();
        counts_.expect_end();
        widths_.expect_end();
        formats_.expect_end();
    }

private:
    TensorSpec& spec(size_t il) { return is_key_ ? layers_[il].k : layers_[il].v; }
    bool is_full(size_t il) const {
        return is_key_ ? layers_[il].k_path == KPath::full : layers_[il].v_path == VPath::full;
    }
    bool has_segments(size_t il) const {
        return h_.makes_rows(static_cast<int>(il)) && !(is_key_ && layers_[il].key_of_value());
    }
    void read_group(size_t il);
    void read_layer(size_t il);
    std::vector<int> read_widths(uint32_t rank);
    std::vector<Format> read_formats(std::span<const int> segments);
    void read_energy();

    const GgufFile& file_;
    const HParams& h_;
    const bool is_key_;
    const TensorKeys& keys_;
    std::vector<LayerCacheSpec>& layers_;
    const std::vector<uint32_t> groups_;
    Flat<uint32_t> ranks_;
    Flat<uint32_t> counts_;
    Flat<uint32_t> widths_;
    Flat<std::string_view> formats_;
};

void TensorReader::read_group(size_t il) {
    const uint32_t group = groups_[il];
    const int n_kv = h_.heads[il].n_kv;
    const bool divides = group >= 1 && n_kv % static_cast<int>(std::min<uint32_t>(group, 1U << 16)) == 0;
    const bool stands_alone = is_full(il) || (is_key_ && layers_[il].key_of_value());
    if (!divides || (stands_alone && group != 1)) {
        fail(keys_.group, "expected ", is_full(il) ? "1 on a full layer, " : "a divisor of the KV heads ", n_kv,
             "; got ", group);
    }
    spec(il).group = static_cast<int>(group);
}

void TensorReader::read_layer(size_t il) {
    TensorSpec& spec = this->spec(il);
    const HeadShape& heads = h_.heads[il];
    if (!formats_.values.empty()) spec.formats.emplace();
    for (int g = 0; g < heads.n_kv / spec.group; g++) {
        const uint32_t rank = ranks_.next();
        check_rank(keys_.ranks, rank, spec.group * heads.head_dim);
        if (is_full(il) && static_cast<int>(rank) != heads.head_dim) {
            fail(keys_.ranks, "expected head_dim on a full layer, ", heads.head_dim, "; got ", rank);
        }
        spec.ranks.push_back(static_cast<int>(rank));
        spec.segments.push_back(read_widths(rank));
        if (spec.formats) spec.formats->push_back(read_formats(spec.segments.back()));
    }
    if (spec.formats) check_scales(keys_.segment_formats, *spec.formats);
}

// Widths of a group's segments; a file without widths has one segment.
std::vector<int> TensorReader::read_widths(uint32_t rank) {
    if (counts_.values.empty()) return {static_cast<int>(rank)};
    std::vector<int> segments;
    int64_t left = rank;
    for (uint32_t n = counts_.next(); n > 0; n--) {
        const uint32_t width = widths_.next();
        if (width < 1 || width > left) {
            fail(keys_.segment_widths, "expected widths that add up to the rank ", rank, "; got ", width);
        }
        segments.push_back(static_cast<int>(width));
        left -= width;
    }
    if (left != 0) {
        fail(keys_.segment_widths, "expected widths that add up to the rank ", rank, "; got ", rank - left);
    }
    return segments;
}

std::vector<Format> TensorReader::read_formats(std::span<const int> segments) {
    std::vector<Format> plan;
    for (const int width : segments) {
        const std::string name(formats_.next());
        const auto format = parse_format(name);
        if (!format) {
            fail(keys_.segment_formats, "expected a known row format (docs/gguf.md)", "; got ", quoted(name));
        }
        if (!is_key_ && format_in_token_blocks(*format)) {
            fail(keys_.segment_formats, "expected formats of single tokens for V; got ", name);
        }
        check_next_format(keys_.segment_formats, plan, *format, width);
        plan.push_back(*format);
    }
    return plan;
}

void TensorReader::read_energy() {
    const auto energy = file_.find_f32_array(keys_.energy);
    if (!energy) return;
    expect_length(keys_.energy, layers_.size(), energy->size());
    for (size_t il = 0; il < layers_.size(); il++) {
        const float share = (*energy)[il];
        if (!(share >= 0.0F && share <= 1.001F)) {  // a sum that rounds up
            fail(keys_.energy, "expected shares from 0 to 1; got ", share);
        }
        if (has_segments(il)) spec(il).energy = share;
    }
}

}  // namespace

void read_segments(const GgufFile& file, const HParams& hparams, bool is_key, std::vector<LayerCacheSpec>& layers) {
    TensorReader(file, hparams, is_key, layers).read();
}

}  // namespace lkv
