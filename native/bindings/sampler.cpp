#include "tokens/sampler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <span>

#include "base/error.h"
#include "bindings.h"
#include "gil.h"

namespace py = pybind11;
using lkv::Sampler;

namespace {

// Keeps the model, and with it the vocabulary, alive as long as the sampler.
struct PySampler {
    std::shared_ptr<lkv::Model> model;
    Sampler sampler;
};

// What a sampler has drawn and accepted.
struct Drawn {
    int32_t token = -1;
    std::string piece;
    bool is_end = false;
    std::string error;  // why nothing was drawn; else empty
};

Drawn draw(PySampler& s, std::span<const float> logits) {
    Drawn out;
    try {
        out.token = s.sampler.sample(logits);
        s.sampler.accept(out.token);
        out.piece = s.model->vocab().token_to_piece(out.token);
        out.is_end = s.model->vocab().is_eog(out.token);
    } catch (const lkv::Error& error) {
        out.error = error.what();
    }
    return out;
}

py::list next_tokens(const std::vector<PySampler*>& samplers,
                     const py::array_t<float, py::array::c_style | py::array::forcecast>& logits,
                     const std::vector<py::ssize_t>& rows) {
    if (logits.ndim() != 2 || rows.size() != samplers.size()) {
        lkv::fail("sampler", "expected logits [n, n_vocab] and a row for each of ", samplers.size(), " samplers; got ",
                  logits.ndim(), " dimensions and ", rows.size(), " rows");
    }
    for (const py::ssize_t row : rows) {
        if (row < 0 || row >= logits.shape(0)) {
            lkv::fail("sampler", "expected rows below ", logits.shape(0), "; got ", row);
        }
    }
    const auto n_vocab = static_cast<size_t>(logits.shape(1));
    const float* const data = logits.data();
    std::vector<Drawn> drawn;
    {
        const Unlocked unlocked;
        for (size_t i = 0; i < rows.size(); i++) {
            drawn.push_back(draw(*samplers[i], {data + static_cast<size_t>(rows[i]) * n_vocab, n_vocab}));
        }
    }
    py::list out;
    for (const Drawn& each : drawn) {
        if (each.error.empty()) {
            out.append(py::make_tuple(each.token, py::bytes(each.piece), each.is_end));
        } else {
            out.append(each.error);
        }
    }
    return out;
}

}  // namespace

void bind_sampler(py::module_& module) {
    py::class_<PySampler>(module, "Sampler")
        .def(py::init([](const std::shared_ptr<lkv::Model>& model, const py::kwargs& given) {
                 const lkv::Vocab* const vocab = model->has_vocab() ? &model->vocab() : nullptr;
                 const int32_t known = model->hparams().n_vocab;  // 0: opened for its vocabulary alone
                 const int32_t n_vocab = known == 0 && vocab != nullptr ? vocab->n_tokens() : known;
                 return new PySampler{model, Sampler(sampler_options(given), n_vocab, vocab, matcher_of(given))};
             }),
             py::arg("model"))
        .def(
            "sample",
            [](PySampler& s, const py::array_t<float, py::array::c_style | py::array::forcecast>& logits) {
                return s.sampler.sample({logits.data(), static_cast<size_t>(logits.size())});
            },
            py::arg("logits"))
        .def(
            "accept", [](PySampler& s, int32_t token, bool in_grammar) { s.sampler.accept(token, in_grammar); },
            py::arg("token"), py::arg("in_grammar") = true)
        .def(
            "candidates",
            [](const PySampler& s, size_t n) {
                py::list out;
                for (const Sampler::Candidate& each : s.sampler.candidates(n)) {
                    out.append(py::make_tuple(each.token, each.probability));
                }
                return out;
            },
            py::arg("n"))
        .def("reset", [](PySampler& s) { s.sampler.reset(); })
        .def("clone", [](const PySampler& s) { return new PySampler{s.model, s.sampler.clone()}; })
        .def_property_readonly("seed", [](const PySampler& s) { return s.sampler.seed(); });
    module.def("next_tokens", &next_tokens, py::arg("samplers"), py::arg("logits"), py::arg("rows"));
}
