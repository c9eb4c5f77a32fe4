// Rows as the cache stores them, for code that measures or forecasts.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings.h"
#include "cache/formats.h"
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

int row_bytes(const Groups& groups) {
    auto specs = specs_of(groups);
    for (auto& group : specs) {
        for (lkv::SegmentSpec& segment : group) segment.width = whole_units(segment.format, segment.width);
    }
    return lkv::RowPlan(specs).row_bytes();
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
    module.def("stored_rows", &stored_rows, py::arg("groups"), py::arg("rows"));
}
