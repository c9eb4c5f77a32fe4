#include "cache/spec/master.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "base/error.h"
#include "gguf_schema.h"

namespace lkv {
namespace {

constexpr std::array master_keys = {key::budget_formats,        key::budget_context,       key::budget_drop_penalty,
                                    key::budget_predicted,      key::budget_kld,           key::k_segment_distortions,
                                    key::v_segment_distortions, key::budget_exact_formats, key::budget_exact_kld};

std::vector<Format> read_names(const GgufFile& file, std::string_view key) {
    std::vector<Format> formats;
    for (const std::string_view name : file.get_string_array(key)) {
        const auto format = parse_format(name);
        if (!format || std::find(formats.begin(), formats.end(), *format) != formats.end()) {
            fail(key, "expected known row formats (docs/gguf.md), each once; got ", quoted(name));
        }
        formats.push_back(*format);
    }
    return formats;
}

std::vector<Format> read_formats(const GgufFile& file) {
    std::vector<Format> formats = read_names(file, key::budget_formats);
    const auto none = std::find(formats.begin(), formats.end(), Format::none);
    if (formats.size() < 2 || none != formats.end() - 1) {
        fail(key::budget_formats, "expected one stored format or more, then none; got ", formats.size(), " formats",
             none == formats.end() ? " without none" : "");
    }
    const auto scaled = std::find_if(formats.begin(), none, format_scaled_by_group);
    const auto other = std::find_if_not(formats.begin(), none, format_scaled_by_group);
    if (scaled != none && other != none) {
        fail(key::budget_formats, "expected formats n8 … n1, which make rows of their own kind, or none of them; got ",
             format_name(*scaled), " and ", format_name(*other));
    }
    return formats;
}

// n finite numbers of at least 0.
std::vector<float> read_costs(const GgufFile& file, std::string_view key, size_t n) {
    std::vector<float> values = file.get_f32_array(key);
    if (values.size() != n) {
        fail(key, "expected an array of ", n, " entries; got ", values.size());
    }
    for (const float value : values) {
        if (!(std::isfinite(value) && value >= 0.0F)) {
            fail(key, "expected finite numbers from 0; got ", value);
        }
    }
    return values;
}

std::vector<Format> read_exact_formats(const GgufFile& file) {
    std::vector<Format> formats = read_names(file, key::budget_exact_formats);
    for (const Format format : formats) {
        if (format == Format::none || format_in_token_blocks(format)) {
            fail(key::budget_exact_formats, "expected row formats that store single tokens; got ", format_name(format));
        }
    }
    if (formats.empty()) {
        fail(key::budget_exact_formats, "expected one row format or more; got none");
    }
    return formats;
}

void check_widths(const Master& master, std::span<const int> widths, std::string_view side) {
    for (const Format format : master.formats) {
        for (const int width : widths) {
            if (width % format_width_multiple(format) != 0) {
                fail(key::budget_formats, "expected ", side, " segments in multiples of ",
                     format_width_multiple(format), " channels for ", format_name(format), "; got ", width);
            }
        }
    }
}

}  // namespace

std::optional<Master> read_master(const GgufFile& file, std::span<const int> k_widths, std::span<const int> v_widths) {
    const bool has_k = !k_widths.empty();  // else keys are in V's rows
    const auto absent = std::find_if(master_keys.begin(), master_keys.end(), [&](auto key) {
        return !file.has(key) && (has_k || key != key::k_segment_distortions);
    });
    if (std::none_of(master_keys.begin(), master_keys.end(), [&](auto key) { return file.has(key); })) {
        return std::nullopt;
    }
    if (absent != master_keys.end()) {
        fail("gguf", "expected the key ", *absent, " beside the others of a master file; got none");
    }
    Master master;
    master.formats = read_formats(file);
    check_widths(master, k_widths, "k");
    check_widths(master, v_widths, "v");
    const uint32_t context = file.get_u32(key::budget_context);
    if (context < 1 || context > 1U << 28) {
        fail(key::budget_context, "expected a number of tokens from 1 to ", 1U << 28, "; got ", context);
    }
    master.context = static_cast<int>(context);
    master.drop_penalty = file.get_f32(key::budget_drop_penalty);
    if (!(std::isfinite(master.drop_penalty) && master.drop_penalty >= 1.0F)) {
        fail(key::budget_drop_penalty, "expected a finite factor from 1; got ", master.drop_penalty);
    }
    if (has_k) master.k = read_costs(file, key::k_segment_distortions, k_widths.size() * master.formats.size());
    master.v = read_costs(file, key::v_segment_distortions, v_widths.size() * master.formats.size());
    const size_t n_measured = std::max<size_t>(1, file.find(key::budget_predicted)->count);
    master.predicted = read_costs(file, key::budget_predicted, n_measured);
    master.kld = read_costs(file, key::budget_kld, n_measured);
    for (size_t i = 0; i < n_measured; i++) {
        const bool rises =
            i == 0 || (master.predicted[i] > master.predicted[i - 1] && master.kld[i] >= master.kld[i - 1]);
        if (!rises || master.predicted[i] <= 0.0F || master.kld[i] <= 0.0F) {
            fail(rises ? key::budget_kld : key::budget_predicted,
                 "expected measured plans above 0, from the best to the worst; got ", master.predicted[i], " and ",
                 master.kld[i]);
        }
    }
    master.exact_formats = read_exact_formats(file);
    master.exact_kld = read_costs(file, key::budget_exact_kld, master.exact_formats.size());
    return master;
}

}  // namespace lkv
