#include "runtime/plan/forecast.h"

#include <algorithm>
#include <memory>

#include "decoder/rope.h"
#include "ggml-cpp.h"
#include "graph/graph.h"
#include "graph/recurrent/state_tensors.h"
#include "runtime/gpu.h"
#include "runtime/lazy_prefill.h"
#include "runtime/plan/rotation.h"

namespace lkv {
namespace {

// Measures graphs of a session, none of whose tensors are allocated.
class GraphSizes {
public:
    GraphSizes(const Model& model, const SessionPlan& plan, KvCache& cache)
        : model_(model),
          plan_(plan),
          cache_(cache),
          ropes_(read_ropes(model.file(), model.hparams(), plan.cache.n_ctx)),
          constants_(make_graph_constants(model.hparams(), ropes_, plan.kv_rotate && rotates_full(model, cache, false),
                                          plan.kv_rotate && rotates_full(model, cache, true),
                                          ggml_backend_cpu_buffer_type())) {}

    size_t of_run(const LayerRun& run) const {
        GraphShape shape = full_ubatch();
        if (run.on_gpu()) run_on_gpu(shape);
        shape.first_layer = run.first_layer;
        shape.end_layer = run.end_layer;
        // new tokens are exact, unless they are more than there is room for
        shape.to_middle = !cache_.placement().has_tiers() || plan_.cache.ubatches.sees_own_rows;
        const size_t bytes = measure(shape, run);
        if (!run.on_gpu()) return bytes;
        // K, V and Q of every layer keep their memory in a small batch: more than a ubatch's graph where ubatches are short; in longer ones Q
        size_t most = bytes;
        for (const int n_tokens : {small_batch, recorded_batch}) {
            if (n_tokens >= shape.n_tokens) continue;
            GraphShape few = shape;
            few.n_tokens = n_tokens;
            run_on_gpu(few);
            most = std::max(most, measure(few, run));
        }
        return most;
    }

    // A layer of a prompt that is prefilled lazily: all layers are on one device.
    size_t of_lazy_layer(int il) const {
        GraphShape shape = full_ubatch();
        if (model_.runs().back().on_gpu()) run_on_gpu(shape);
        shape.first_layer = il;
        shape.end_layer = il + 1;
        ExactRows exact;
        exact.spec = exact_layer_spec(model_, il);
        KvCache rows = exact_cache(model_, exact.spec, il, plan_.cache.n_ctx, plan_.cache, false);
        exact.cache = &rows;
        exact.batch = batch_;
        return measure(shape, model_.runs().front(), &exact);
    }

private:
    GraphShape full_ubatch() const {
        GraphShape shape;
        shape.n_tokens = plan_.cache.ubatches.longest;
        shape.n_threads = plan_.n_threads_batch;
        return shape;
    }

    size_t measure(const GraphShape& shape, const LayerRun& run, const ExactRows* exact = nullptr) const {
        const StateTensors states(model_.hparams(), run, cache_.states().n_slots(), ggml_backend_cpu_buffer_type(),
                                  false);
        const std::unique_ptr<Graph> graph =
            build_graph(model_, cache_, ropes_, constants_, &states, batch_, shape, exact);
        const ggml_gallocr_ptr allocator(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
        size_t bytes = 0;
        ggml_gallocr_reserve_n_size(allocator.get(), graph->nodes, nullptr, nullptr, &bytes);
        return bytes;
    }

    const Model& model_;
    const SessionPlan& plan_;
    KvCache& cache_;
    Ropes ropes_;
    GraphConstants constants_;
    BatchSlots batch_;
};

}  // namespace

Forecast forecast(const Model& model, const SessionPlan& plan) {
    KvCache cache(model.hparams(), model.cache_spec(), plan.cache, false);
    const GraphSizes sizes(model, plan, cache);
    Forecast found;
    found.cache = cache.bytes();
    for (const LayerRun& run : model.runs()) found.compute.push_back(sizes.of_run(run));
    if (plan.prefill == Prefill::lazy) {
        for (int il = 0; il < model.hparams().n_layer; il++) {
            found.compute.front() = std::max(found.compute.front(), sizes.of_lazy_layer(il));
        }
        found.prefill = lazy_prefill_bytes(model, cache);
    }
    return found;
}

}  // namespace lkv
