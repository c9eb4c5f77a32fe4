// The branch of a gated short convolution (LFM2), in ggml's own ops.
#pragma once

#include "graph/recurrent/branch.h"

namespace lkv {

class ShortConvBranch : public RecurrentBranch {
public:
    ShortConvBranch(const GraphSources& from, const LayerOps& ops, Graph& graph) : RecurrentBranch(from, ops, graph) {}

    ggml_tensor* build(ggml_tensor* x, int il) override;
};

}  // namespace lkv
