#include "runtime/batch_runner.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "runtime/plan/rotation.h"

namespace lkv {

std::vector<int32_t> wanted(std::span<const uint8_t> output) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < output.size(); i++) {
        if (output[i] != 0) {
            ids.push_back(static_cast<int32_t>(i));
        }
    }
    return ids;
}

BatchRunner::BatchRunner(const Model& model, const SessionPlan& plan)
    : model_(model),
      fused_(plan.fused),
      n_threads_(plan.n_threads),
      n_threads_batch_(plan.n_threads_batch),
      stages_(open_stages(model.runs())),
      ropes_(read_ropes(model.file(), model.hparams(), plan.cache.n_ctx)) {
    ggml_threadpool_params params = ggml_threadpool_params_default(std::max(n_threads_, n_threads_batch_));
    threadpool_.reset(ggml_threadpool_new(&params));
    backend_.reset(ggml_backend_cpu_init());
    if (threadpool_ == nullptr || backend_ == nullptr) {
        fail("threads", "expected a pool of ", params.n_threads, " threads; got none from the system");
    }
    ggml_backend_cpu_set_threadpool(backend_.get(), threadpool_.get());
    ggml_backend_cpu_set_n_threads(backend_.get(), n_threads_);  // a state may need latents before any graph has run
}

unsigned BatchRunner::attach(KvCache& cache, bool kv_rotate) {
    cache_ = &cache;
    if (cache.states().is_used()) attach_states();
    const bool rotate_k = kv_rotate && rotates_full(model_, cache, false);
    const bool rotate_v = kv_rotate && rotates_full(model_, cache, true);
    for (PipelineStage& stage : stages_) {
        ggml_backend_buffer_type_t const where = model_.memory(stage.run);
        stage.constants = make_graph_constants(model_.hparams(), ropes_, rotate_k, rotate_v, where);
        stage.allocator.reset(ggml_gallocr_new(where));
        if (stage.on_gpu()) stage.gpu->attach(model_, cache, ropes_, stage.constants, stage.run);
    }
    if (!stages_.front().on_gpu()) {
        encoder_.emplace(model_, backend_.get());
        cache.rows().set_encoder(&*encoder_);
    }
    return rotated();
}

std::string BatchRunner::implementation() const {
    if (model_.on_gpu()) {
        const std::string fused = "fused cuda, " + stages_.back().gpu->name();
        return model_.on_one_device() ? fused : fused + "; " + runs_text(model_.runs());
    }
    if (!fused_) return "reference, stock ggml ops (fused cpu: not asked for)";
    return model_.gpu_asked() ? "fused cpu (cuda: " + model_.gpu_absent() + ")" : "fused cpu";
}

uint64_t BatchRunner::rows_read() const {
    uint64_t n = 0;
    for (const PipelineStage& stage : stages_) n += stage.gpu != nullptr ? stage.gpu->rows_read() : 0;
    return n;
}

size_t BatchRunner::compute_bytes() const {
    size_t bytes = 0;
    for (const PipelineStage& stage : stages_) bytes += ggml_gallocr_get_buffer_size(stage.allocator.get(), 0);
    return bytes;
}

unsigned BatchRunner::rotated() const {
    const GraphConstants& constants = stages_.front().constants;
    return (constants.hadamard_k != nullptr ? 1U : 0U) | (constants.hadamard_v != nullptr ? 2U : 0U);
}

GraphShape BatchRunner::graph_shape(const Ubatch& ubatch, const KvCache& rows) const {
    GraphShape shape;
    shape.n_tokens = static_cast<int>(ubatch.tokens.size());
    shape.n_outputs = static_cast<int>(ubatch.out_ids.size());
    shape.result = ubatch.result;
    shape.all_states = ubatch.states_after != nullptr;
    shape.n_threads = shape.n_tokens == 1 ? n_threads_ : n_threads_batch_;
    shape.fused = fused_;
    const int middle = rows.placement().middle();
    for (int r = 0; !fused_ && r <= middle; r++) {
        shape.n_slots += rows.placement().cells(r).end();
        if (rows.placement().ring() != nullptr)
            shape.n_ring_slots += (r < middle ? rows.placement().cells(r) : rows.placement().ring()->cells()).end();
        if (r < middle) shape.n_exact += rows.placement().cells(r).end();
    }
    for (int il = 0; !fused_ && rows.placement().eviction() != nullptr && il < model_.hparams().n_layer; il++) {
        if (rows.placement().evicts(il)) {
            shape.n_evicting_slots =
                std::max(shape.n_evicting_slots, shape.n_exact + rows.placement().cells(middle, il).end());
        }
    }
    const bool exact = std::any_of(batch_.slots.begin(), batch_.slots.end(),
                                   [middle](const SlotRef& to) { return to.region < middle; });
    shape.to_middle = !exact || std::any_of(batch_.slots.begin(), batch_.slots.end(),
                                            [middle](const SlotRef& to) { return to.region == middle; });
    shape.latents = rows.placement().cells(middle).end() > 0;
    shape.ring = rows.placement().ring() != nullptr && rows.placement().ring()->cells().end() > 0;
    shape.apart = batch_.apart[0].middle;
    shape.ring_apart = batch_.apart[1].middle;
    return shape;
}

void BatchRunner::prepare(PipelineStage& stage, GraphShape shape, const ExactRows* exact) {
    if (stage.on_gpu()) run_on_gpu(shape);
    if (stage.graph != nullptr && shape == stage.shape) return;
    stage.graph.reset();
    stage.graph = build_graph(model_, *cache_, ropes_, stage.constants, stage.states.get(), batch_, shape, exact);
    stage.shape = shape;
    if (!quietly([&] { return ggml_gallocr_alloc_graph(stage.allocator.get(), stage.graph->nodes); })) {
        stage.graph.reset();
        fail("memory", "expected compute memory for ", shape.n_tokens, " tokens; got none; lower -ub / n_ubatch");
    }
    if (stage.on_gpu()) stage.gpu->prepare(*stage.graph);
}

void BatchRunner::run(const Ubatch& ubatch, const EqualRuns& runs, int n_guesses, float* rows) {
    batch_.pos.assign(ubatch.pos.begin(), ubatch.pos.end());
    batch_.seq.assign(ubatch.seq.begin(), ubatch.seq.end());
    batch_.own_rows = ubatch.tokens.size() > static_cast<size_t>(cache_->placement().most_exact());
    batch_.slots = cache_->claim({ubatch.pos, ubatch.seq, batch_.own_rows});
    batch_.count(cache_->placement());
    step_ = {};
    try {
        if (cache_->states().is_used()) claim_states(ubatch.seq, runs, n_guesses);
        GraphShape shape = graph_shape(ubatch, *cache_);
        shape.n_seqs = runs.n_seqs;
        shape.n_states = step_.n_states();
        compute(ubatch, shape, rows);
    } catch (...) {
        for (const PipelineStage& stage : stages_) stage.abandon();
        cache_->placement().take_back(batch_.slots);
        cache_->states().abandon(step_);
        throw;
    }
    if (cache_->states().is_used()) commit_states(ubatch.pos, runs);
    if (cache_->placement().eviction() != nullptr && stages_.front().on_gpu()) {
        stages_.front().gpu->take_masses(*cache_);
    }
}

void BatchRunner::compute(const Ubatch& ubatch, const GraphShape& all, float* rows) {
    for (PipelineStage& stage : stages_) {
        GraphShape shape = all;
        shape.first_layer = stage.run.first_layer;
        shape.end_layer = stage.run.end_layer;
        prepare(stage, shape);
    }
    const PipelineStage* before = nullptr;
    for (PipelineStage& stage : stages_) {
        if (before != nullptr) before->hand_to(stage);
        compute(stage, ubatch, {*cache_, batch_});
        before = &stage;
    }
    for (const PipelineStage& stage : stages_) {
        stage.get_result(stage.graph->result, rows);
        if (stage.graph->states != nullptr) stage.get_result(stage.graph->states, ubatch.states_after);
    }
}

void BatchRunner::begin_layer(int il, const ExactRows& exact) {
    PipelineStage& stage = stages_.front();
    stage.graph.reset();
    if (stage.on_gpu()) stage.gpu->attach_exact(model_, *exact.cache, exact.spec, il, ropes_, stage.constants);
}

void BatchRunner::end_layer() {
    PipelineStage& stage = stages_.front();
    stage.graph.reset();  // it reads rows of a layer that is over
    if (stage.on_gpu()) stage.gpu->detach_exact();
    batch_.k_staged = nullptr;
}

void BatchRunner::run_layer(int il, const Ubatch& ubatch, std::span<const SlotRef> targets, float* k_staged,
                            ExactRows& exact, float* hidden, const ResultRoom& room) {
    PipelineStage& stage = stages_.front();
    batch_.pos.assign(ubatch.pos.begin(), ubatch.pos.end());
    batch_.seq.assign(ubatch.seq.begin(), ubatch.seq.end());
    batch_.slots.assign(targets.begin(), targets.end());
    batch_.own_rows = false;
    batch_.k_staged = k_staged;
    batch_.count(cache_->placement());
    std::vector<SlotRef> slots = std::move(exact.batch.slots);
    exact.batch = batch_;
    exact.batch.slots = std::move(slots);
    exact.batch.count(exact.cache->placement());
    GraphShape shape = graph_shape(ubatch, *exact.cache);
    shape.first_layer = il;
    shape.end_layer = il + 1;
    prepare(stage, shape, &exact);
    const size_t floats = ubatch.tokens.size() * static_cast<size_t>(model_.hparams().n_embd);
    stage.set_input(stage.graph->hidden_in, hidden, floats * sizeof(float));
    compute(stage, ubatch, {*exact.cache, exact.batch});
    if (stage.graph->result != nullptr) {
        stage.get_result(stage.graph->result, room(ubatch.out_ids.size()));
    } else {
        stage.get_result(stage.graph->hidden_out, hidden);
    }
}

void BatchRunner::fill_reference_inputs(const Graph& graph, const Rows& rows) {
    bool filled = false;
    bool ring_filled = false;
    const HParams& h = model_.hparams();
    const int n_layer = &rows.cache == cache_ ? h.n_layer : 1;
    for (int il = 0; il < n_layer; il++) {
        if (rows.cache.placement().evicts(il)) {
            lkv::fill_reference_inputs(rows.cache, il, rows.batch, h, graph.evicting[static_cast<size_t>(il)]);
        } else if (rows.cache.placement().in_ring(il) && !std::exchange(ring_filled, true)) {
            lkv::fill_reference_inputs(rows.cache, il, rows.batch, h, graph.ring_reference);
        } else if (!rows.cache.placement().in_ring(il) && !std::exchange(filled, true)) {
            lkv::fill_reference_inputs(rows.cache, il, rows.batch, h, graph.reference);
        }
    }
}

void BatchRunner::compute(PipelineStage& stage, const Ubatch& ubatch, const Rows& rows) {
    const Graph& graph = *stage.graph;
    if (graph.embeddings != nullptr) {
        hidden_.resize(static_cast<size_t>(ggml_nelements(graph.embeddings)));
        model_.embed(ubatch.tokens, hidden_.data());
        stage.set_input(graph.embeddings, hidden_.data(), hidden_.size() * sizeof(float));
    }
    if (graph.layer_embeddings != nullptr) {
        std::vector<float> brought(static_cast<size_t>(ggml_nelements(graph.layer_embeddings)));
        model_.embed_layers(ubatch.tokens, brought.data());
        stage.set_input(graph.layer_embeddings, brought.data(), brought.size() * sizeof(float));
    }
    if (ubatch.states_before != nullptr) {
        stage.set_input(graph.hidden_in, ubatch.states_before, ggml_nbytes(graph.hidden_in));
    }
    stage.set_input(graph.tokens, ubatch.tokens.data(), ubatch.tokens.size_bytes());
    stage.set_input(graph.positions, ubatch.pos.data(), ubatch.pos.size_bytes());
    if (graph.temperatures != nullptr) {
        std::vector<float> factors;
        for (const int32_t at : ubatch.pos) factors.push_back(model_.hparams().temperature(at));
        stage.set_input(graph.temperatures, factors.data(), factors.size() * sizeof(float));
    }
    stage.set_input(graph.out_ids, ubatch.out_ids.data(), ubatch.out_ids.size_bytes());
    stage.set_input(graph.states_from, step_.from.data(), step_.from.size() * sizeof(int32_t));
    stage.set_input(graph.states_to, step_.to.data(), step_.to.size() * sizeof(int64_t));
    if (!fused_) {
        fill_reference_inputs(graph, rows);
    }
    if (stage.on_gpu()) {
        if (&rows.cache != cache_) stage.gpu->begin(*cache_, batch_);
        stage.gpu->begin(rows.cache, rows.batch);
    }
    stage.compute(backend_.get());
}

}  // namespace lkv
