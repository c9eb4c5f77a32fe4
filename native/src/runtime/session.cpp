#include "runtime/session.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace lkv {

namespace {

// Asks `stop` after each node of what the CPU computes while this lives.
class StopBetweenNodes {
public:
    StopBetweenNodes(ggml_backend_t cpu, const std::function<bool()>* stop) : cpu_(cpu), stop_(stop) {
        const auto asked = [](void* self) { return (*static_cast<StopBetweenNodes*>(self)->stop_)(); };
        if (stop != nullptr && *stop) ggml_backend_cpu_set_abort_callback(cpu_, asked, this);
    }
    ~StopBetweenNodes() { ggml_backend_cpu_set_abort_callback(cpu_, nullptr, nullptr); }
    StopBetweenNodes(const StopBetweenNodes&) = delete;
    StopBetweenNodes& operator=(const StopBetweenNodes&) = delete;

private:
    ggml_backend_t cpu_;
    const std::function<bool()>* stop_;
};

}  // namespace

void Session::check_batch(std::span<const int32_t> tokens, std::span<const int32_t> pos,
                          std::span<const int32_t> seq) const {
    const HParams& h = model_->hparams();
    std::vector<int32_t> last(static_cast<size_t>(cache_.options().n_seq_max), -2);  // -2: not looked up yet
    for (size_t i = 0; i < tokens.size(); i++) {
        if (tokens[i] < 0 || tokens[i] >= h.n_vocab) {
            fail("decode", "expected tokens from 0 to ", h.n_vocab - 1, "; got ", tokens[i]);
        }
        cache_.placement().check_seq(seq[i]);
        int32_t& previous = last[static_cast<size_t>(seq[i])];
        if (previous == -2) {
            previous = cache_.placement().last(seq[i]);
        }
        if (pos[i] <= previous) {
            fail("decode", "expected a position above ", previous, ", the last of sequence ", seq[i], "; got ", pos[i]);
        }
        if (h.block.position == Position::learned && pos[i] >= h.n_ctx_train) {
            fail("context", "expected positions below ", h.n_ctx_train, ", the learned ones; got ", pos[i]);
        }
        previous = pos[i];
    }
    cache_.placement().check_room(tokens.size());
}

void Session::decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                     std::span<const uint8_t> output, float* logits, const std::function<void()>& between_ubatches) {
    const auto room = [&logits, width = static_cast<size_t>(model_->hparams().n_vocab)](size_t n) {
        return std::exchange(logits, logits + n * width);
    };
    decode(tokens, pos, seq, output, room, between_ubatches);
}

void Session::decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                     std::span<const uint8_t> output, const ResultRoom& room,
                     const std::function<void()>& between_ubatches, int n_ahead, Result result,
                     const std::function<bool()>& stop) {
    check_batch(tokens, pos, seq);
    const StopBetweenNodes stops(backend_.get(), cache_.placement().eviction() == nullptr ? &stop : nullptr);
    const int n_sure = static_cast<int>(tokens.size()) - n_ahead;
    if (n_ahead < 0 || n_sure < 0) {
        fail("decode", "expected 0 to ", tokens.size(), " guesses among as many tokens; got ", n_ahead);
    }
    if (n_ahead > 0 && cache_.placement().eviction() != nullptr) {
        fail("decode", "expected no guesses under eviction, as they count in what goes; got ", n_ahead,
             "; leave out the draft model or --evict");
    }
    if (n_ahead > 0 && std::any_of(seq.begin(), seq.end(), [&](int32_t s) { return s != seq.front(); })) {
        fail("decode", "expected guesses of one sequence alone; got several sequences");
    }
    if (prefill_ == Prefill::lazy && starts_sequences(seq)) {
        prefill_lazily({tokens, pos, seq, output, room, between_ubatches, result});
        return;
    }
    for (size_t first = 0, n = 0; first < tokens.size(); first += n) {
        const EqualRuns ubatch = next_ubatch(seq.subspan(first), output.subspan(first));
        n = ubatch.n_tokens;
        const std::vector<int32_t> out_ids = wanted(output.subspan(first, n));
        // guesses that all are in the last ubatch, after a token that is sure
        const int own_ahead = first + n == tokens.size() && n > static_cast<size_t>(n_ahead) ? n_ahead : 0;
        run_ubatch(tokens.subspan(first, n), pos.subspan(first, n), seq.subspan(first, n), out_ids, ubatch, own_ahead,
                   result, room(out_ids.size()));
        if (cache_.states().is_used()) keep_snapshots(ubatch);
        cache_.demote(std::max(0, static_cast<int>(first + n) - n_sure));
        if (between_ubatches) {
            between_ubatches();
        }
    }
}

EqualRuns Session::next_ubatch(std::span<const int32_t> seq, std::span<const uint8_t> output) const {
    const bool settles = fused_ && cache_.placement().cells(cache_.placement().middle()).block() == 1;
    const size_t limit = cache_.options().ubatches.next(seq, output, settles);
    return cache_.states().is_used() ? first_equal_runs(seq, output, limit) : EqualRuns{limit, 1, false};
}

std::vector<int32_t> Session::wanted(std::span<const uint8_t> output) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < output.size(); i++) {
        if (output[i] != 0) {
            ids.push_back(static_cast<int32_t>(i));
        }
    }
    return ids;
}

GraphShape Session::graph_shape(size_t n_tokens, size_t n_outputs, const KvCache& rows) const {
    GraphShape shape;
    shape.n_tokens = static_cast<int>(n_tokens);
    shape.n_outputs = static_cast<int>(n_outputs);
    shape.n_threads = shape.n_tokens == 1 ? n_threads_ : n_threads_batch_;
    shape.fused = fused_;
    const int middle = rows.placement().middle();
    for (int r = 0; !fused_ && r <= middle; r++) {
        shape.n_slots += rows.placement().cells(r).end();
        if (rows.placement().ring() != nullptr)
            shape.n_ring_slots += (r < middle ? rows.placement().cells(r) : rows.placement().ring()->cells()).end();
        if (r < middle) shape.n_exact += rows.placement().cells(r).end();
    }
    for (int il = 0; !fused_ && rows.placement().eviction() != nullptr && il < model_->hparams().n_layer; il++) {
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

void Session::prepare_graph(PipelineStage& stage, const GraphShape& shape, const ExactRows* exact) {
    if (stage.graph != nullptr && shape == stage.shape) {
        return;
    }
    stage.graph.reset();
    stage.graph = build_graph(*model_, cache_, ropes_, stage.constants, stage.states.get(), batch_, shape, exact);
    stage.shape = shape;
    if (!quietly([&] { return ggml_gallocr_alloc_graph(stage.allocator.get(), stage.graph->nodes); })) {
        stage.graph.reset();
        fail("memory", "expected compute memory for ", shape.n_tokens, " tokens; got none; lower -ub / n_ubatch");
    }
    if (stage.on_gpu()) {
        stage.gpu->prepare(*stage.graph);
    }
}

void Session::prepare_graphs(const GraphShape& all) {
    for (PipelineStage& stage : stages_) {
        GraphShape shape = all;
        if (stage.on_gpu()) run_on_gpu(shape);
        shape.first_layer = stage.run.first_layer;
        shape.end_layer = stage.run.end_layer;
        prepare_graph(stage, shape);
    }
}

void Session::run_ubatch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                         std::span<const int32_t> out_ids, const EqualRuns& runs, int n_ahead, Result result,
                         float* rows) {
    batch_.pos.assign(pos.begin(), pos.end());
    batch_.seq.assign(seq.begin(), seq.end());
    batch_.own_rows = cache_.options().ubatches.comes_settled(tokens.size());
    batch_.slots = cache_.claim({pos, seq, batch_.own_rows});
    batch_.count(cache_.placement());
    step_ = {};
    try {
        if (cache_.states().is_used()) claim_states(seq, runs, n_ahead);
        GraphShape shape = graph_shape(tokens.size(), out_ids.size(), cache_);
        shape.n_seqs = runs.n_seqs;
        shape.n_states = step_.n_states();
        shape.result = result;
        compute_ubatch(tokens, pos, out_ids, shape, rows);
    } catch (...) {
        for (const PipelineStage& stage : stages_) stage.abandon();
        cache_.placement().take_back(batch_.slots);
        cache_.states().abandon(step_);
        throw;
    }
    if (cache_.states().is_used()) commit_states(pos, runs);
    if (cache_.placement().eviction() != nullptr && stages_.front().on_gpu()) {
        stages_.front().gpu->take_masses(cache_);
    }
}

void Session::compute_ubatch(std::span<const int32_t> tokens, std::span<const int32_t> pos,
                             std::span<const int32_t> out_ids, const GraphShape& shape, float* rows) {
    prepare_graphs(shape);
    const PipelineStage* before = nullptr;
    for (PipelineStage& stage : stages_) {
        if (before != nullptr) before->hand_to(stage);
        compute(stage, tokens, pos, out_ids, cache_, batch_);
        before = &stage;
    }
    for (const PipelineStage& stage : stages_) stage.get_result(stage.graph->result, rows);
}

void Session::fill_reference_inputs(const Graph& graph, const KvCache& rows, const BatchSlots& batch) {
    bool filled = false;
    bool ring_filled = false;
    const HParams& h = model_->hparams();
    const int n_layer = &rows == &cache_ ? h.n_layer : 1;
    for (int il = 0; il < n_layer; il++) {
        if (rows.placement().evicts(il)) {
            lkv::fill_reference_inputs(rows, il, batch, h, graph.evicting[static_cast<size_t>(il)]);
        } else if (rows.placement().in_ring(il) && !std::exchange(ring_filled, true)) {
            lkv::fill_reference_inputs(rows, il, batch, h, graph.ring_reference);
        } else if (!rows.placement().in_ring(il) && !std::exchange(filled, true)) {
            lkv::fill_reference_inputs(rows, il, batch, h, graph.reference);
        }
    }
}

void Session::compute(PipelineStage& stage, std::span<const int32_t> tokens, std::span<const int32_t> pos,
                      std::span<const int32_t> out_ids, const KvCache& rows, const BatchSlots& batch) {
    const Graph& graph = *stage.graph;
    if (graph.embeddings != nullptr) {
        hidden_.resize(static_cast<size_t>(ggml_nelements(graph.embeddings)));
        model_->embed(tokens, hidden_.data());
        stage.set_input(graph.embeddings, hidden_.data(), hidden_.size() * sizeof(float));
    }
    if (graph.layer_embeddings != nullptr) {
        std::vector<float> brought(static_cast<size_t>(ggml_nelements(graph.layer_embeddings)));
        model_->embed_layers(tokens, brought.data());
        stage.set_input(graph.layer_embeddings, brought.data(), brought.size() * sizeof(float));
    }
    stage.set_input(graph.tokens, tokens.data(), tokens.size_bytes());
    stage.set_input(graph.positions, pos.data(), pos.size_bytes());
    if (graph.temperatures != nullptr) {
        std::vector<float> factors;
        for (const int32_t at : pos) factors.push_back(model_->hparams().temperature(at));
        stage.set_input(graph.temperatures, factors.data(), factors.size() * sizeof(float));
    }
    stage.set_input(graph.out_ids, out_ids.data(), out_ids.size_bytes());
    stage.set_input(graph.states_from, step_.from.data(), step_.from.size() * sizeof(int32_t));
    stage.set_input(graph.states_to, step_.to.data(), step_.to.size() * sizeof(int64_t));
    if (!fused_) {
        fill_reference_inputs(graph, rows, batch);
    }
    if (stage.on_gpu()) {
        if (&rows != &cache_) stage.gpu->begin(cache_, batch_);
        stage.gpu->begin(rows, batch);
    }
    stage.compute(backend_.get());
}

void Session::shift(int seq, const Positions& positions, int32_t delta) {
    const HParams& h = model_->hparams();
    for (int il = 0; !h.is_recurrent() && cache_.placement().eviction() == nullptr && il < h.n_layer; il++) {
        const KPath path = model_->cache_spec().layers[static_cast<size_t>(il)].k_path;
        if (h.block.position == Position::learned) {
            fail("context shift",
                 "expected rotary or ALiBi positions; got learned ones, which live in the hidden states");
        }
        const bool is_free = path == KPath::rebuild || path == KPath::value || !h.makes_rows(il);
        if (h.block.position == Position::rope && !is_free) {
            fail("context shift", "expected K `rebuild` in every layer, whose rows carry no position; got ",
                 path_name(path), " in layer ", il);
        }
    }
    cache_.shift(seq, positions, delta);
}

}  // namespace lkv
