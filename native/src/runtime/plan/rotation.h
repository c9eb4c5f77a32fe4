// Which sides of a cache hold quantized `full` rows that a Hadamard rotation helps.
#pragma once

#include "cache/kv_cache.h"
#include "model/model.h"

namespace lkv {

// Whether `full` rows of this side are stored rotated: they are quantized, and no scale belongs to a channel alone. There a
// rotation would hand every channel the spread of the widest ones.
bool rotates_full(const Model& model, const KvCache& cache, bool value_side);

}  // namespace lkv
