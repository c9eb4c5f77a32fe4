// The branch of a recurrent layer, which takes the place of attention. All kinds share where a batch's states come from and go to, and the
// convolution before the recurrence.
#pragma once

#include <memory>

#include "graph/attention_branch.h"

namespace lkv {

class RecurrentBranch {
public:
    // The graph already has its inputs. All arguments must outlive this.
    RecurrentBranch(const GraphSources& from, const LayerOps& ops, Graph& graph)
        : from_(from),
          h_(from.model.hparams()),
          ops_(ops),
          ctx_(ops.context()),
          graph_(graph),
          n_seqs_(from.shape.n_seqs),
          n_each_(from.shape.n_tokens / from.shape.n_seqs),
          n_states_(from.shape.n_states) {}
    virtual ~RecurrentBranch() = default;

    // x: the normed input [n_embd, n_tokens], sequence by sequence, as many tokens each. Returns the branch before the residual, and adds
    // nodes that write the states after the batch.
    virtual ggml_tensor* build(ggml_tensor* x, int il) = 0;

protected:
    // Rows of what the batch leaves, [floats of a state, as many as `to` has slots], into slots that no node of this graph reads.
    void store(ggml_tensor* states, ggml_tensor* rows, ggml_tensor* to);
    // now [channels, n_each, n_seqs] after those that a state has, convolved with kernels [d_conv, channels], f32. Stores the last inputs.
    ggml_tensor* convolved(ggml_tensor* now, ggml_tensor* kernels, int il);

    const GraphSources& from_;
    const HParams& h_;
    const LayerOps& ops_;
    ggml_context* ctx_;
    Graph& graph_;
    int64_t n_seqs_;
    int64_t n_each_;    // tokens of a sequence
    int64_t n_states_;  // after as many of its last tokens
};

// The branch of the model's kind; null if no layer is recurrent.
std::unique_ptr<RecurrentBranch> recurrent_branch(const GraphSources& from, const LayerOps& ops, Graph& graph);

// Errors: Error for sizes that ggml's GPU kernels do not take: ggml ends the process there.
void check_gpu_takes(const Recurrence& recurrence);

}  // namespace lkv
