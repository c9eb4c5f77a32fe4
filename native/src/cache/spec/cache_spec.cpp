#include "cache/spec/cache_spec.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>

#include "base/error.h"
#include "cache/spec/segments.h"
#include "decoder/word.h"

namespace lkv {
namespace {

// cache/formats.h lists the schema's formats in the schema's order.
static_assert(static_cast<size_t>(all_formats[std::size(all_formats) - 1]) + 1 == schema::format_words.size());
#define X(name, type) static_assert(static_cast<int>(Format::name) == static_cast<int>(schema::Format::name));
LKV_ROW_FORMATS(X)
LKV_TOKEN_BLOCK_FORMATS(X)
#undef X

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

bool CacheSpec::full_beside_latents() const {
    return std::all_of(layers.begin(), layers.end(),
                       [](const LayerCacheSpec& layer) { return layer.exact_is_full() || !layer.has_rows(); });
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

void read_regions(const GgufFile& file, CacheSpec& spec) {
    const auto tokens = [&](std::string_view key) {
        return static_cast<int>(std::min<uint32_t>(file.find_u32(key).value_or(0), 1U << 20));
    };
    spec.sink = tokens(key::sink);
    spec.recent = tokens(key::recent);
    spec.recent_ratio = file.find_f32(key::recent_ratio).value_or(0.0F);
    if (!(spec.recent_ratio >= 0.0F && spec.recent_ratio <= 1.0F)) {
        fail(key::recent_ratio, "expected a ratio from 0 to 1; got ", spec.recent_ratio);
    }
    spec.sink_format = read_region_format(file, key::sink_format);
    spec.recent_format = read_region_format(file, key::recent_format);
}

// A file without paths: full K and V.
void describe_full_rows(const HParams& h, CacheSpec& spec) {
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
}

void read_paths(const GgufFile& file, const HParams& h, std::span<const std::string_view> k_paths, CacheSpec& spec) {
    const auto v_paths = need(file.find_string_array(key::v_path), key::v_path);
    expect_length(key::k_path, spec.layers.size(), k_paths.size());
    expect_length(key::v_path, spec.layers.size(), v_paths.size());
    for (size_t il = 0; il < spec.layers.size(); il++) {
        LayerCacheSpec& layer = spec.layers[il];
        layer.k_path = parse_word<KPath>(key::k_path, k_paths[il], schema::k_path_words);
        layer.v_path = parse_word<VPath>(key::v_path, v_paths[il], schema::v_path_words);
        check_paths(layer, h, static_cast<int>(il));
        if (h.has_mla()) layer.key_only = h.mla.n_rot;
        spec.plain = spec.plain && layer.k_path == KPath::full && layer.v_path == VPath::full;
    }
}

// A side has form E if the file has its encoder.
void find_encoders(const GgufFile& file, CacheSpec& spec) {
    for (size_t il = 0; il < spec.layers.size(); il++) {
        LayerCacheSpec& layer = spec.layers[il];
        const std::string blk = "blk." + std::to_string(il) + ".";
        layer.k.encoded = layer.k_path != KPath::full && !layer.key_of_value() &&
                          file.find_tensor(blk + "attn_k_e.weight") != nullptr;
        layer.v.encoded = layer.v_path != VPath::full && file.find_tensor(blk + "attn_v_e.weight") != nullptr;
    }
}

}  // namespace

CacheSpec full_rows(const HParams& h) {
    CacheSpec spec;
    spec.layers.resize(static_cast<size_t>(h.n_layer));
    describe_full_rows(h, spec);
    return spec;
}

CacheSpec read_cache_spec(const GgufFile& file, const HParams& h) {
    CacheSpec spec;
    spec.layers.resize(static_cast<size_t>(h.n_layer));
    refuse_unknown_keys(file);
    const auto version = file.find_u32(key::version);
    if (version && *version != schema::version) {
        fail(key::version, "expected ", schema::version, "; got ", *version);
    }
    read_regions(file, spec);
    spec.fitted_context =
        static_cast<int>(std::min<uint32_t>(file.find_u32(key::fitted_context).value_or(0), 1U << 30));
    if (const auto prefill = file.find_string(key::prefill)) {
        spec.prefill = parse_word<Prefill>(key::prefill, *prefill, schema::prefill_words);
    }
    if (const auto k_paths = file.find_string_array(key::k_path)) {
        if (!version) {
            fail("gguf", "expected ", "the key ", key::version, " beside the other latentkv.* keys; got none");
        }
        read_paths(file, h, *k_paths, spec);
        read_segments(file, h, true, spec.layers);
        read_segments(file, h, false, spec.layers);
        find_encoders(file, spec);
        if (h.has_mla()) check_turned(h.mla, spec);
        if (spec.recent == 0 && spec.recent_ratio == 0.0F) refuse_token_blocks(spec);
    } else {
        describe_full_rows(h, spec);
    }
    spec.master = read_master(file, spec.widths(&LayerCacheSpec::k), spec.widths(&LayerCacheSpec::v));
    return spec;
}

}  // namespace lkv
