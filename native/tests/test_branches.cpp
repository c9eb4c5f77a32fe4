// Which nodes of a layer's graph may run at the same time. The graphs are made by hand in the order of graph/graph.cpp.
#include "runtime/branches.h"

#include <cstdint>
#include <string>

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-cpp.h"
#include "graph/ggml_entry.h"

using lkv::AttentionNode;
using lkv::Branches;

namespace {

constexpr int n_embd = 64;
constexpr int head_dim = 32;
constexpr int n_head = 2;

struct Choices {
    bool held = true;         // what the branches leave keeps its memory
    bool view_first = false;  // a view of K's weight is visited before the input, as a latent's factor is
    bool q_from_k = false;    // the queries need K
    bool between = false;     // a node that leads to none of the three
    bool before = false;      // the layer before ends with two products
    bool one_row = false;     // keys are in V's rows
};

// One layer: norm, K = scaled product, V = product, Q = two products; store, attention.
struct Layer {
    ggml_context_ptr context{ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true})};
    ggml_cgraph* graph = ggml_new_graph(context.get());
    ggml_gallocr_ptr allocator{ggml_gallocr_new(ggml_backend_cpu_buffer_type())};
    AttentionNode node;
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
        node.on_gpu = true;
        node.latents.emplace();
        node.latents->head_dim = head_dim;
        node.latents->n_head = n_head;
        ggml_tensor* const in = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, 1);
        ggml_set_input(in);
        ggml_tensor* from = in;
        if (choices.before) from = keep(ggml_mul_mat(ctx, weight(), keep(ggml_mul_mat(ctx, weight(), in))));
        ggml_tensor* const x = keep(ggml_rms_norm(ctx, from, 1e-5F));
        ggml_tensor* wk = weight();
        if (choices.view_first) wk = ggml_view_2d(ctx, wk, n_embd, n_embd, wk->nb[1], 0);
        k = keep(ggml_scale(ctx, keep(ggml_mul_mat(ctx, wk, x)), 2.0F));
        ggml_tensor* const v = keep(ggml_mul_mat(ctx, weight(), x));
        q = keep(ggml_mul_mat(ctx, weight(), keep(ggml_mul_mat(ctx, weight(), choices.q_from_k ? k : x))));
        ggml_tensor* const stored =
            lkv::store_rows(ctx, node, std::nullopt, lkv::BatchRows{choices.one_row ? v : k, v});
        ggml_build_forward_expand(graph, stored);
        if (choices.between) ggml_build_forward_expand(graph, ggml_scale(ctx, x, 3.0F));
        ggml_tensor* const out = lkv::latent_attn(
            ctx, node, {.full = nullptr, .latents = ggml_reshape_3d(ctx, q, head_dim, n_head, 1)}, stored, 1);
        ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weight(), ggml_reshape_2d(ctx, out, n_embd, 1)));
        CHECK(ggml_gallocr_alloc_graph(allocator.get(), graph));
    }

    std::string ops(int first, int end) const {
        std::string names;
        for (int i = first; i < end; i++) {
            const ggml_op op = ggml_graph_node(graph, i)->op;
            if (op != GGML_OP_VIEW && op != GGML_OP_RESHAPE) names += std::string(" ") + ggml_op_name(op);
        }
        return names;
    }
};

// The branches of a graph with one layer; none if it has another number of layers.
Branches only(const Layer& layer) {
    const std::vector<Branches> branches = lkv::find_branches(layer.graph);
    CHECK(branches.size() == 1);
    return branches.size() == 1 ? branches.front() : Branches{};
}

void found() {
    for (const bool view_first : {false, true}) {
        const Layer layer({.view_first = view_first});
        const Branches b = only(layer);
        CHECK(layer.ops(0, b.ahead).empty());
        CHECK(layer.ops(b.ahead, b.k) == " RMS_NORM");
        CHECK(layer.ops(b.k, b.v) == " MUL_MAT SCALE");
        CHECK(layer.ops(b.v, b.store) == " MUL_MAT");
        CHECK(layer.ops(b.store + 1, b.attention) == " MUL_MAT MUL_MAT");
        CHECK(ggml_graph_node(layer.graph, b.store)->src[0] == layer.k);
        CHECK(ggml_graph_node(layer.graph, b.attention)->src[1] == ggml_graph_node(layer.graph, b.store));
    }
}

// K is then no branch of its own: it comes before all three.
void queries_from_k() {
    const Layer layer({.q_from_k = true});
    const Branches b = only(layer);
    CHECK(layer.ops(0, b.k) == " RMS_NORM MUL_MAT SCALE");
    CHECK(b.k == b.v);
    CHECK(layer.ops(0, b.ahead).empty());
}

void layer_before() {
    const Layer layer({.before = true});
    const Branches b = only(layer);
    CHECK(layer.ops(0, b.ahead) == " MUL_MAT");
    CHECK(layer.ops(b.ahead, b.k) == " MUL_MAT RMS_NORM");
}

void one_row() {
    const Layer layer({.one_row = true});
    const Branches b = only(layer);
    CHECK(layer.ops(b.ahead, b.k) == " RMS_NORM");
    CHECK(b.k == b.v);
    CHECK(layer.ops(b.v, b.store) == " MUL_MAT");
    CHECK(layer.ops(b.store + 1, b.attention) == " MUL_MAT MUL_MAT");
}

void refused() {
    CHECK(lkv::find_branches(Layer({.between = true}).graph).empty());
    // memory that is free behind K is taken for V and for the queries
    CHECK(lkv::find_branches(Layer({.held = false}).graph).empty());
    const Layer layer({});
    layer.q->data = static_cast<char*>(layer.k->data) + ggml_nbytes(layer.k) - sizeof(float);
    CHECK(lkv::find_branches(layer.graph).empty());
}

}  // namespace

int main() {
    found();
    queries_from_k();
    layer_before();
    one_row();
    refused();
    return lkv::test::report("branches");
}
