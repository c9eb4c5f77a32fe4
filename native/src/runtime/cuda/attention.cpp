#include "runtime/cuda/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/log.h"
#include "ggml-impl.h"
#include "ops/cuda/attend.h"
#include "ops/cuda/routes.h"
#include "runtime/cuda/own_products.h"
#include "runtime/gpu.h"

namespace lkv::cuda {

const AttentionNode& attention_of(const ggml_tensor* node, ggml_custom_op_t* function) {
    ggml_custom_op_params params;
    std::memcpy(&params, node->op_params, sizeof params);
    if (function != nullptr) *function = params.fun;
    return *static_cast<const AttentionNode*>(params.userdata);
}

void PartBytes::hold(size_t sum_floats, size_t maximum_floats) {
    sums = std::max(sums, sum_floats * sizeof(float));
    maxima = std::max(maxima, maximum_floats * sizeof(float));
}

// Rotations that nothing but storing V reads, of what keeps its memory until then: a launch less on the way to V's rows.
void Attention::find_rotations(const Graph& graph) {
    rotated_by_store_.clear();
    for (const ggml_tensor* const node : graph.roles.stored_rotations) {
        const ggml_tensor* const x = node->src[1];
        const bool taken = (owner_of(x)->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 && ggml_is_contiguous(x) &&
                           x->type == GGML_TYPE_F32 && node->src[0]->ne[0] <= 64;
        if (taken) rotated_by_store_.insert(node);
    }
}

PartBytes Attention::prepare(const Graph& graph, cudaStream_t stream) {
    find_rotations(graph);
    PartBytes of[2];     // latents, full rows
    PartBytes warm_ups;  // layers that take chunks are not
    PartBytes sinks;
    const auto hold = [](PartBytes& bytes, const Plan& plan) {
        bytes.hold(partial_floats(plan), partial_ml_floats(plan));
    };
    chunk_[0] = chunk_[1] = 0;
    middle_alone_[0] = middle_alone_[1] = true;
    int own_tokens = 0;  // of a batch that may attend to its own rows
    for (const AttentionNode& node : graph.attention) {
        if (node.cache == nullptr) continue;  // of a layer that is not in the graph
        const Layer& layer = layers_[node.row_layer];
        bool& alone = middle_alone_[layer.in_ring ? 1 : 0];
        alone = alone && layer.middle_alone;
        for (const bool full : {false, true}) {
            const std::optional<LatentAttnParams>& params = full ? node.full : node.latents;
            const bool may_be_apart = params && params->n_tokens <= most_direct_tokens &&
                                      inputs_.own_steps(reads(layer, full), layer.in_ring).ends != nullptr;
            if (!full && params && chooser_.may_choose(node.row_layer, *params)) {
                chooser_.prepare(*params, stream);
                hold(of[0], *plan(node, full, {.chosen = true}));
            }
            for (const bool apart : {false, true}) {
                for (const bool alone : {false, true}) {
                    if ((apart && !may_be_apart) || (alone && (full || !begins_with_windows(layer)))) continue;
                    const Plan* const args = plan(node, full, {.apart = apart, .windows_alone = alone});
                    if (args == nullptr) continue;
                    hold(of[full ? 1 : 0], *args);
                    if (apart) continue;
                    if (args->chunk == 0) {
                        hold(warm_ups, *args);
                        continue;
                    }
                    int& least = chunk_[layer.in_ring ? 1 : 0];
                    least = least == 0 ? args->chunk : std::min(least, args->chunk);
                }
            }
            const Plan* const args = plan(node, full, PlanFor{});
            if (args == nullptr) continue;  // so is the last layer of a graph without outputs, which only stores
            if (layer.sinks.logits != nullptr) {
                const CutProblem alone = only_sinks(*args);
                sinks.hold(parts_floats(alone), partial_ml_floats(alone));
            }
            if (full && args->n_tokens > small_batch) own_tokens = args->n_tokens;
        }
    }
    if (own_tokens > 0) layers_.hold_own(own_tokens);
    for (const auto& [memory, bytes] :
         {std::pair{&parts_, of[0]}, std::pair{&full_parts_, of[1]}, std::pair{&sink_parts_, sinks}}) {
        if (memory->holds(bytes)) continue;
        check(cudaStreamSynchronize(stream), "the stream");
        memory->sums = DeviceMemory(bytes.sums);
        memory->maxima = DeviceMemory(bytes.maxima);
    }
    return warm_ups;
}

// Powers of two, then whole chunks: a cache that fills is recorded anew a few times.
int Attention::launched_slots(bool in_ring) const {
    const int chunk = chunk_[in_ring ? 1 : 0];
    if (chunk == 0) return 0;
    const int in_use = context(middle_alone_[in_ring ? 1 : 0], in_ring);
    int slots = chunk_step;
    while (slots < in_use && slots < chunk) slots *= 2;
    return in_use <= slots ? slots : round_up(in_use, chunk);
}

int Attention::variant() const {
    int variant = (inputs_.middle_context(false) == 0 ? 1 : 0) + (chooser_.is_active() ? 2 : 0);
    for (const bool in_ring : {false, true}) {
        for (const Reads what : {Reads::windows, Reads::middle}) {
            variant = 2 * variant + (inputs_.apart(what, in_ring) ? 1 : 0);
        }
    }
    return variant;
}

Reads Attention::reads(const Layer& layer, bool full) {
    if (full) return Reads::windows;
    return layer.middle_alone ? Reads::middle : Reads::all;
}

const Plan* Attention::plan(const AttentionNode& node, bool full) {
    const Layer& layer = layers_[node.row_layer];
    const bool alone = !full && begins_with_windows(layer) && inputs_.middle_context(false) == 0;
    if (!full && node.latents && chooser_.is_active() && chooser_.may_choose(node.row_layer, *node.latents)) {
        const Plan* const chosen = plan(node, full, {.chosen = true});
        if (chooses(*chosen)) return chosen;  // else no kernel reads lists of so many tokens' rows
    }
    return plan(node, full, {.apart = inputs_.apart(reads(layer, full), layer.in_ring), .windows_alone = alone});
}

const Plan* Attention::plan(const AttentionNode& node, bool full, PlanFor as) {
    const std::optional<LatentAttnParams>& params = full ? node.full : node.latents;
    if (!params || params->n_tokens == 0) return nullptr;
    as.expanded = params->rebuilds();
    Layer& layer = layers_[node.row_layer];
    ProblemTables& problem = full ? layer.full : layer.latents;
    // latents come and go beside full rows
    const Leaves leaves = full && node.latents ? Leaves::parts : Leaves::results;
    const std::pair key{params->n_tokens, as};
    const auto found = problem.plans.find(key);
    if (found != problem.plans.end()) {
        found->second.leaves = leaves;
        return &found->second;
    }
    LatentAttnParams p = *params;
    int capacity = inputs_.exact();
    if (full) {
        const bool with_own = p.n_tokens > small_batch && !as.apart;
        capacity += with_own ? p.n_tokens : 0;
        layers_.describe_full(layer, p, with_own);
    } else if (as.windows_alone) {
        p.n_regions--;
    } else {
        capacity += inputs_.middle(layer.in_ring);
    }
    Problem args = problem.constant;
    std::copy_n(problem.regions, max_regions, args.regions);
    if (as.apart) args.own = inputs_.own_steps(reads(layer, full), layer.in_ring);
    if (as.chosen) args.own = chooser_.lists();
    args.v_hadamard = node.v_hadamard;
    // Full rows are attended to by a thread block a KV head, two of them on a multiprocessor; six more for what begins anywhere. 8B at 14 %,
    // depth 4096: 3.84, 3.87, 3.45 and 3.43 ms a step with 4, 6, 10 and 16 left free.
    Request request{p, capacity, device_};
    request.windows = full;
    if (!full && node.full && p.n_tokens <= small_batch) request.beside = (p.n_kv + 1) / 2 + 6;
    Plan plan;
    std::string refusals;
    try {
        plan = plan_attention(request, args, log_level() >= LogLevel::debug ? &refusals : nullptr);
    } catch (const std::invalid_argument& e) {
        throw Error(e.what());
    }
    log(LogLevel::debug, "[cuda] layer ", node.layer, ", ", plan.n_tokens, " tokens, ",
        full ? "full rows of the exact windows: " : "rows: ", plan.kernel->name, refusals.empty() ? "" : " (not ",
        refusals, refusals.empty() ? "" : ")");
    plan.leaves = leaves;
    if (as.chosen) plan.late_slots = 1;
    plan.done = layers_.done();
    plan.packed = problem.packed[plan.kernel];
    return &problem.plans.emplace(key, plan).first->second;
}

cudaError_t Attention::store(const ggml_tensor* dst, const AttentionNode& node, bool with_k, bool with_v,
                             cudaStream_t stream) {
    const auto source = [&](int first) {
        const ggml_tensor* const k = first < GGML_MAX_SRC ? dst->src[first] : nullptr;
        if (k == nullptr) return StoreSource{};
        const ggml_tensor* const v = dst->src[first + 1];
        const ggml_tensor* const rotation = stores_rotated(owner_of(v)) ? owner_of(v) : nullptr;
        return StoreSource{static_cast<const float*>(k->data),
                           static_cast<const float*>((rotation != nullptr ? rotation->src[1] : v)->data),
                           static_cast<int64_t>(k->nb[1] / sizeof(float)),
                           static_cast<int64_t>(v->nb[1] / sizeof(float)),
                           rotation != nullptr ? static_cast<int32_t>(rotation->src[0]->ne[0]) : 0};
    };
    const Layer& layer = layers_[node.row_layer];
    with_k = with_k && std::any_of(layer.targets, layer.targets + max_regions,
                                   [](const RowTarget& target) { return target.n_k_segments > 0; });
    if (!with_k && !with_v) return cudaSuccess;
    StoreArgs args{};
    args.with_k = with_k ? 1 : 0;
    args.with_v = with_v ? 1 : 0;
    if (node.latent_source > 0) args.full = source(0);
    args.latents = source(node.latent_source);
    args.region = inputs_.region();
    args.slot = inputs_.slot(layer.cells);
    std::copy_n(layer.targets, max_regions, args.targets);
    return store_rows(args, static_cast<int>(dst->src[0]->ne[1]), stream);
}

Plan Attention::run_args(const ggml_tensor* dst, const AttentionNode& node, bool full) {
    Plan args = *plan(node, full);
    args.q = static_cast<const float*>((full ? dst->src[0] : last_queries(dst))->data);
    args.out = static_cast<float*>(dst->data);
    (full ? full_parts_ : parts_).lend(args);
    if (node.full && node.latents && args.n_tokens <= recorded_batch) {
        args.sharing = shared_out(full ? args : *plan(node, true), full ? *plan(node, false) : args, device_);
    }
    return args;
}

cudaError_t Attention::attend_full(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream) {
    if (!node.full) return cudaSuccess;
    Plan args = run_args(dst, node, true);
    Layer& layer = layers_[node.row_layer];
    FullRows rows = layer.full_rows;
    if (node.batch->own_rows) {
        const ggml_tensor* const k = dst->src[2];
        const ggml_tensor* const v = dst->src[3];
        rows.own_k = static_cast<const float*>(k->data);
        rows.own_v = static_cast<const float*>(v->data);
        rows.own_stride = static_cast<int64_t>(k->nb[1] / sizeof(float));
        rows.own_pos = inputs_.q_pos();
        rows.own_k_to = layers_.own_rows(false);
        rows.own_v_to = layers_.own_rows(true);
        rows.n_own = args.n_tokens;
    }
    if (args.n_regions > node.full->n_regions) {
        RegionArgs& own = args.regions[args.n_regions - 1];
        own.k_rows = layers_.own_rows(false);
        own.v_rows = layers_.own_rows(true);
    }
    if (rows.raw || rows.own_k != nullptr) {
        Problem finishing = args;
        finishing.n_regions = static_cast<int32_t>(node.full->n_regions);
        finishing.n_rot = node.full->rope_freqs != nullptr ? node.full->n_rot : 0;
        const cudaError_t error = make_full_rows(rows, finishing, stream);
        if (error != cudaSuccess) return error;
    }
    if (!node.latents) return attend_alone(args, layer.sinks, stream);
    const cudaError_t error = cuda::attend(args, stream);
    if (error != cudaSuccess || layer.sinks.logits == nullptr) return error;
    return add_sinks(args, layer.sinks, false, stream);
}

cudaError_t Attention::attend_alone(const Plan& args, const Sinks& sinks, cudaStream_t stream) {
    if (sinks.logits == nullptr) return cuda::attend(args, stream);
    CutProblem beside = only_sinks(args);
    sink_parts_.lend(beside);
    cudaError_t error = add_sinks(beside, sinks, true, stream);
    if (error == cudaSuccess) error = begin_beside(args, stream);
    return error == cudaSuccess ? end_beside(args, beside, stream) : error;
}

Plan Attention::latent_args(const ggml_tensor* dst, const AttentionNode& node) {
    Plan args = run_args(dst, node, false);
    const Layer& layer = layers_[node.row_layer];
    const bool launched = args.n_tokens <= recorded_batch && args.chunk != 0;
    args.context = launched ? launched_slots(layer.in_ring) : context(layer.middle_alone, layer.in_ring);
    return args;
}

cudaError_t Attention::begin_latents(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream) {
    if (!node.full || !node.latents) return cudaSuccess;
    const Plan args = latent_args(dst, node);
    return chooses(args) ? chooser_.score(args, node.row_layer, true, stream) : begin_beside(args, stream);
}

cudaError_t Attention::end_latents(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream) {
    if (!node.latents) return cudaSuccess;
    const Plan args = latent_args(dst, node);
    const bool chosen = chooses(args);
    std::optional<Plan> full;
    if (node.full) full = run_args(dst, node, true);
    cudaError_t error = chosen && !full ? chooser_.score(args, node.row_layer, false, stream) : cudaSuccess;
    if (chosen && error == cudaSuccess) error = chooser_.choose(full ? &*full : nullptr, stream);
    if (error == cudaSuccess && !full) return attend_alone(args, layers_[node.row_layer].sinks, stream);
    if (chosen && error == cudaSuccess) error = begin_beside(args, stream);
    return error == cudaSuccess ? end_beside(args, *full, stream) : error;
}

}  // namespace lkv::cuda
