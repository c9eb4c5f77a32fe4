#include "model/model.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>

#include "base/log.h"
#include "bindings.h"
#include "gil.h"
#include "model/dequantized.h"
#include "runtime/plan/forecast.h"

namespace py = pybind11;
using lkv::GgufType;
using lkv::GgufValue;
using lkv::Model;

namespace {

constexpr uint64_t longest_listed_array =
    64;  // tokenizer arrays run to 100k+ entries; longer ones show as their length

py::object element(const GgufValue& value, size_t i) {
    return value.type == GgufType::string ? text(value.strings[i]) : gguf_number(value, i);
}

py::dict metadata(const Model& model) {
    py::dict out;
    for (const GgufValue& value : model.file().values()) {
        const py::object key = text(value.key);
        if (!value.is_array) {
            out[key] = element(value, 0);
        } else if (value.count > longest_listed_array && value.key.starts_with("tokenizer.")) {
            out[key] = py::int_(value.count);
        } else {
            py::list items;
            for (size_t i = 0; i < value.count; i++) {
                items.append(element(value, i));
            }
            out[key] = items;
        }
    }
    return out;
}

py::dict tensor_dict(std::string_view path, const lkv::TensorSpec& spec) {
    py::dict out;
    out["path"] = std::string(path);
    out["group"] = spec.group;
    out["form"] = spec.encoded || path == "full" ? "e" : "a";
    out["ranks"] = spec.ranks;
    out["segments"] = spec.segments;
    out["formats"] = py::none();
    if (spec.formats) {
        py::list groups;
        for (const auto& plan : *spec.formats) {
            py::list names;
            for (const lkv::Format format : plan) {
                names.append(lkv::format_name(format));
            }
            groups.append(names);
        }
        out["formats"] = groups;
    }
    out["energy"] = spec.energy ? py::object(py::float_(*spec.energy)) : py::object(py::none());
    return out;
}

py::list layers(const Model& model) {
    py::list out;
    for (size_t il = 0; il < model.cache_spec().layers.size(); il++) {
        const lkv::LayerCacheSpec& layer = model.cache_spec().layers[il];
        py::dict item;
        item["rows_of"] = model.hparams().rows_of(static_cast<int>(il));
        item["n_head_kv"] = model.hparams().heads[il].n_kv;
        item["head_dim"] = model.hparams().heads[il].head_dim;
        item["key_only"] = layer.key_only;
        item["mixer"] = lkv::schema::mixer_words[static_cast<size_t>(model.hparams().block.layers[il].mixer)];
        item["k"] = tensor_dict(lkv::path_name(layer.k_path), layer.k);
        item["v"] = tensor_dict(lkv::path_name(layer.v_path), layer.v);
        out.append(item);
    }
    return out;
}

// [segments, formats]: bytes of a token, and nats per token. segments: how many are planned together, of every layer and group.
py::dict side_tables(const lkv::CacheSpec& spec, lkv::TensorSpec lkv::LayerCacheSpec::* tensor,
                     const std::vector<float>& distortions) {
    const std::vector<lkv::Format>& formats = spec.master->formats;
    const std::vector<int> widths = spec.widths(tensor);
    const auto shape = {static_cast<py::ssize_t>(widths.size()), static_cast<py::ssize_t>(formats.size())};
    py::array_t<int64_t> bytes(shape);
    int64_t* out = bytes.mutable_data();
    for (const int width : widths) {
        for (const lkv::Format format : formats) {
            *out++ = lkv::format_bytes(format, width);
        }
    }
    py::array_t<double> nats(shape);
    std::copy(distortions.begin(), distortions.end(), nats.mutable_data());
    py::list counts;
    for (const lkv::LayerCacheSpec& layer : spec.layers) {
        for (const auto& group : (layer.*tensor).segments) {
            size_t n_turned = 0;  // of MLA: planned apart from those of the latent
            for (int width = 0; width < layer.key_only; n_turned++) width += group[n_turned];
            if (n_turned > 0) counts.append(n_turned);
            counts.append(group.size() - n_turned);
        }
    }
    py::dict side;
    side["segments"] = counts;
    side["bytes"] = bytes;
    side["distortion"] = nats;
    return side;
}

py::object master(const Model& model) {
    const lkv::CacheSpec& spec = model.cache_spec();
    if (!spec.master) {
        return py::none();
    }
    py::list formats;
    for (const lkv::Format format : spec.master->formats) {
        formats.append(lkv::format_name(format));
    }
    py::dict out;
    out["formats"] = formats;
    out["context"] = spec.master->context;
    out["drop_penalty"] = spec.master->drop_penalty;
    out["predicted"] = spec.master->predicted;
    out["kld"] = spec.master->kld;
    py::dict exact;
    for (size_t i = 0; i < spec.master->exact_formats.size(); i++) {
        exact[lkv::format_name(spec.master->exact_formats[i])] = spec.master->exact_kld[i];
    }
    out["exact"] = exact;
    out["k"] = side_tables(spec, &lkv::LayerCacheSpec::k, spec.master->k);
    out["v"] = side_tables(spec, &lkv::LayerCacheSpec::v, spec.master->v);
    return out;
}

// The shape of the widest K and V; zeros where only the vocabulary was read.
lkv::HeadShape widest(const lkv::HParams& h) {
    if (h.heads.empty()) return {};
    return *std::max_element(h.heads.begin(), h.heads.end(),
                             [](const lkv::HeadShape& a, const lkv::HeadShape& b) { return a.width() < b.width(); });
}

py::dict plan_dict(const lkv::SessionPlan& plan, const lkv::KvBytes& bytes) {
    py::dict out = kv_bytes_dict(bytes);
    out["n_ubatch"] = plan.cache.ubatches.longest;
    out["sink"] = plan.cache.sink;
    out["recent"] = plan.cache.recent;
    out["recent_ratio"] = plan.cache.recent_ratio;
    out["warnings"] = plan.warnings;
    return out;
}

py::dict kv_bytes(const Model& model, int n_ctx, const py::kwargs& given) {
    lkv::SessionOptions options = session_options("kv_bytes", given);
    options.n_ctx = n_ctx;
    const lkv::SessionPlan plan = lkv::resolve(model, options);
    return plan_dict(plan, lkv::KvCache(model.hparams(), model.cache_spec(), plan.cache, false).bytes());
}

py::dict forecast(const Model& model, int n_ctx, const std::optional<std::vector<size_t>>& free,
                  const py::kwargs& given) {
    lkv::SessionOptions options = session_options("forecast", given);
    options.n_ctx = n_ctx;
    lkv::FreeOnGpu on_gpu;
    if (free) on_gpu = [&](int gpu) { return free->at(static_cast<size_t>(gpu)); };
    const lkv::SessionPlan plan = lkv::resolve(model, options, on_gpu);
    const lkv::Forecast forecast = lkv::forecast(model, plan);
    const std::vector<size_t> weights = model.resident_bytes();
    py::dict out = plan_dict(plan, forecast.cache);
    out["weights"] = std::accumulate(weights.begin(), weights.end(), size_t{0});
    out["compute"] = std::accumulate(forecast.compute.begin(), forecast.compute.end(), size_t{0});
    out["prefill"] = forecast.prefill;
    py::list runs;
    for (size_t i = 0; i < model.runs().size(); i++) {
        py::dict run;
        run["gpu"] = model.runs()[i].on_gpu() ? py::object(py::int_(model.runs()[i].gpu)) : py::object(py::none());
        run["layers"] = model.runs()[i].end_layer - model.runs()[i].first_layer;
        run["weights"] = weights[i];
        run["cache"] = forecast.cache.runs[i];
        run["compute"] = forecast.compute[i];
        runs.append(run);
    }
    out["runs"] = runs;
    return out;
}

}  // namespace

py::dict kv_bytes_dict(const lkv::KvBytes& bytes, size_t guesses) {
    py::dict out;
    out["total"] = bytes.total() + guesses;
    out["guesses"] = guesses;
    out["k"] = bytes.k;
    out["v"] = bytes.v;
    out["cells"] = bytes.cells;
    out["states"] = bytes.states;
    out["snapshots"] = bytes.snapshots;
    out["snapshots_most"] = bytes.snapshots_most;
    out["n_cells"] = bytes.n_cells;
    out["cell_bytes"] = lkv::Cells::bytes_per_slot();
    out["per_token"] = bytes.per_token;
    out["f16_per_token"] = bytes.f16_per_token;
    out["f16_total"] = bytes.f16_total;
    out["share"] = bytes.share;
    py::list regions;
    for (const lkv::RegionBytes& region : bytes.regions) {
        py::dict item;
        item["name"] = region.name;
        item["slots"] = region.slots;
        item["used"] = region.used;
        item["k"] = region.k;
        item["v"] = region.v;
        regions.append(item);
    }
    out["regions"] = regions;
    out["layer_slots"] = bytes.layer_slots;
    out["all_exact"] = bytes.all_exact;
    out["exact_at"] = std::vector<int>(bytes.exact_at, bytes.exact_at + 3);
    return out;
}

void bind_model(py::module_& module) {
    py::class_<Model, std::shared_ptr<Model>> bound(module, "Model");
    bound
        .def(py::init([](const std::string& path, const std::string& latent_path, int n_gpu_layers,
                         const std::vector<float>& tensor_split, int main_gpu, const std::string& split_mode,
                         bool use_mmap, bool use_mlock, bool vocab_only, bool describe_only,
                         const std::string& weights) {
                 const Unlocked unlocked;
                 const lkv::GpuOptions gpu{n_gpu_layers, tensor_split, main_gpu, lkv::parse_split_mode(split_mode)};
                 return std::make_shared<Model>(path,
                                                lkv::ModelOptions{latent_path, use_mmap, use_mlock, vocab_only, gpu,
                                                                  lkv::parse_weights(weights), describe_only});
             }),
             py::arg("path"), py::kw_only(), py::arg("latent_path") = "", py::arg("n_gpu_layers") = 0,
             py::arg("tensor_split") = std::vector<float>(), py::arg("main_gpu") = 0, py::arg("split_mode") = "layer",
             py::arg("use_mmap") = true, py::arg("use_mlock") = false, py::arg("vocab_only") = false,
             py::arg("describe_only") = false, py::arg("weights") = "stored")
        .def_property_readonly("metadata", &metadata)
        .def_property_readonly("n_vocab",
                               [](const Model& m) {
                                   return m.has_vocab() && m.hparams().n_vocab == 0 ? m.vocab().n_tokens()
                                                                                    : m.hparams().n_vocab;
                               })
        .def_property_readonly("fingerprint",
                               [](const Model& m) {
                                   char digits[17];
                                   std::snprintf(digits, sizeof digits, "%016llx",
                                                 static_cast<unsigned long long>(m.content_fingerprint()));
                                   return std::string(digits);
                               })
        .def_property_readonly("n_ctx_train", [](const Model& m) { return m.hparams().n_ctx_train; })
        .def_property_readonly("n_embd", [](const Model& m) { return m.hparams().n_embd; })
        .def_property_readonly("n_layer", [](const Model& m) { return m.hparams().n_layer; })
        .def_property_readonly("n_mtp", [](const Model& m) { return m.hparams().n_mtp; })
        .def_property_readonly("n_head", [](const Model& m) { return m.hparams().n_head; })
        .def_property_readonly("n_head_kv", [](const Model& m) { return widest(m.hparams()).n_kv; })
        .def_property_readonly("head_dim", [](const Model& m) { return widest(m.hparams()).head_dim; })
        .def_property_readonly("weights", [](const Model& m) { return lkv::weights_word(m.weights()); })
        .def_property_readonly("n_params", &Model::n_params)
        .def_property_readonly("size_bytes", &Model::size_bytes)
        .def_property_readonly("factor_bytes", &Model::factor_bytes)
        .def_property_readonly("is_plain", [](const Model& m) { return m.cache_spec().plain; })
        .def_property_readonly("has_rope",
                               [](const Model& m) { return m.hparams().block.position == lkv::Position::rope; })
        .def_property_readonly("layers", &layers)
        .def_property_readonly("master", &master)
        .def_property_readonly("regions",
                               [](const Model& m) {
                                   py::dict out;
                                   out["sink"] = m.cache_spec().sink;
                                   out["recent"] = m.cache_spec().recent;
                                   out["prefill"] =
                                       lkv::schema::prefill_words[static_cast<size_t>(m.cache_spec().prefill)];
                                   out["recent_ratio"] = m.cache_spec().recent_ratio;
                                   out["sink_format"] = lkv::format_name(m.cache_spec().sink_format);
                                   out["recent_format"] = lkv::format_name(m.cache_spec().recent_format);
                                   return out;
                               })
        .def_property_readonly("chat_template",
                               [](const Model& m) -> py::object {
                                   if (!m.has_vocab() || !m.vocab().chat_template()) {
                                       return py::none();
                                   }
                                   return text(*m.vocab().chat_template());
                               })
        .def("kv_bytes", &kv_bytes, py::arg("n_ctx"))
        .def("forecast", &forecast, py::arg("n_ctx"), py::arg("free") = py::none());
    bind_vocab(bound);
}
