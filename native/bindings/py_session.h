// A session as Python drives it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <atomic>

#include "base/forks.h"
#include "runtime/session.h"

struct PySession {
    lkv::Session session;
    std::atomic<bool> interrupted = false;
    bool left = false;  // see leave()
    int forks = lkv::forks();

    // Only the process that opened a session on a GPU can free what it has there.
    bool is_inherited_from_gpu() const { return forks != lkv::forks() && session.model().on_gpu(); }
};

// Runs tokens, without the GIL, with default positions; Ctrl-C ends it. Returns rows [n_outputs, n_vocab or n_embd], or hands
// each ubatch's to `take`.
pybind11::array_t<float> decode(PySession& self, const std::vector<int32_t>& tokens,
                                const std::optional<std::vector<int32_t>>& pos,
                                const std::optional<std::vector<int32_t>>& seq, const pybind11::object& output,
                                const pybind11::object& take, const std::vector<bool>& guessed, bool states);
