// Whether K, V and the queries of a layer may be computed at the same time. The graphs are drawn by hand, in the order of graph/.
#include "runtime/branches.h"

#include <span>

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-cpp.h"
#include "graph/ggml_entry.h"

using lkv::AttentionNode;
using lkv::LayerRoles;

namespace {

constexpr int n_embd = 64;
constexpr int head_dim = 32;
constexpr int n_head = 2;

struct Choices {
    bool held = true;       // what the branches leave keeps its memory
    bool q_from_k = false;  // the queries need K
    bool between = false;   // a node that leads to none of the three
    bool one_row = false;   // keys are in V's rows
};

// One layer: norm, K = scaled product, V = product, Q = two products; store, attention.
struct Layer {
    ggml_context_ptr context{ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true})};
    ggml_cgraph* graph = ggml_new_graph(context.get());
    ggml_gallocr_ptr allocator{ggml_gallocr_new(ggml_backend_cpu_buffer_type())};
    AttentionNode node;
    LayerRoles roles;
    ggml_tensor* k = nullptr;
    ggml_tensor* q = nullptr;

    explicit Layer(const Choices& choices) {
        ggml_context* const ctx = context.get();
        const auto weight = [&] {
            ggml_tensor* const w = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_embd);
            ggml_set_input(w);
            ggml_set_output(w);  // as a model's: never taken for anything else
            return w;
        };
        const auto keep = [&](ggml_tensor* x) {
            if (choices.held) ggml_set_output(x);
            return x;
        };
        const auto drawn = [&](ggml_tensor* x) {
            ggml_build_forward_expand(graph, x);
            return ggml_graph_n_nodes(graph);
        };
        node.on_gpu = true;
        node.latents.emplace();
        node.latents->head_dim = head_dim;
        node.latents->n_head = n_head;
        ggml_tensor* const in = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, 1);
        ggml_set_input(in);
        ggml_tensor* const x = keep(ggml_rms_norm(ctx, in, 1e-5F));
        k = keep(ggml_scale(ctx, keep(ggml_mul_mat(ctx, weight(), x)), 2.0F));
        ggml_tensor* const v = keep(ggml_mul_mat(ctx, weight(), x));
        q = keep(ggml_mul_mat(ctx, weight(), keep(ggml_mul_mat(ctx, weight(), choices.q_from_k ? k : x))));
        ggml_tensor* const stored =
            lkv::store_rows(ctx, node, std::nullopt, lkv::BatchRows{choices.one_row ? v : k, v});
        ggml_tensor* const heads = ggml_reshape_3d(ctx, q, head_dim, n_head, 1);
        roles.k = drawn(x);
        roles.v = choices.one_row ? roles.k : drawn(k);
        roles.store = drawn(v);
        drawn(stored);
        if (choices.between) drawn(ggml_scale(ctx, x, 3.0F));
        roles.latent_q = roles.rope = roles.attention = drawn(heads);
        ggml_tensor* const out = lkv::latent_attn(ctx, node, {.full = nullptr, .latents = heads}, stored, 1);
        drawn(ggml_mul_mat(ctx, weight(), ggml_reshape_2d(ctx, out, n_embd, 1)));
        CHECK(ggml_gallocr_alloc_graph(allocator.get(), graph));
        CHECK(ggml_graph_node(graph, roles.store) == stored);
        CHECK(ggml_graph_node(graph, roles.attention) == out);
    }

    bool concurrent() const { return lkv::concurrent_layers(graph, std::span(&roles, 1)).size() == 1; }
};

void taken() {
    CHECK(Layer({}).concurrent());
    CHECK(Layer({.one_row = true}).concurrent());
    CHECK(Layer({.between = true}).concurrent());
}

void refused() {
    CHECK(!Layer({.q_from_k = true}).concurrent());
    // memory that is free behind K is taken for V and for the queries
    CHECK(!Layer({.held = false}).concurrent());
    const Layer layer({});
    layer.q->data = static_cast<char*>(layer.k->data) + ggml_nbytes(layer.k) - sizeof(float);
    CHECK(!layer.concurrent());
}

}  // namespace

int main() {
    taken();
    refused();
    return lkv::test::report("branches");
}
