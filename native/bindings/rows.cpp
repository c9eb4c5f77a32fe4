// Rows as the cache stores them, for code that measures or forecasts.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings.h"
#include "cache/formats.h"
#include "cache/kv_cache.h"
#include "cache/row.h"

namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Groups = std::vector<std::vector<std::pair<std::string, int>>>;

lkv::Format format_of(const std::string& name) {
    const std::optional<lkv::Format> found = lkv::parse_format(name);
    if (!found) lkv::fail("format", "expected a row format; got ", lkv::quoted(name));
    return *found;
}

// Channels rounded up to whole units of a format.
int whole_units(lkv::Format format, int width) {
    const int unit = lkv::format_width_multiple(format);
    return (width + unit - 1) / unit * unit;
}

int format_bytes(const std::string& name, int width) {
    const lkv::Format format = format_of(name);
    return lkv::format_bytes(format, whole_units(format, width));
}

std::vector<std::vector<lkv::SegmentSpec>> specs_of(const Groups& groups) {
    std::vector<std::vector<lkv::SegmentSpec>> specs;
    for (const auto& group : groups) {
        std::vector<lkv::SegmentSpec>& segments = specs.emplace_back();
        for (const auto& [name, width] : group) segments.push_back({format_of(name), width});
    }
    return specs;
}

std::vector<std::vector<lkv::SegmentSpec>> in_whole_units(const Groups& groups) {
    auto specs = specs_of(groups);
    for (auto& group : specs) {
        for (lkv::SegmentSpec& segment : group) segment.width = whole_units(segment.format, segment.width);
    }
    return specs;
}

int row_bytes(const Groups& groups) { return lkv::RowPlan(in_whole_units(groups)).row_bytes(); }

using Side = std::tuple<bool, bool, Groups>;                          // is full; is of form E; segments
using Layer = std::tuple<std::pair<int, int>, int, int, Side, Side>;  // KV heads, their width; window; key_only; K, V

lkv::TensorSpec tensor_of(const Side& side) {
    lkv::TensorSpec spec;
    spec.encoded = std::get<1>(side);
    spec.formats.emplace();
    for (const auto& group : in_whole_units(std::get<2>(side))) {
        spec.segments.emplace_back();
        spec.formats->emplace_back();
        for (const lkv::SegmentSpec& segment : group) {
            spec.segments.back().push_back(segment.width);
            spec.formats->back().push_back(segment.format);
        }
        spec.ranks.push_back(std::accumulate(spec.segments.back().begin(), spec.segments.back().end(), 0));
    }
    return spec;
}

py::dict plan_bytes(const std::vector<Layer>& layers, int n_ctx, int sink, int recent, double recent_ratio,
                    const std::string& sink_format, const std::string& recent_format) {
    lkv::HParams hparams;
    lkv::CacheSpec spec;
    hparams.n_layer = static_cast<int>(layers.size());
    for (const auto& [heads, window, key_only, k, v] : layers) {
        hparams.heads.push_back({heads.first, heads.second});
        lkv::LayerCacheSpec& layer = spec.layers.emplace_back();
        layer.k = tensor_of(k);
        layer.v = tensor_of(v);
        layer.key_only = key_only;
        layer.k_path = layer.k.ranks.empty() ? lkv::KPath::value
                       : std::get<0>(k)      ? lkv::KPath::full
                                             : lkv::KPath::rotated;
        layer.v_path = std::get<0>(v) ? lkv::VPath::full : lkv::VPath::latent;
        lkv::LayerAttention& attention = hparams.block.layers.emplace_back();
        attention.window = window;
        if (!layer.has_rows()) attention.mixer = lkv::Mixer::none;
        if (key_only > 0) hparams.mla.kv_rank = heads.second - key_only;
    }
    // one sequence on a GPU: its ubatches are longer, so exact windows and rings have more slots than on the CPU
    lkv::KvCacheOptions options;
    options.n_ctx = n_ctx;
    options.sink = sink;
    options.recent = recent;
    options.recent_ratio = recent_ratio;
    options.runs = {{0, 0, hparams.n_layer}};
    options.ubatches = lkv::Ubatches::of({}, hparams, spec, options);
    options.sink_format = {format_of(sink_format), true};
    options.recent_format = {format_of(recent_format), true};
    return kv_bytes_dict(lkv::KvCache(hparams, spec, options, false).bytes());
}

py::tuple stored_rows(const Groups& groups, const Floats& rows) {
    const lkv::RowPlan plan(specs_of(groups));
    const lkv::RowLayout layout = plan.view();
    if (in_token_blocks(layout)) lkv::fail("stored_rows", "expected formats of single tokens; got blocks of 32");
    if (rows.ndim() != 2 || rows.shape(1) != layout.width) {
        lkv::fail("stored_rows", "expected rows [n, ", layout.width, "]; got ", rows.ndim(), " dimensions and ",
                  rows.size(), " numbers");
    }
    const py::ssize_t n = rows.shape(0);
    py::array_t<uint8_t> bytes({n, static_cast<py::ssize_t>(layout.row_bytes)});
    py::array_t<float> values({n, static_cast<py::ssize_t>(layout.width)});
    for (py::ssize_t i = 0; i < n; i++) {
        uint8_t* const row = bytes.mutable_data() + i * layout.row_bytes;
        lkv::write_row(layout, rows.data() + i * layout.width, row);
        lkv::read_row(layout, row, values.mutable_data() + i * layout.width);
    }
    return py::make_tuple(bytes, values);
}

}  // namespace

void bind_rows(py::module_& module) {
    module.def("format_bytes", &format_bytes, py::arg("format"), py::arg("width"));
    module.def("row_bytes", &row_bytes, py::arg("groups"));
    module.def("plan_bytes", &plan_bytes, py::arg("layers"), py::arg("n_ctx"), py::arg("sink"), py::arg("recent"),
               py::arg("recent_ratio"), py::arg("sink_format"), py::arg("recent_format"));
    module.def("stored_rows", &stored_rows, py::arg("groups"), py::arg("rows"));
}
