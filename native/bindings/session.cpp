#include "runtime/session.h"

#include "base/error.h"
#include "bindings.h"
#include "gil.h"
#include "py_session.h"
#include "runtime/mtp/guesser.h"

namespace py = pybind11;
using lkv::Positions;
using lkv::Session;

namespace {

struct FreeOwn {
    void operator()(PySession* session) const {
        if (!session->left && !session->is_inherited_from_gpu()) delete session;
    }
};

lkv::Accept parse_accept(const std::string& word) {
    if (word == "same") return lkv::Accept::same;
    if (word == "finer") return lkv::Accept::finer;
    if (word == "any") return lkv::Accept::any;
    lkv::fail("accept", "expected same, finer or any; got ", lkv::quoted(word));
}

}  // namespace

void bind_session(py::module_& module) {
    py::class_<PySession, std::unique_ptr<PySession, FreeOwn>>(module, "Session")
        .def(py::init([](const std::shared_ptr<lkv::Model>& model, const py::kwargs& options) {
                 return std::unique_ptr<PySession, FreeOwn>(
                     new PySession{Session(model, session_options("Session", options))});
             }),
             py::arg("model"))
        .def_property_readonly("n_ctx", [](const PySession& s) { return s.session.options().n_ctx; })
        .def_property_readonly("n_ubatch", [](const PySession& s) { return s.session.options().ubatches.longest; })
        .def_property_readonly("n_seq_max", [](const PySession& s) { return s.session.options().n_seq_max; })
        .def_property_readonly(
            "window",
            [](const PySession& s) {
                return s.session.placement().ring() == nullptr ? 0 : s.session.placement().ring()->window();
            })
        .def(
            "n_recent", [](const PySession& s, int length) { return s.session.options().window(length); },
            py::arg("length"))
        .def_property_readonly("can_rotate", [](const PySession& s) { return s.session.can_rotate(); })
        .def_property_readonly(
            "prefill",
            [](const PySession& s) { return lkv::schema::prefill_words[static_cast<size_t>(s.session.prefill())]; })
        .def_property_readonly("evict", [](const PySession& s) { return s.session.placement().policy_name(); })
        .def_property_readonly("rewinds",
                               [](const PySession& s) {
                                   return s.session.prefill() == lkv::Prefill::eager &&
                                          s.session.placement().eviction() == nullptr;
                               })
        .def_property_readonly("implementations",
                               [](const PySession& s) {
                                   py::dict out;
                                   out["latent_attn"] = s.session.implementation();
                                   return out;
                               })
        .def("decode", &decode, py::arg("tokens"), py::kw_only(), py::arg("pos") = py::none(),
             py::arg("seq") = py::none(), py::arg("output") = "last", py::arg("take") = py::none(),
             py::arg("guessed") = std::vector<bool>{}, py::arg("states") = false)
        .def("interrupt", [](PySession& s) { s.interrupted = true; })
        // In a child of fork(): the parent's other thread was in the middle of a call, so that not even freeing it is safe.
        .def("leave", [](PySession& s) { s.left = true; })
        .def("clear", [](PySession& s) { s.session.clear(); })
        .def(
            "seq_rm",
            [](PySession& s, int seq, int32_t p0, int32_t p1) {
                return s.session.remove(seq, Positions::between(p0, p1));
            },
            py::arg("seq"), py::arg("p0") = -1, py::arg("p1") = -1)
        .def(
            "seq_cp",
            [](PySession& s, int src, int dst, int32_t p0, int32_t p1) {
                s.session.copy(src, dst, Positions::between(p0, p1));
            },
            py::arg("src"), py::arg("dst"), py::arg("p0") = -1, py::arg("p1") = -1)
        .def(
            "seq_keep", [](PySession& s, int seq) { s.session.keep(seq); }, py::arg("seq"))
        .def(
            "seq_add",
            [](PySession& s, int seq, int32_t p0, int32_t p1, int32_t delta) {
                s.session.shift(seq, Positions::between(p0, p1), delta);
            },
            py::arg("seq"), py::arg("p0"), py::arg("p1"), py::arg("delta"))
        .def(
            "seq_resumable",
            [](const PySession& s, int seq, int32_t limit) { return s.session.cache().resumable(seq, limit); },
            py::arg("seq"), py::arg("limit"))
        .def_property_readonly("is_recurrent", [](const PySession& s) { return s.session.cache().states().is_used(); })
        .def(
            "seq_pos_min", [](const PySession& s, int seq) { return s.session.placement().first(seq); }, py::arg("seq"))
        .def(
            "seq_pos_max", [](const PySession& s, int seq) { return s.session.placement().last(seq); }, py::arg("seq"))
        .def(
            "require_room", [](const PySession& s, size_t n) { s.session.placement().check_room(n); }, py::arg("n"))
        .def("n_cells_used", [](const PySession& s) { return s.session.placement().n_used(); })
        .def("n_cells_visited", [](const PySession& s) { return s.session.placement().n_visited(); })
        .def("kv_bytes",
             [](const PySession& s) {
                 const lkv::Guesser* const guesser = s.session.guesser();
                 return kv_bytes_dict(s.session.cache().bytes(), guesser == nullptr ? 0 : guesser->cache_bytes());
             })
        .def_property_readonly(
            "guess_cost",
            [](const PySession& s) { return s.session.guesser() == nullptr ? 0.0 : s.session.guesser()->cost(); })
        .def(
            "guess",
            [](PySession& s, int seq, int32_t token, int most, float sure) {
                const Unlocked unlocked;
                return s.session.guess(seq, token, most, sure);
            },
            py::arg("seq"), py::arg("token"), py::arg("most"), py::arg("sure") = 0.0F)
        .def("rows_read", [](const PySession& s) { return s.session.rows_read(); })
        .def("compute_bytes", [](const PySession& s) { return s.session.compute_bytes(); })
        .def("prefill_bytes", [](const PySession& s) { return s.session.prefill_bytes(); })
        .def("state_bytes",
             [](const PySession& s) {
                 const std::vector<uint8_t> bytes = s.session.state();
                 return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
             })
        .def(
            "seq_state_bytes",
            [](const PySession& s, int seq) {
                std::vector<uint8_t> bytes;
                {
                    const Unlocked unlocked;
                    bytes = s.session.seq_state(seq);
                }
                return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
            },
            py::arg("seq"))
        .def(
            "seq_state_parts",
            [](const PySession& s, int seq, const std::vector<int32_t>& cuts) {
                std::vector<std::vector<uint8_t>> parts;
                {
                    const Unlocked unlocked;
                    parts = s.session.seq_state_parts(seq, cuts);
                }
                std::vector<py::bytes> out;
                for (const auto& part : parts) {
                    out.emplace_back(reinterpret_cast<const char*>(part.data()), part.size());
                }
                return out;
            },
            py::arg("seq"), py::arg("cuts"))
        .def(
            "seq_settled", [](const PySession& s, int seq) { return s.session.placement().settled(seq); },
            py::arg("seq"))
        .def(
            "set_seq_state",
            [](PySession& s, int seq, const py::object& data, const std::string& accept) {
                std::vector<py::bytes> held;
                if (py::isinstance<py::bytes>(data)) {
                    held.push_back(data);
                } else {
                    held = data.cast<std::vector<py::bytes>>();
                }
                std::vector<std::span<const uint8_t>> parts;
                for (const py::bytes& part : held) {
                    const std::string_view view(part);
                    parts.emplace_back(reinterpret_cast<const uint8_t*>(view.data()), view.size());
                }
                const lkv::Accept which = parse_accept(accept);
                const Unlocked unlocked;
                return s.session.set_seq_state(seq, parts, which);
            },
            py::arg("seq"), py::arg("data"), py::arg("accept") = "same")
        .def(
            "set_state",
            [](PySession& s, const py::bytes& data, const std::string& accept) {
                const std::string_view view(data);
                return s.session.set_state({reinterpret_cast<const uint8_t*>(view.data()), view.size()},
                                           parse_accept(accept));
            },
            py::arg("data"), py::arg("accept") = "same");
}
