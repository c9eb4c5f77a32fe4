// Weights to and from ggml's blocks, by ggml's own code.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "base/error.h"
#include "bindings.h"
#include "ggml.h"
#include "gil.h"

namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

// of_rows(first, last) in equal shares to as many threads as there are cores; every row is coded by itself.
template <class OfRows>
void share_rows(int64_t n_rows, int64_t n, const OfRows& of_rows) {
    constexpr int64_t least_elements = 1 << 18;  // what is worth a thread
    const int64_t n_threads = std::clamp<int64_t>(n_rows * n / least_elements, 1, lkv::usable_cores());
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < n_threads; i++) {
        threads.emplace_back(of_rows, n_rows * i / n_threads, n_rows * (i + 1) / n_threads);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// ggml says q4_K and q4_0.
bool same_word(std::string_view a, std::string_view b) {
    const auto lower = [](char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); };
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

ggml_type type_of(const std::string& name, const char* where) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const auto type = static_cast<ggml_type>(t);
        if (ggml_type_name(type) != nullptr && ggml_blck_size(type) != 0 && same_word(ggml_type_name(type), name)) {
            return type;
        }
    }
    lkv::fail(where, "expected a ggml type name; got ", lkv::quoted(name));
}

Bytes quantize(const Floats& data, const std::string& name, const std::optional<Floats>& importance) {
    if (data.ndim() != 2) {
        lkv::fail("quantize", "expected rows [n_rows, n]; got ", data.ndim(), " dimensions");
    }
    if (importance && (importance->ndim() != 1 || importance->shape(0) != data.shape(1))) {
        lkv::fail("quantize", "expected the importance of ", data.shape(1), " columns; got ", importance->size());
    }
    const ggml_type type = type_of(name, "quantize");
    if (ggml_quantize_requires_imatrix(type) && !importance) {
        lkv::fail("quantize", "expected the importance of columns for ", name, "; got none");
    }
    const int64_t n = data.shape(1);
    if (n % ggml_blck_size(type) != 0) {
        lkv::fail("quantize", "expected rows in multiples of ", ggml_blck_size(type), " for ", name, "; got ", n);
    }
    Bytes out({data.shape(0), static_cast<py::ssize_t>(ggml_row_size(type, n))});
    const float* const from = data.data();
    const float* const columns = importance ? importance->data() : nullptr;
    uint8_t* const to = out.mutable_data();
    const int64_t n_rows = data.shape(0);
    const Unlocked unlocked;
    ggml_quantize_init(type);
    share_rows(n_rows, n, [=](int64_t first, int64_t last) {
        ggml_quantize_chunk(type, from, to, first * n, last - first, n, columns);
    });
    return out;
}

Floats dequantize(const Bytes& data, const std::string& name) {
    const ggml_type type = type_of(name, "dequantize");
    const ggml_type_traits* const traits = ggml_get_type_traits(type);
    const auto block_bytes = static_cast<py::ssize_t>(ggml_type_size(type));
    if (data.ndim() != 2 || data.shape(1) % block_bytes != 0) {
        lkv::fail("dequantize", "expected rows of blocks of ", block_bytes, " bytes for ", name, "; got ",
                  data.ndim() == 2 ? data.shape(1) : data.ndim(), data.ndim() == 2 ? " bytes" : " dimensions");
    }
    if (traits->to_float == nullptr) {
        lkv::fail("dequantize", "expected a type of blocks or f16 or bf16; got ", name);
    }
    const int64_t n_rows = data.shape(0);
    const int64_t row_bytes = data.shape(1);
    const int64_t n = row_bytes / block_bytes * ggml_blck_size(type);
    Floats out({data.shape(0), static_cast<py::ssize_t>(n)});
    const uint8_t* const from = data.data();
    float* const to = out.mutable_data();
    const Unlocked unlocked;
    share_rows(n_rows, n, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            traits->to_float(from + row * row_bytes, to + row * n, n);
        }
    });
    return out;
}

}  // namespace

void bind_blocks(py::module_& module) {
    module.def("quantize", &quantize, py::arg("data"), py::arg("type"), py::arg("importance") = py::none());
    module.def("dequantize", &dequantize, py::arg("data"), py::arg("type"));
}
