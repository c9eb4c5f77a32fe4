#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"
#include "ggml-alloc.h"
#include "ggml-impl.h"
#include "runtime/branches.h"
#include "runtime/gpu.h"
#include "runtime/plan/rotation.h"

namespace lkv::test {

namespace {

// Every product with a factor of latents is noted, and where its input was put in another order, what was.
void check_products(const lkv::Model& model, const lkv::Graph& graph) {
    const auto owner_of = [](const ggml_tensor* t) { return t->view_src != nullptr ? t->view_src : t; };
    std::set<const ggml_tensor*> factors;
    for (const lkv::LayerWeights& layer : model.layers()) {
        factors.insert({layer.attn_k_e, layer.attn_q_e, layer.attn_v_e});
    }
    factors.erase(nullptr);
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
        const ggml_tensor* const node = ggml_graph_node(graph.nodes, i);
        if (node->op != GGML_OP_MUL_MAT) continue;
        if (!factors.contains(owner_of(node->src[0]))) continue;
        const auto found = std::find_if(graph.roles.products.begin(), graph.roles.products.end(),
                                        [node](const lkv::FactorProduct& of) { return of.product == node; });
        CHECK(found != graph.roles.products.end());
        if (found != graph.roles.products.end() && node->src[1]->op == GGML_OP_CONT) CHECK(found->x != nullptr);
    }
}

// Hadamard rotations that nothing but a store reads, as V's rows, are noted, and no others.
void check_rotations(const lkv::Graph& graph) {
    std::map<const ggml_tensor*, int> readers;
    std::set<const ggml_tensor*> stored;
    const auto layer_of = [&](int i, int lkv::LayerRoles::* role) {
        return std::any_of(graph.roles.layers.begin(), graph.roles.layers.end(),
                           [&](const lkv::LayerRoles& layer) { return layer.*role == i; });
    };
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
        const ggml_tensor* const node = ggml_graph_node(graph.nodes, i);
        if (lkv::is_view(node) || layer_of(i, &lkv::LayerRoles::attention)) continue;
        for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
            const ggml_tensor* const of = node->src[s]->view_src != nullptr ? node->src[s]->view_src : node->src[s];
            readers[of]++;
            const bool is_rotation =
                of->op == GGML_OP_MUL_MAT && ggml_get_op_params_i32(of, 1) == GGML_HINT_SRC0_IS_HADAMARD;
            if (is_rotation && s % 2 == 1 && layer_of(i, &lkv::LayerRoles::store)) stored.insert(of);
        }
    }
    std::erase_if(stored, [&](const ggml_tensor* of) { return readers[of] > 1; });
    const std::vector<const ggml_tensor*>& noted = graph.roles.stored_rotations;
    CHECK(stored == std::set<const ggml_tensor*>(noted.begin(), noted.end()));
}

// Every layer with rows of its own says which nodes lead where, in the order in which they are drawn, and up to eight tokens' K, V and
// queries need nothing of one another.
void roles_of(const std::string& path, const char* evict) {
    const auto model = std::make_shared<lkv::Model>(path, lkv::ModelOptions{.gpu = on_gpu(99)});
    const lkv::HParams& h = model->hparams();
    lkv::SessionOptions options;
    options.n_ctx = 256;
    options.evict = evict;
    if (!options.evict.empty()) options.keep_tokens = "100";
    const lkv::SessionPlan plan = lkv::resolve(*model, options);
    lkv::KvCache cache(h, model->cache_spec(), plan.cache, false);
    const auto rotates = [&](bool values) { return plan.kv_rotate && lkv::rotates_full(*model, cache, values); };
    const lkv::Ropes ropes = lkv::read_ropes(model->file(), h, options.n_ctx);
    const ggml_backend_buffer_type_t host = ggml_backend_cpu_buffer_type();
    const lkv::GraphConstants constants = lkv::make_graph_constants(h, ropes, rotates(false), rotates(true), host);
    const lkv::StateTensors states(h, model->runs().front(), cache.states().n_slots(), host, false);
    const lkv::BatchSlots batch;
    size_t own = 0;
    for (int il = 0; il < h.n_layer; il++) own += h.attends(il) && h.makes_rows(il) ? 1 : 0;
    for (const int n_tokens : {1, 2, 8, 9, 64, 65}) {
        for (const bool middle : {false, true}) {
            lkv::GraphShape of;
            of.n_tokens = n_tokens;
            of.latents = of.ring = middle;
            lkv::run_on_gpu(of);
            const auto graph = lkv::build_graph(*model, cache, ropes, constants, &states, batch, of);
            const ggml_gallocr_ptr allocator(ggml_gallocr_new(host));
            CHECK(ggml_gallocr_alloc_graph(allocator.get(), graph->nodes));
            CHECK(graph->roles.layers.size() == own);
            int next = 0;
            for (const lkv::LayerRoles& layer : graph->roles.layers) {
                const std::array at{next,        layer.ahead, layer.input,    layer.k,        layer.v,
                                    layer.store, layer.rope,  layer.latent_q, layer.attention};
                CHECK(std::is_sorted(at.begin(), at.end()));
                CHECK(ggml_graph_node(graph->nodes, layer.attention)->src[1] ==
                      ggml_graph_node(graph->nodes, layer.store));
                next = layer.attention + 1;
            }
            check_products(*model, *graph);
            check_rotations(*graph);
            const size_t concurrent = lkv::concurrent_layers(graph->nodes, graph->roles.layers).size();
            CHECK(!of.concurrent || concurrent == own);
        }
    }
}

}  // namespace

int roles(Arguments arguments) {
    for (const char* const path : arguments) roles_of(path, "");
    if (arguments.empty()) {
        for (const Shape& shape : shapes) roles_of(File(shape, 7).path(), "");
        for (const size_t shape : {4, 16, 22, 33}) roles_of(File(shapes[shape], 7).path(), "h2o");
        roles_of(File(first_mla(), 7).path(), "h2o");
    }
    return report("gpu_roles");
}

}  // namespace lkv::test
