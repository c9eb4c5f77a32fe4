// What the binding files share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "cache/kv_cache.h"
#include "model/model.h"

void bind_blocks(pybind11::module_& module);
void bind_chat(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_session(pybind11::module_& module);
void bind_sampler(pybind11::module_& module);

pybind11::dict kv_bytes_dict(const lkv::KvBytes& bytes);
