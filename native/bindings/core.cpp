// latentkv._core: the native runtime as Python sees it. The interface is python/latentkv/_core.pyi.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "base/forks.h"
#include "base/log.h"
#include "bindings.h"
#include "cache/formats.h"
#include "cache/options.h"
#include "cache/recurrent/sequence_state.h"
#include "devices/gpus.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "gguf/content_hash.h"
#include "model/mtp.h"

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
    for (const lkv::Format format : lkv::all_formats) formats.append(lkv::format_name(format));
    info["formats"] = formats;
    return info;
}

// (free, total) bytes of each; empty without one.
py::list gpu_memory() {
    std::string why;
    py::list found;
    for (int gpu = 0, n = lkv::count_gpus(why); gpu < n; gpu++) {
        const lkv::GpuBytes bytes = lkv::gpu_bytes(gpu);
        found.append(py::make_tuple(bytes.free, bytes.total));
    }
    return found;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    const auto errors = py::module_::import("latentkv.errors");
    static py::exception<lkv::Error> error(module, "Error", errors.attr("LatentKVError"));
    static const py::object no_memory = errors.attr("NoMemory");
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) {
                std::rethrow_exception(p);
            }
        } catch (const lkv::Error& e) {
            py::set_error(error, e.what());
        } catch (const std::bad_alloc&) {
            py::set_error(
                no_memory,
                "[memory] expected room for what was asked; got none; lower -c / n_ctx or choose a smaller --kv");
        } catch (const std::invalid_argument& e) {  // row layouts and kernel plans
            py::set_error(error, e.what());
        }
    });
    lkv::install_library_logging();
    lkv::guard_forks();
    module.attr("__version__") = LATENTKV_VERSION;
    module.def("build_info", &build_info);
    module.def("gpu_memory", &gpu_memory);
    module.def(
        "set_log_level", [](int level) { lkv::set_log_level(static_cast<lkv::LogLevel>(level)); }, py::arg("level"));
    module.attr("LEFT_ALONE") = lkv::left_alone;
    module.attr("MOST_GUESSES") = lkv::most_guesses;
    module.attr("MTP_GUESSES") = lkv::mtp_guesses;
    module.attr("STATE_SLOTS") = +lkv::SequenceState::slots_of_sequence;
    module.attr("DEMOTION_BATCH") = lkv::demotion_batch;
    module.def(
        "content_hash", [](const std::string& path) { return lkv::content_hash(lkv::GgufFile::open(path)); },
        py::arg("path"));
    bind_blocks(module);
    bind_gguf(module);
    bind_model(module);
    bind_rows(module);
    bind_chat(module);
    bind_session(module);
    bind_sampler(module);
}
