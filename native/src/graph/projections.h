// A layer's queries, keys and values, and the rows that the cache stores of them.
#pragma once

#include "graph/constants.h"
#include "graph/encode.h"
#include "graph/ggml_entry.h"
#include "graph/layer_ops.h"
#include "model/model.h"

namespace lkv {

// [head_dim, heads, n_tokens]: the queries and, if available, K and V. K is full: after bias, norm and RoPE, or before all
// three if that is what rows hold. With MLA: queries of rows, and V's rows.
struct Heads {
    ggml_tensor* q = nullptr;
    ggml_tensor* k = nullptr;
    ggml_tensor* v = nullptr;
    // The output's gate before its sigmoid or softplus: for each number, not contiguous, or for heads [n_head, n_tokens]; null: none.
    ggml_tensor* gate = nullptr;
    ggml_tensor* shared = nullptr;  // a product that K and V, or the queries too, are parts of; null: none
};

class Projections {
public:
    // roles: of the graph, where products and rotations are noted. positions: i32 [n_tokens], null if no layer has RoPE; temperatures: f32 [n_tokens], null if queries have none. All arguments
    // must outlive this.
    Projections(const LayerOps& ops, const Model& model, const Ropes& ropes, const GraphConstants& constants,
                Roles& roles, ggml_tensor* positions, ggml_tensor* temperatures)
        : ops_(ops),
          ctx_(ops.context()),
          model_(model),
          h_(model.hparams()),
          ropes_(ropes),
          constants_(constants),
          roles_(roles),
          positions_(positions),
          temperatures_(temperatures) {}

    // x: the normed input [n_embd, n_tokens].
    Heads heads(ggml_tensor* x, int il) const;

    // With MLA: what heads read of the cached latent, as their values. [rank, n_head, n_tokens] -> [n_value, n_head, n_tokens]
    ggml_tensor* mla_values(ggml_tensor* x, const LayerWeights& layer) const;

    // q' = E_q[j(h)] q: [head_dim, n_head, n_tokens] -> [rank_k max, n_head, n_tokens]
    ggml_tensor* project(ggml_tensor* q, const LayerWeights& layer) const;

    // The rows of an exact window.
    BatchRows full_rows(const Heads& heads, const LayerCacheSpec& spec) const;
    // The rows of the middle: latents, or full K or V if its path is `full`.
    BatchRows latent_rows(ggml_tensor* x, const Heads& heads, const LayerWeights& layer,
                          const LayerCacheSpec& spec) const;
    // The rows that a lazily prefilled prompt attends to: full K and V if available, else latents of full rank.
    BatchRows exact_rows(const BatchRows& latents, const Heads& heads, int il) const;

private:
    Held held() const {
        return [this](ggml_tensor* x) { return ops_.held(x); };
    }
    // V's rows times the Hadamard matrix.
    ggml_tensor* rotated_values(ggml_tensor* v, const LayerCacheSpec& spec) const;
    Heads packed(ggml_tensor* x, const LayerWeights& layer, const HeadShape& shape) const;
    Heads mla_heads(ggml_tensor* x, const LayerWeights& layer, const LayerCacheSpec& spec, int il) const;
    // Queries [.., n_head, n_tokens] times what their positions make of them.
    ggml_tensor* tempered(ggml_tensor* q) const;
    void cut_gate(ggml_tensor* both, const HeadShape& shape, Heads& heads) const;
    Heads apart(ggml_tensor* x, const LayerWeights& layer, const LayerCacheSpec& spec, const HeadShape& shape) const;
    // x [head_dim, heads, n_tokens], bias [head_dim·heads] or null
    ggml_tensor* with_bias(ggml_tensor* x, ggml_tensor* bias) const;
    // x [head_dim, heads, n_tokens], normalized over all heads of a token together.
    ggml_tensor* normed_whole(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const;
    // x [head_dim, heads, n_tokens], normalized before RoPE; where the norm is after it, without its weight.
    ggml_tensor* head_norm(ggml_tensor* x, ggml_tensor* weight) const;
    // Keys as queries meet them: normalized, after RoPE.
    ggml_tensor* finished(ggml_tensor* k, int il) const;
    // x [head_dim, heads, n_tokens]
    ggml_tensor* rope(ggml_tensor* x, int il) const;
    // z_g = E[g] x_g: [head_dim, n_kv, n_tokens] -> [Σ rank, n_tokens]
    ggml_tensor* encode(ggml_tensor* x, ggml_tensor* e, const TensorSpec& spec) const;

    const LayerOps& ops_;
    ggml_context* ctx_;
    const Model& model_;
    const HParams& h_;
    const Ropes& ropes_;
    const GraphConstants& constants_;
    Roles& roles_;
    ggml_tensor* positions_;
    ggml_tensor* temperatures_;
};

}  // namespace lkv
