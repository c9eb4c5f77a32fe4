// Which of a graph's ordinary nodes our kernels take: products with the latents' factors in a decode step, and RoPE of a single
// token with the Hadamard rotation after it. Everything else is ggml-cuda's.
#pragma once

#include <map>
#include <optional>
#include <set>

#include "ggml.h"
#include "graph/step/roles.h"
#include "ops/cuda/step/heads_product.h"
#include "ops/cuda/step/product.h"
#include "ops/cuda/step/turn.h"
#include "runtime/cuda/layer_tables.h"

namespace lkv::cuda {

// Whose memory a tensor names.
inline const ggml_tensor* owner_of(const ggml_tensor* tensor) {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}
// Whether a node multiplies heads with a Hadamard matrix (LayerOps::rotate).
bool is_rotation(const ggml_tensor* node);

class OwnProducts {
public:
    OwnProducts(const LayerTables& layers, const StepInputs& inputs, const Device& device)
        : layers_(layers), inputs_(inputs), device_(device) {}

    // A graph was built. small: its RoPE may be left to the products after it.
    void prepare(const Graph& graph, bool small);

    // The latents' factors times a few tokens.
    std::optional<ProductArgs> product_of(const ggml_tensor* node) const;
    // The same of several tokens' heads, which are not put beside one another first.
    std::optional<HeadsProductArgs> heads_product_of(const ggml_tensor* node) const;
    // What put them there, or puts the results back.
    bool swaps(const ggml_tensor* node) const { return swaps_.contains(node); }
    // RoPE of one token by a kernel that lets what follows be set up: ggml-cuda's of neighbouring dimensions does not, and attention's
    // thread blocks would come when it ends. Or the Hadamard rotation of what RoPE made: both in one launch.
    std::optional<TurnArgs> turning(const ggml_tensor* node) const;
    // RoPE that the products or rotations which read it do themselves.
    bool turned_by_products(const ggml_tensor* node) const { return turned_.contains(node); }
    // That, and nothing else reads it.
    bool turned(const ggml_tensor* node) const { return turned_.contains(node) && !read_otherwise_.contains(node); }

private:
    // How the heads of one token are turned by the model's RoPE, if `rope` does that.
    std::optional<RopeTurn> turn_of(const ggml_tensor* rope) const;
    // RoPE of the one token whose heads this product or rotation takes, or null.
    const ggml_tensor* rope_of(const ggml_tensor* product) const;
    void find_turned(ggml_cgraph* graph);
    void find_heads(const FactorProduct& of);

    const LayerTables& layers_;
    const StepInputs& inputs_;
    const Device& device_;
    const ggml_tensor* positions_ = nullptr;  // of the graph's tokens
    std::set<const ggml_tensor*> turned_;
    std::set<const ggml_tensor*> read_otherwise_;
    std::set<const ggml_tensor*> products_;
    std::map<const ggml_tensor*, FactorProduct> heads_;  // by product: of several tokens' heads
    std::set<const ggml_tensor*> swaps_;
};

}  // namespace lkv::cuda
