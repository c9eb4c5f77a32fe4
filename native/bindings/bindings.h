// What the binding files share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string_view>

#include "cache/kv_cache.h"
#include "model/model.h"
#include "runtime/plan/session_options.h"
#include "tokens/sampler.h"

void bind_blocks(pybind11::module_& module);
void bind_chat(pybind11::module_& module);
void bind_gguf(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_vocab(pybind11::class_<lkv::Model, std::shared_ptr<lkv::Model>>& model);
void bind_rows(pybind11::module_& module);
void bind_session(pybind11::module_& module);
void bind_sampler(pybind11::module_& module);

// A string of Python's; bytes that are no UTF-8, as files, messages and templates may hold, become U+FFFD.
inline pybind11::str text(std::string_view s) {
    return pybind11::reinterpret_steal<pybind11::str>(
        PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace"));
}

// Element i of a value that is no string.
pybind11::object gguf_number(const lkv::GgufValue& value, size_t i);

// guesses: of a session's own cache for them.
pybind11::dict kv_bytes_dict(const lkv::KvBytes& bytes, size_t guesses = 0);

// Errors: TypeError for a keyword that is no option, or a value of another type.
lkv::SessionOptions session_options(const char* function, const pybind11::kwargs& given);
lkv::SamplerOptions sampler_options(const pybind11::kwargs& given);            // beside the keyword matcher
std::unique_ptr<lkv::TokenMatcher> matcher_of(const pybind11::kwargs& given);  // null where none is given
