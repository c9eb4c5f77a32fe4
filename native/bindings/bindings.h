// What the binding files share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "cache/kv_cache.h"
#include "model/model.h"
#include "runtime/plan/session_options.h"
#include "tokens/sampler.h"

void bind_blocks(pybind11::module_& module);
void bind_chat(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_session(pybind11::module_& module);
void bind_sampler(pybind11::module_& module);

pybind11::dict kv_bytes_dict(const lkv::KvBytes& bytes);

// Errors: TypeError for a keyword that is no option, or a value of another type.
lkv::SessionOptions session_options(const char* function, const pybind11::kwargs& given);
lkv::SamplerOptions sampler_options(const pybind11::kwargs& given);  // beside the keyword matcher
