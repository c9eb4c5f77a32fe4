// Grammars and schemas are Python's: what a sampler asks of them.
#include <pybind11/pybind11.h>

#include "base/error.h"
#include "bindings.h"
#include "gil.h"

namespace py = pybind11;

namespace {

// Calls Python, whose exceptions become an Error with the same text.
template <typename Call>
auto asked(const Call& call) {
    const Locked locked;
    try {
        return call();
    } catch (const py::error_already_set& error) {
        throw lkv::Error(py::str(error.value()).cast<std::string>());
    }
}

// A matcher of Python's: an object with allows(token), allowed() (a bit for every token, the first ones lowest), accept(token),
// reset() and clone(). It is asked with the GIL, which draw() has released.
class PyMatcher : public lkv::TokenMatcher {
public:
    explicit PyMatcher(py::object matcher) : matcher_(std::move(matcher)) {}
    ~PyMatcher() override {
        const Locked locked;
        matcher_ = py::object();
    }
    PyMatcher(const PyMatcher&) = delete;
    PyMatcher& operator=(const PyMatcher&) = delete;

    bool allows(int32_t token) override {
        return asked([&] { return matcher_.attr("allows")(token).cast<bool>(); });
    }

    void restrict(std::vector<llama_token_data>& candidates) override {
        const std::string bits = asked([&] { return matcher_.attr("allowed")().cast<std::string>(); });
        std::erase_if(candidates, [&bits](const llama_token_data& candidate) {
            const auto id = static_cast<size_t>(candidate.id);
            return id / 8 >= bits.size() || (static_cast<unsigned char>(bits[id / 8]) >> (id % 8) & 1) == 0;
        });
    }

    void accept(int32_t token) override {
        asked([&] { return matcher_.attr("accept")(token).is_none(); });
    }

    void reset() override {
        asked([&] { return matcher_.attr("reset")().is_none(); });
    }

    std::unique_ptr<lkv::TokenMatcher> clone() const override {
        const Locked locked;
        return std::make_unique<PyMatcher>(asked([&] { return py::object(matcher_.attr("clone")()); }));
    }

private:
    py::object matcher_;
};

}  // namespace

std::unique_ptr<lkv::TokenMatcher> matcher_of(const py::kwargs& given) {
    if (!given.contains("matcher") || given["matcher"].is_none()) return nullptr;
    return std::make_unique<PyMatcher>(py::object(given["matcher"]));
}
