// latentkv._core: the native runtime as Python sees it. The interface is python/latentkv/_core.pyi.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "bindings.h"
#include "cache/formats.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "gguf/content_hash.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
    py::dict info;
    info["version"] = LATENTKV_VERSION;
    info["ggml"] = ggml_version();
    info["compiler"] = __VERSION__;
#if defined(LATENTKV_CUDA_BUILD)
    info["cuda"] = true;
#else
    info["cuda"] = false;
#endif
    py::list features;
    // ggml's registry lists what its CPU backend was compiled for
    auto* const registry = ggml_backend_cpu_reg();
    if (const auto get = reinterpret_cast<ggml_backend_get_features_t>(
            ggml_backend_reg_get_proc_address(registry, "ggml_backend_get_features"))) {
        for (const ggml_backend_feature* feature = get(registry); feature != nullptr && feature->name != nullptr;
             feature++) {
            features.append(feature->name);
        }
    }
    info["cpu_features"] = features;
    py::list formats;
    for (int f = 1; f < lkv::n_formats; f++) {
        formats.append(lkv::format_name(static_cast<lkv::Format>(f)));
    }
    info["formats"] = formats;
    return info;
}

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Rows in equal shares to as many threads as there are cores; every row is encoded by itself.
void quantize_rows(ggml_type type, const float* data, uint8_t* out, int64_t n_rows, int64_t n,
                   const float* importance) {
    constexpr int64_t least_elements = 1 << 18;  // what is worth a thread
    ggml_quantize_init(type);
    const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
    const int64_t n_threads = std::clamp<int64_t>(n_rows * n / least_elements, 1, cores);
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < n_threads; i++) {
        const int64_t first = n_rows * i / n_threads;
        const int64_t last = n_rows * (i + 1) / n_threads;
        threads.emplace_back([=] { ggml_quantize_chunk(type, data, out, first * n, last - first, n, importance); });
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

py::array_t<uint8_t> quantize(const Floats& data, const std::string& type, const std::optional<Floats>& importance) {
    if (data.ndim() != 2) {
        lkv::fail("quantize", "expected rows [n_rows, n]; got ", data.ndim(), " dimensions");
    }
    if (importance && (importance->ndim() != 1 || importance->shape(0) != data.shape(1))) {
        lkv::fail("quantize", "expected the importance of ", data.shape(1), " columns; got ", importance->size());
    }
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const auto ggml = static_cast<ggml_type>(t);
        if (ggml_type_name(ggml) == nullptr || !same_word(ggml_type_name(ggml), type) || ggml_blck_size(ggml) == 0) {
            continue;
        }
        if (ggml_quantize_requires_imatrix(ggml) && !importance) {
            lkv::fail("quantize", "expected the importance of columns for ", type, "; got none");
        }
        const int64_t n = data.shape(1);
        if (n % ggml_blck_size(ggml) != 0) {
            lkv::fail("quantize", "expected rows in multiples of ", ggml_blck_size(ggml), " for ", type, "; got ", n);
        }
        const auto row_bytes = static_cast<py::ssize_t>(ggml_row_size(ggml, n));
        py::array_t<uint8_t> out({data.shape(0), row_bytes});
        const float* const columns = importance ? importance->data() : nullptr;
        uint8_t* const blocks = out.mutable_data();
        const py::gil_scoped_release release;
        quantize_rows(ggml, data.data(), blocks, data.shape(0), n, columns);
        return out;
    }
    lkv::fail("quantize", "expected a ggml type name; got ", lkv::quoted(type));
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    static py::exception<lkv::Error> error(module, "Error", PyExc_ValueError);
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) {
                std::rethrow_exception(p);
            }
        } catch (const lkv::Error& e) {
            py::set_error(error, e.what());
        } catch (const std::invalid_argument& e) {  // row layouts and kernel plans
            py::set_error(error, e.what());
        }
    });
    lkv::install_library_logging();
    module.attr("__version__") = LATENTKV_VERSION;
    module.def("build_info", &build_info);
    module.def(
        "set_log_level", [](int level) { lkv::set_log_level(static_cast<lkv::LogLevel>(level)); }, py::arg("level"));
    module.def(
        "content_hash", [](const std::string& path) { return lkv::content_hash(lkv::GgufFile::open(path)); },
        py::arg("path"));
    module.def("quantize", &quantize, py::arg("data"), py::arg("type"), py::arg("importance") = py::none());
    bind_model(module);
    bind_session(module);
    bind_sampler(module);
}
