#include "cache/spec/cache_spec.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>

#include "base/error.h"

namespace lkv {
namespace {

static_assert(static_cast<size_t>(all_formats[std::size(all_formats) - 1]) + 1 == schema::format_words.size() &&
                  static_cast<int>(Format::q8_0) == static_cast<int>(schema::Format::q8_0) &&
                  static_cast<int>(Format::c2) == static_cast<int>(schema::Format::c2) &&
                  static_cast<int>(Format::iq4_nl) == static_cast<int>(schema::Format::iq4_nl),
              "cache/formats.h lists the schema's formats in the schema's order");

struct TensorKeys {
    std::string_view path;
    std::string_view group;
    std::string_view ranks;
    std::string_view segment_counts;
    std::string_view segment_widths;
    std::string_view segment_formats;
    std::string_view energy;
};

constexpr TensorKeys k_keys = {key::k_path,           key::k_group,           key::k_ranks, key::k_segment_counts,
                               key::k_segment_widths, key::k_segment_formats, key::k_energy};
constexpr TensorKeys v_keys = {key::v_path,           key::v_group,           key::v_ranks, key::v_segment_counts,
                               key::v_segment_widths, key::v_segment_formats, key::v_energy};

template <typename T>
T need(std::optional<T> value, std::string_view key) {
    if (!value) {
        fail("gguf", "expected ", "the key ", key, " beside the other latentkv.k.* and latentkv.v.* keys; got none");
    }
    return std::move(*value);
}

void expect_length(std::string_view key, size_t expected, size_t got) {
    if (expected != got) {
        fail(key, "expected an array of ", expected, " entries", "; got ", got);
    }
}

template <typename Enum, size_t n>
Enum parse_word(std::string_view key, std::string_view word, const std::array<std::string_view, n>& words) {
    const auto found = schema::parse<Enum>(words, word);
    if (!found) {
        fail(key, "expected a known word (docs/gguf.md); got ", quoted(word));
    }
    return *found;
}

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

// The next segment of a group's plan.
void check_next_format(std::string_view where, const std::vector<Format>& plan, Format format, int width) {
    if (!plan.empty() && plan.back() == Format::none && format != Format::none) {
        fail(where, "expected only trailing segments dropped", "; got ", format_name(format), " after none");
    }
    if (width % format_width_multiple(format) != 0) {
        fail(where, "expected ", format_name(format), " segments in multiples of ", format_width_multiple(format),
             " channels", "; got ", width);
    }
}

// A row has the scales, or each of its segments its own.
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

// Fills ranks, segments and formats of K or V in every layer; paths are set by the caller.
void read_tensor(const GgufFile& file, const HParams& h, const TensorKeys& keys, TensorSpec LayerCacheSpec::* tensor,
                 const std::vector<bool>& is_full, std::vector<LayerCacheSpec>& layers) {
    const auto groups = need(file.find_u32_array(keys.group), keys.group);
    expect_length(keys.group, layers.size(), groups.size());
    const bool has_none = h.has_mla() && tensor == &LayerCacheSpec::k;  // and an array has at least one entry
    Flat<uint32_t> ranks{keys.ranks,
                         has_none ? std::vector<uint32_t>{} : need(file.find_u32_array(keys.ranks), keys.ranks)};
    Flat<uint32_t> counts{keys.segment_counts,
                          file.find_u32_array(keys.segment_counts).value_or(std::vector<uint32_t>{})};
    Flat<uint32_t> widths{keys.segment_widths,
                          file.find_u32_array(keys.segment_widths).value_or(std::vector<uint32_t>{})};
    Flat<std::string_view> formats{
        keys.segment_formats, file.find_string_array(keys.segment_formats).value_or(std::vector<std::string_view>{})};
    const auto energy = file.find_f32_array(keys.energy);
    if (energy) {
        expect_length(keys.energy, layers.size(), energy->size());
        for (const float share : *energy) {
            if (!(share >= 0.0F && share <= 1.001F)) {  // a sum that rounds up
                fail(keys.energy, "expected shares from 0 to 1; got ", share);
            }
        }
    }

    for (size_t il = 0; il < layers.size(); il++) {
        TensorSpec& spec = layers[il].*tensor;
        const uint32_t group = groups[il];
        const HeadShape& heads = h.heads[il];
        if (group < 1 || heads.n_kv % static_cast<int>(std::min<uint32_t>(group, 1U << 16)) != 0 ||
            ((is_full[il] || (tensor == &LayerCacheSpec::k && layers[il].key_of_value())) && group != 1)) {
            fail(keys.group, "expected ", is_full[il] ? "1 on a full layer, " : "a divisor of the KV heads ",
                 heads.n_kv, "; got ", group);
        }
        spec.group = static_cast<int>(group);
        if (!h.makes_rows(static_cast<int>(il))) continue;
        if (tensor == &LayerCacheSpec::k && layers[il].key_of_value()) continue;
        if (energy) {
            spec.energy = (*energy)[il];
        }
        const int width = spec.group * heads.head_dim;
        for (int g = 0; g < heads.n_kv / spec.group; g++) {
            const uint32_t rank = ranks.next();
            check_rank(keys.ranks, rank, width);
            if (is_full[il] && static_cast<int>(rank) != heads.head_dim) {
                fail(keys.ranks, "expected head_dim on a full layer, ", heads.head_dim, "; got ", rank);
            }
            spec.ranks.push_back(static_cast<int>(rank));
            std::vector<int> segments;
            if (counts.values.empty()) {
                segments.push_back(static_cast<int>(rank));
            } else {
                int64_t left = rank;
                const uint32_t n = counts.next();
                for (uint32_t s = 0; s < n; s++) {
                    const uint32_t w = widths.next();
                    if (w < 1 || w > left) {
                        fail(keys.segment_widths, "expected widths that add up to the rank ", rank, "; got ", w);
                    }
                    segments.push_back(static_cast<int>(w));
                    left -= w;
                }
                if (left != 0) {
                    fail(keys.segment_widths, "expected widths that add up to the rank ", rank, "; got ", rank - left);
                }
            }
            if (!formats.values.empty()) {
                if (!spec.formats) {
                    spec.formats.emplace();
                }
                std::vector<Format> plan;
                for (size_t s = 0; s < segments.size(); s++) {
                    const std::string name(formats.next());
                    const auto format = parse_format(name);
                    if (!format) {
                        fail(keys.segment_formats, "expected a known row format (docs/gguf.md)", "; got ",
                             quoted(name));
                    }
                    if (tensor == &LayerCacheSpec::v && format_in_token_blocks(*format)) {
                        fail(keys.segment_formats, "expected formats of single tokens for V; got ", name);
                    }
                    check_next_format(keys.segment_formats, plan, *format, segments[s]);
                    plan.push_back(*format);
                }
                spec.formats->push_back(std::move(plan));
            }
            spec.segments.push_back(std::move(segments));
        }
        if (spec.formats) check_scales(keys.segment_formats, *spec.formats);
    }
    ranks.expect_end();
    counts.expect_end();
    widths.expect_end();
    formats.expect_end();
}

// The row format of a region that keeps every segment.
Format read_region_format(const GgufFile& file, std::string_view key) {
    const std::string name(file.find_string(key).value_or("f16"));
    const auto format = parse_format(name);
    if (!format || *format == Format::none || format_in_token_blocks(*format)) {
        fail(key, "expected a row format that stores single tokens (docs/gguf.md); got ", quoted(name));
    }
    return *format;
}

// A format of blocks that the layer's K asks for.
std::optional<Format> find_token_blocks(const LayerCacheSpec& layer) {
    for (const std::vector<Format>& group : layer.k.formats.value_or(std::vector<std::vector<Format>>{})) {
        const auto found = std::find_if(group.begin(), group.end(), format_in_token_blocks);
        if (found != group.end()) return *found;
    }
    return std::nullopt;
}

void refuse_token_blocks(const CacheSpec& spec) {
    for (const LayerCacheSpec& layer : spec.layers) {
        if (const auto format = find_token_blocks(layer)) {
            fail(key::k_segment_formats, "expected ", key::recent, " or ", key::recent_ratio,
                 " above 0 beside blocks of 32 tokens, which wait there until they are full; got ",
                 format_name(*format));
        }
    }
}

// A row of MLA begins with its turned channels, which are segments of their own and are never dropped.
void check_turned(const MlaSizes& sizes, const CacheSpec& spec) {
    for (const LayerCacheSpec& layer : spec.layers) {
        const std::vector<int>& widths = layer.v.segments.front();
        int width = 0;
        size_t n = 0;
        while (n < widths.size() && width < sizes.n_rot) width += widths[n++];
        if (width != sizes.n_rot || n == widths.size()) {
            fail(key::v_segment_widths, "expected segments of the ", sizes.n_rot,
                 " turned channels first, and then of the latent; got ", widths.front(), " and others");
        }
        if (!layer.v.formats) continue;
        const std::vector<Format>& formats = layer.v.formats->front();
        if (formats[n - 1] == Format::none) fail(key::v_segment_formats, "expected turned channels stored; got none");
        for (const Format format : formats) {
            if (!format_scaled_by_group(format)) continue;
            fail(key::v_segment_formats, "expected formats whose segments have scales of their own with MLA; got ",
                 format_name(format));
        }
    }
}

void refuse_unknown_keys(const GgufFile& file) {
    for (const GgufValue& value : file.values()) {
        const std::string_view name = value.key;
        if (name.starts_with("latentkv.") && std::find(key::all.begin(), key::all.end(), name) == key::all.end()) {
            fail("gguf", "expected only latentkv.* keys of version 1 (docs/gguf.md)", "; got ", quoted(name));
        }
    }
}

}  // namespace

TensorSpec TensorSpec::full(int n_kv, int head_dim) {
    TensorSpec spec;
    spec.ranks.assign(static_cast<size_t>(n_kv), head_dim);
    spec.segments.assign(static_cast<size_t>(n_kv), {head_dim});
    return spec;
}

TensorSpec TensorSpec::mla(const MlaSizes& sizes) {
    constexpr int step = 128;  // channels that share a scale, as those of a usual head
    TensorSpec spec;
    spec.ranks = {static_cast<int>(sizes.row())};
    spec.segments = {{sizes.n_rot}};
    const int width = sizes.kv_rank % step == 0 ? step : sizes.kv_rank;
    spec.segments[0].insert(spec.segments[0].end(), static_cast<size_t>(sizes.kv_rank / width), width);
    return spec;
}

bool LayerCacheSpec::exact_is_full() const {
    if (is_mla()) return false;
    const bool k_full = k_path == KPath::full || key_of_value();
    const bool v_full = v_path == VPath::full;
    return (k_full || k.encoded) && (v_full || v.encoded) && !(k_full && v_full);
}

int TensorSpec::rank_sum() const { return std::accumulate(ranks.begin(), ranks.end(), 0); }
int TensorSpec::rank_max() const { return *std::max_element(ranks.begin(), ranks.end()); }

std::vector<int> CacheSpec::widths(TensorSpec LayerCacheSpec::* tensor) const {
    std::vector<int> all;
    for (const LayerCacheSpec& layer : layers) {
        for (const std::vector<int>& group : (layer.*tensor).segments) {
            all.insert(all.end(), group.begin(), group.end());
        }
    }
    return all;
}

void CacheSpec::set_formats(TensorSpec LayerCacheSpec::* tensor, std::span<const Format> formats,
                            std::string_view flag) {
    expect_length(flag, widths(tensor).size(), formats.size());
    size_t at = 0;
    for (LayerCacheSpec& layer : layers) {
        TensorSpec& spec = layer.*tensor;
        spec.formats.emplace();
        for (const std::vector<int>& group : spec.segments) {
            std::vector<Format>& plan = spec.formats->emplace_back();
            for (const int width : group) {
                check_next_format(flag, plan, formats[at], width);
                plan.push_back(formats[at++]);
            }
        }
        check_scales(flag, *spec.formats);
    }
}

std::string_view path_name(KPath path) { return schema::k_path_words[static_cast<size_t>(path)]; }
std::string_view path_name(VPath path) { return schema::v_path_words[static_cast<size_t>(path)]; }

namespace {

// Whether K and V of layer il may be cached so by this model.
void check_paths(const LayerCacheSpec& layer, const HParams& h, int il) {
    const auto refuse = [&](const auto&... expected) {
        fail(key::k_path, "expected ", expected..., "; got ", path_name(layer.k_path), " and ", path_name(layer.v_path),
             " in layer ", il);
    };
    const bool is_full = layer.k_path == KPath::full && layer.v_path == VPath::full;
    if (!h.attends(il) && !is_full) refuse("full K and V in a layer that does not attend");
    if (h.rows_of(il) != il && !is_full) refuse("full K and V in a layer that reads another's");
    if (layer.k_path == KPath::absorbed && h.block.position == Position::rope) {
        refuse("rebuild or rotated where positions are rotary");
    }
    if (h.has_mla()) {
        if (!layer.key_of_value() || layer.v_path != VPath::latent) {
            refuse("value beside latent with MLA, whose rows are keys and values in one");
        }
    } else if (layer.key_of_value() && (!h.block.value_of_key || !h.block.value_norm || layer.v_path == VPath::full)) {
        refuse("value_of_key, value_norm and a latent V beside keys of its rows");
    }
    const bool projected =
        layer.k_path == KPath::rebuild || layer.k_path == KPath::absorbed || layer.v_path == VPath::latent;
    if (h.clamp_kqv > 0.0F && projected) {
        fail(h.architecture + ".attention.clamp_kqv", "expected no clipping beside latents of the layer's input; got ",
             h.clamp_kqv);
    }
}

}  // namespace

CacheSpec read_cache_spec(const GgufFile& file, const HParams& h) {
    CacheSpec spec;
    spec.layers.resize(static_cast<size_t>(h.n_layer));
    refuse_unknown_keys(file);
    if (const auto version = file.find_u32(key::version); version && *version != schema::version) {
        fail(key::version, "expected ", schema::version, "; got ", *version);
    }
    spec.sink = static_cast<int>(std::min<uint32_t>(file.find_u32(key::sink).value_or(0), 1U << 20));
    spec.recent = static_cast<int>(std::min<uint32_t>(file.find_u32(key::recent).value_or(0), 1U << 20));
    spec.recent_ratio = file.find_f32(key::recent_ratio).value_or(0.0F);
    if (!(spec.recent_ratio >= 0.0F && spec.recent_ratio <= 1.0F)) {
        fail(key::recent_ratio, "expected a ratio from 0 to 1; got ", spec.recent_ratio);
    }
    spec.sink_format = read_region_format(file, key::sink_format);
    spec.recent_format = read_region_format(file, key::recent_format);
    spec.fitted_context =
        static_cast<int>(std::min<uint32_t>(file.find_u32(key::fitted_context).value_or(0), 1U << 30));
    if (const auto prefill = file.find_string(key::prefill)) {
        spec.prefill = parse_word<Prefill>(key::prefill, *prefill, schema::prefill_words);
    }

    std::vector<bool> k_full(spec.layers.size(), true);
    std::vector<bool> v_full(spec.layers.size(), true);
    const auto k_paths = file.find_string_array(key::k_path);
    if (!k_paths) {
        for (size_t il = 0; il < spec.layers.size(); il++) {
            if (!h.makes_rows(static_cast<int>(il))) continue;
            LayerCacheSpec& layer = spec.layers[il];
            if (h.has_mla()) {
                layer.k_path = KPath::value;
                layer.v = TensorSpec::mla(h.mla);
                layer.key_only = h.mla.n_rot;
                continue;
            }
            layer.k = layer.v = TensorSpec::full(h.heads[il].n_kv, h.heads[il].head_dim);
        }
        spec.master = read_master(file, spec.widths(&LayerCacheSpec::k), spec.widths(&LayerCacheSpec::v));
        return spec;
    }
    if (!file.find_u32(key::version)) {
        fail("gguf", "expected ", "the key ", key::version, " beside the other latentkv.* keys; got none");
    }
    const auto v_paths = need(file.find_string_array(key::v_path), key::v_path);
    expect_length(key::k_path, spec.layers.size(), k_paths->size());
    expect_length(key::v_path, spec.layers.size(), v_paths.size());
    for (size_t il = 0; il < spec.layers.size(); il++) {
        LayerCacheSpec& layer = spec.layers[il];
        layer.k_path = parse_word<KPath>(key::k_path, (*k_paths)[il], schema::k_path_words);
        layer.v_path = parse_word<VPath>(key::v_path, v_paths[il], schema::v_path_words);
        check_paths(layer, h, static_cast<int>(il));
        if (h.has_mla()) layer.key_only = h.mla.n_rot;
        k_full[il] = layer.k_path == KPath::full;
        v_full[il] = layer.v_path == VPath::full;
        spec.plain = spec.plain && k_full[il] && v_full[il];
    }
    read_tensor(file, h, k_keys, &LayerCacheSpec::k, k_full, spec.layers);
    read_tensor(file, h, v_keys, &LayerCacheSpec::v, v_full, spec.layers);
    for (size_t il = 0; il < spec.layers.size(); il++) {
        const std::string blk = "blk." + std::to_string(il) + ".";
        spec.layers[il].k.encoded =
            !k_full[il] && !spec.layers[il].key_of_value() && file.find_tensor(blk + "attn_k_e.weight") != nullptr;
        spec.layers[il].v.encoded = !v_full[il] && file.find_tensor(blk + "attn_v_e.weight") != nullptr;
    }
    if (h.has_mla()) check_turned(h.mla, spec);
    if (spec.recent == 0 && spec.recent_ratio == 0.0F) {
        refuse_token_blocks(spec);
    }
    spec.master = read_master(file, spec.widths(&LayerCacheSpec::k), spec.widths(&LayerCacheSpec::v));
    return spec;
}

}  // namespace lkv
