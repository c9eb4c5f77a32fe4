#include "runtime/cuda/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/log.h"
#include "ggml-impl.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

const AttentionNode& attention_of(const ggml_tensor* node, ggml_custom_op_t* function) {
    ggml_custom_op_params params;
    std::memcpy(&params, node->op_params, sizeof params);
    if (function != nullptr) *function = params.fun;
    return *static_cast<const AttentionNode*>(params.userdata);
}

void PartBytes::hold(const AttnArgs& args) {
    sums = std::max(sums, partial_floats(args) * sizeof(float));
    maxima = std::max(maxima, partial_ml_floats(args) * sizeof(float));
}

PartBytes Attention::prepare(const Graph& graph, cudaStream_t stream) {
    PartBytes bytes;
    PartBytes rehearsed;  // expanding layers are not
    expand_ = 0;
    for (const AttentionNode& node : graph.attention) {
        if (node.params.n_tokens == 0) continue;  // the last layer of a graph without outputs only stores
        const AttnArgs& args = plan(node);
        bytes.hold(args);
        if (args.expand == 0) {
            rehearsed.hold(args);
        } else {
            expand_ = expand_ == 0 ? args.expand : std::min(expand_, args.expand);
        }
    }
    if (bytes.sums > partial_.bytes() || bytes.maxima > partial_ml_.bytes()) {
        check(cudaStreamSynchronize(stream), "the stream");
        partial_ = DeviceMemory(bytes.sums);
        partial_ml_ = DeviceMemory(bytes.maxima);
    }
    return rehearsed;
}

// Powers of two, then whole chunks: a cache that fills is recorded anew a few times.
int Attention::launched_slots() const {
    if (expand_ == 0) return 0;
    const int context = inputs_.context();
    int slots = expand_slots;
    while (slots < context && slots < expand_) slots *= 2;
    return context <= slots ? slots : round_up(context, expand_);
}

const AttnArgs& Attention::plan(const AttentionNode& node) {
    Layer& layer = layers_[node.layer];
    const auto found = layer.plans.find(node.params.n_tokens);
    if (found != layer.plans.end()) return found->second;
    AttnArgs args = layer.constant;
    try {
        plan_attention(node.params, inputs_.capacity(), device_, args);
    } catch (const std::invalid_argument& e) {
        throw Error(e.what());
    }
    log(LogLevel::debug, "[cuda] layer ", node.layer, ", ", args.n_tokens, " tokens: ", args.kernel);
    std::copy_n(layer.regions, max_regions, args.regions);
    args.n_slots = inputs_.n_slots();
    args.q_pos = inputs_.q_pos();
    args.q_seq = inputs_.q_seq();
    return layer.plans.emplace(node.params.n_tokens, args).first->second;
}

cudaError_t Attention::store(const ggml_tensor* dst, const AttentionNode& node, bool with_k, bool with_v,
                             cudaStream_t stream) {
    const ggml_tensor* const k = dst->src[0];
    const ggml_tensor* const v = dst->src[1];
    StoreArgs args{};
    if (with_k) args.k = static_cast<const float*>(k->data);
    if (with_v) args.v = static_cast<const float*>(v->data);
    args.k_stride = static_cast<int64_t>(k->nb[1] / sizeof(float));
    args.v_stride = static_cast<int64_t>(v->nb[1] / sizeof(float));
    args.region = inputs_.region();
    args.slot = inputs_.slot();
    std::copy_n(layers_[node.layer].targets, max_regions, args.targets);
    return store_rows(args, static_cast<int>(k->ne[1]), stream);
}

cudaError_t Attention::attend(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream) {
    AttnArgs args = plan(node);
    args.q = static_cast<const float*>(dst->src[0]->data);
    args.out = static_cast<float*>(dst->data);
    args.context = args.n_tokens <= small_batch && args.expand != 0 ? launched_slots() : inputs_.context();
    if (node.batch->own_rows) {
        const ggml_tensor* const k = dst->src[2];
        const ggml_tensor* const v = dst->src[3];
        if (args.expand == 0) return cudaErrorNotSupported;  // a long ubatch of a file that expands nothing
        args.own.k_rows = static_cast<const uint8_t*>(k->data);
        args.own.v_rows = static_cast<const uint8_t*>(v->data);
        args.own.k_row_bytes = static_cast<uint32_t>(k->nb[1]);
        args.own.v_row_bytes = static_cast<uint32_t>(v->nb[1]);
        args.own.pos = inputs_.q_pos();
        args.own.seq = inputs_.own_seq();
        args.n_own = inputs_.n_tokens();
    }
    if (args.n_split > 1 || args.v_b != nullptr || args.expand != 0) {
        args.partial = partial_.as<float>();
        args.partial_ml = partial_ml_.as<float>();
    }
    return cuda::attend(args, stream);
}

}  // namespace lkv::cuda
