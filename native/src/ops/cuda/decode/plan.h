// What the plans of decode kernels have in common.
#pragma once

#include "ops/cuda/args.h"

namespace lkv::cuda {

// The decode kernel's blocks of 64 channels come in ones, twos and fours: what a group has less is no chunk of its kind.
int decode_kind(const AttnArgs& a);

// Parts of the sequence. resident: thread blocks that the device runs at once
int decode_parts(const AttnArgs& a, int capacity, int resident);

}  // namespace lkv::cuda
