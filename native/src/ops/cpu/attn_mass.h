// attn_mass on the CPU. KV heads are the work items; each leaves masses of its own.
#pragma once

#include <cstddef>

#include "ops/attn_mass.h"

namespace lkv {

struct AttnMassPlan {
    int n_threads;
    int n_rows;   // query rows that go through the slots together
    int n_slots;  // at most, regions rounded up to tiles
    int k_kept;   // most stored channels of a group
    int row_bytes;
    size_t scratch_floats;
};

// Reads shapes and layouts, no data. most_slots: of all regions together, each rounded up to tiles.
AttnMassPlan attn_mass_plan(const AttnMassParams& params, int most_slots, int n_threads);

// Thread ith of nth; those past the plan's stay idle. mass: [n_kv, params.n_slots()], of each KV head's query heads.
void attn_mass(const AttnMassParams& params, const AttnMassPlan& plan, float* scratch, float* mass, int ith, int nth);

}  // namespace lkv
