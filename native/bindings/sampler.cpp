#include "runtime/sampler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;
using lkv::Sampler;
using lkv::SamplerOptions;

namespace {

// Keeps the model, and with it the vocabulary, alive as long as the sampler.
struct PySampler {
    std::shared_ptr<lkv::Model> model;
    Sampler sampler;
};

}  // namespace

void bind_sampler(py::module_& module) {
    py::class_<PySampler>(module, "Sampler")
        .def(py::init([](const std::shared_ptr<lkv::Model>& model, float temperature, int32_t top_k, float top_p,
                         float min_p, float typical_p, float repeat_penalty, float frequency_penalty,
                         float presence_penalty, int32_t penalty_last_n, int32_t mirostat_mode, float mirostat_tau,
                         float mirostat_eta, uint32_t seed, const std::optional<std::map<int32_t, float>>& logit_bias,
                         const std::optional<std::string>& grammar, const std::string& grammar_root) {
                 SamplerOptions options;
                 options.temperature = temperature;
                 options.top_k = top_k;
                 options.top_p = top_p;
                 options.min_p = min_p;
                 options.typical_p = typical_p;
                 options.repeat_penalty = repeat_penalty;
                 options.frequency_penalty = frequency_penalty;
                 options.presence_penalty = presence_penalty;
                 options.penalty_last_n = penalty_last_n;
                 options.mirostat_mode = mirostat_mode;
                 options.mirostat_tau = mirostat_tau;
                 options.mirostat_eta = mirostat_eta;
                 options.seed = seed;
                 options.logit_bias = logit_bias.value_or(std::map<int32_t, float>{});
                 options.grammar = grammar;
                 options.grammar_root = grammar_root;
                 return new PySampler{
                     model, Sampler(options, model->hparams().n_vocab, model->has_vocab() ? &model->vocab() : nullptr)};
             }),
             py::arg("model"), py::kw_only(), py::arg("temperature") = 0.8F, py::arg("top_k") = 40,
             py::arg("top_p") = 0.95F, py::arg("min_p") = 0.05F, py::arg("typical_p") = 1.0F,
             py::arg("repeat_penalty") = 1.0F, py::arg("frequency_penalty") = 0.0F, py::arg("presence_penalty") = 0.0F,
             py::arg("penalty_last_n") = 64, py::arg("mirostat_mode") = 0, py::arg("mirostat_tau") = 5.0F,
             py::arg("mirostat_eta") = 0.1F, py::arg("seed") = SamplerOptions::random_seed,
             py::arg("logit_bias") = py::none(), py::arg("grammar") = py::none(), py::arg("grammar_root") = "root")
        .def(
            "sample",
            [](PySampler& s, const py::array_t<float, py::array::c_style | py::array::forcecast>& logits) {
                return s.sampler.sample({logits.data(), static_cast<size_t>(logits.size())});
            },
            py::arg("logits"))
        .def(
            "accept", [](PySampler& s, int32_t token, bool in_grammar) { s.sampler.accept(token, in_grammar); },
            py::arg("token"), py::arg("in_grammar") = true)
        .def("reset", [](PySampler& s) { s.sampler.reset(); })
        .def_property_readonly("seed", [](const PySampler& s) { return s.sampler.seed(); });
}
