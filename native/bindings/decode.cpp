// Session.decode(): tokens of Python's in, rows of NumPy's out.
#include <chrono>
#include <exception>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "gil.h"
#include "py_session.h"

namespace py = pybind11;

namespace {

std::vector<uint8_t> output_mask(const py::object& output, size_t n) {
    std::vector<uint8_t> mask(n, 0);
    if (!py::isinstance<py::str>(output)) {
        const auto flags = output.cast<std::vector<bool>>();
        if (flags.size() != n) {
            lkv::fail("decode", "expected one output flag for each of ", n, " tokens; got ", flags.size());
        }
        std::copy(flags.begin(), flags.end(), mask.begin());
        return mask;
    }
    const auto word = output.cast<std::string>();
    if (word == "all") {
        std::fill(mask.begin(), mask.end(), uint8_t{1});
    } else if (word == "last") {
        if (n > 0) {
            mask.back() = 1;
        }
    } else if (word != "none") {
        lkv::fail("decode", "expected output 'last', 'all', 'none' or one flag per token; got ", lkv::quoted(word));
    }
    return mask;
}

// Whether this call is over, for who asks thousands of times a second: Session.interrupt(), or a signal that Python has for this
// thread.
class Stop {
public:
    explicit Stop(PySession& session) : session_(session), asked_(Clock::now()) {}

    bool operator()() noexcept {
        if (session_.interrupted) return true;
        if (!may_be_signalled_ || Clock::now() - asked_ < std::chrono::milliseconds(100)) return false;
        const Locked locked;
        try {
            or_sleep([this] { ask_python(); });
        } catch (...) {
            error_ = std::current_exception();
        }
        asked_ = Clock::now();
        return error_ != nullptr;
    }

    // Throws what Python is to be told of a call that ended before its time.
    void raise() {
        if (error_ != nullptr) std::rethrow_exception(error_);
        if (session_.interrupted.exchange(false)) {
            const Locked locked;
            PyErr_SetNone(PyExc_KeyboardInterrupt);
            throw py::error_already_set();
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    // Signals are the main thread's. Others need not wait for the lock.
    void ask_python() {
        const py::object main = py::module_::import("threading").attr("main_thread")().attr("ident");
        may_be_signalled_ = main.cast<unsigned long>() == PyThread_get_thread_ident();
        if (may_be_signalled_ && PyErr_CheckSignals() != 0) throw py::error_already_set();
    }

    PySession& session_;
    Clock::time_point asked_;
    bool may_be_signalled_ = true;
    std::exception_ptr error_;
};

}  // namespace

py::array_t<float> decode(PySession& self, const std::vector<int32_t>& tokens,
                          const std::optional<std::vector<int32_t>>& pos,
                          const std::optional<std::vector<int32_t>>& seq, const py::object& output,
                          const py::object& take, const std::vector<bool>& guessed, bool states) {
    const size_t n = tokens.size();
    std::vector<int32_t> sequences = seq.value_or(std::vector<int32_t>(n, 0));
    if (sequences.size() != n || (pos && pos->size() != n)) {
        lkv::fail("decode", "expected one position and one sequence for each of ", n, " tokens; got ",
                  pos ? pos->size() : n, " and ", sequences.size());
    }
    std::vector<int32_t> positions;
    if (pos) {
        positions = *pos;
    } else {
        std::vector<int32_t> next(lkv::max_sequences, -1);
        for (const int32_t s : sequences) {
            int32_t& at = next[static_cast<size_t>(std::clamp(s, 0, lkv::max_sequences - 1))];
            at = at < 0 ? self.session.placement().last(s) + 1 : at;
            positions.push_back(at++);
        }
    }
    const std::vector<uint8_t> mask = output_mask(output, n);
    const std::vector<uint8_t> guesses(guessed.begin(), guessed.end());
    const lkv::HParams& h = self.session.model().hparams();
    const auto width = static_cast<py::ssize_t>(states ? h.n_embd : h.n_vocab);
    const bool in_parts = !take.is_none();
    const auto n_outputs = static_cast<py::ssize_t>(std::accumulate(mask.begin(), mask.end(), size_t{0}));
    py::array_t<float> result({in_parts ? 0 : n_outputs, width});
    py::object part = py::none();  // the result of the ubatch that runs
    float* data = result.mutable_data();
    const auto room = [&](size_t n_rows) {
        if (!in_parts || n_rows == 0) {
            return std::exchange(data, data + n_rows * static_cast<size_t>(width));
        }
        const Locked locked;
        py::array_t<float> rows({static_cast<py::ssize_t>(n_rows), width});
        part = rows;
        return rows.mutable_data();
    };
    self.interrupted = false;
    Stop stop(self);
    {
        const Unlocked unlocked;
        const auto between = [&] {
            const Locked locked;
            if (!part.is_none()) {
                or_sleep([&] { take(std::exchange(part, py::none())); });
            }
            stop.raise();
            if (or_sleep(PyErr_CheckSignals) != 0) {
                throw py::error_already_set();
            }
        };
        try {
            self.session.decode(tokens, positions, sequences, mask, room, between, guesses,
                                states ? lkv::Result::states : lkv::Result::logits, std::ref(stop));
        } catch (const lkv::Error&) {
            stop.raise();
            throw;
        }
    }
    return result;
}
