// What mixes tokens in a model's recurrent layers, which are all of one kind.
#pragma once

#include <variant>

#include "decoder/delta_net.h"
#include "decoder/mamba2.h"
#include "decoder/short_conv.h"

namespace lkv {

// A kind has sizes, of which conv_floats() and matrix_floats() are what a layer keeps of a sequence; weights (model/weights.h); and a
// branch of the graph (graph/recurrent/branch.cpp).
using Recurrence = std::variant<DeltaNetSizes, Mamba2Sizes, ShortConvSizes>;

}  // namespace lkv
