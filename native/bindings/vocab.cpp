// A model's vocabulary: text to tokens and back.
#include "tokens/vocab.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "gil.h"

namespace py = pybind11;
using lkv::Model;

void bind_vocab(py::class_<Model, std::shared_ptr<Model>>& bound) {
    bound
        .def(
            "tokenize",
            [](const Model& m, const py::bytes& s, bool add_special, bool parse_special) {
                const std::string_view text(s);
                const Unlocked unlocked;  // seconds, for megabytes
                return m.vocab().tokenize(text, add_special, parse_special);
            },
            py::arg("text"), py::arg("add_special") = true, py::arg("parse_special") = false)
        .def(
            "detokenize",
            [](const Model& m, const std::vector<int32_t>& tokens, bool special) {
                std::string text;
                {
                    const Unlocked unlocked;
                    text = m.vocab().detokenize(tokens, special);
                }
                return py::bytes(text);
            },
            py::arg("tokens"), py::arg("special") = false)
        .def(
            "token_to_piece",
            [](const Model& m, int32_t token, bool special) {
                return py::bytes(m.vocab().token_to_piece(token, special));
            },
            py::arg("token"), py::arg("special") = false)
        .def("token_bos", [](const Model& m) { return m.vocab().bos(); })
        .def("token_eos", [](const Model& m) { return m.vocab().eos(); })
        .def("token_nl", [](const Model& m) { return m.vocab().nl(); })
        .def("token_prefix", [](const Model& m) { return m.vocab().fim_prefix(); })
        .def("token_suffix", [](const Model& m) { return m.vocab().fim_suffix(); })
        .def("token_middle", [](const Model& m) { return m.vocab().fim_middle(); })
        .def("token_repo", [](const Model& m) { return m.vocab().fim_repo(); })
        .def("token_file", [](const Model& m) { return m.vocab().fim_file(); })
        .def(
            "is_eog", [](const Model& m, int32_t token) { return m.vocab().is_eog(token); }, py::arg("token"))
        .def("add_bos", [](const Model& m) { return m.vocab().add_bos(); })
        .def(
            "find_token", [](const Model& m, const std::string& s) { return m.vocab().find_token(s); },
            py::arg("text"));
}
