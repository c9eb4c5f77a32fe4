#include <algorithm>
#include <array>
#include <string>

#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"
#include "ggml-alloc.h"
#include "runtime/branches.h"
#include "runtime/gpu.h"
#include "runtime/plan/rotation.h"

namespace lkv::test {

namespace {

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
