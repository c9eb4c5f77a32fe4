// From the contract's params to what the kernels run: tables of chunks, and how the work is cut.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cuda/args.h"
#include "ops/cuda/instances.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/rows/tables.h"
#include "ops/latent_attn.h"

namespace lkv::cuda {

// Fills the shape and the plan of `args` from params' shapes and layouts; no pointer is read or set.
// capacity: slots of all regions.
// Throws std::invalid_argument, "[cuda] expected …; got …", for shapes the kernels do not take.
void plan_attention(const LatentAttnParams& params, int capacity, const Device& device, AttnArgs& args);

Instance choose_instance(const AttnArgs& args);

// Attention on the full rows that a chunk was expanded to, as AttnArgs::expand plans it.
AttnArgs on_expanded_rows(const AttnArgs& args);

// Sums of all parts, then what merging needs: where combine_wide does it [v_blocks, n_tokens, n_head, head_dim], else one
// part's sums; then ExpandedRows.
size_t parts_floats(const AttnArgs& args);  // without ExpandedRows
size_t partial_floats(const AttnArgs& args);
size_t partial_ml_floats(const AttnArgs& args);

}  // namespace lkv::cuda
