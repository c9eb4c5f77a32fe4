#include "runtime/cuda/slots/masses.h"

#include <algorithm>

namespace lkv::cuda {

void Masses::attach(const KvCache& cache) {
    const Eviction* const eviction = cache.placement().eviction();
    if (eviction == nullptr) return;
    n_recent_ = eviction->sizes().n_recent;
    int64_t n = 0;
    for (int il = 0; il < cache.placement().n_layers(); il++) {
        first_.push_back(n);
        if (cache.placement().evicts(il)) n += n_recent_ + eviction->cells(il).capacity();
    }
    masses_ = DeviceMemory(static_cast<size_t>(n) * sizeof(float));
    copy_ = std::make_unique<PinnedMemory>(masses_.bytes());
}

int64_t Masses::place(const KvCache& cache, int region, int layer) const {
    if (!cache.has_masses(region)) return -1;
    return first_[static_cast<size_t>(layer)] + (region == cache.placement().middle() ? n_recent_ : 0);
}

MassArgs Masses::args_of(const AttentionNode& node) {
    const KvCache& cache = *node.cache;
    MassArgs args{};
    for (const bool full : {true, false}) {
        const Plan* const plan = attention_.plan(node, full);
        if (plan == nullptr) continue;
        Problem& problem = args.problems[args.n_problems];
        problem = *plan;
        problem.n_regions = 0;
        for (int r = 0; r < cache.placement().n_regions(); r++) {
            if (cache.rows().is_full(r, node.layer) != full) continue;
            const int64_t at = place(cache, r, node.layer);
            if (at >= 0) args.mass[args.n_problems][problem.n_regions] = masses_.as<float>() + at;
            problem.n_regions++;
        }
        args.n_problems++;
    }
    args.weights = inputs_.weights();
    args.sinks = layers_[node.layer].sinks.logits;
    args.has_noise = cache.placement().eviction()->policy().has_noise ? 1 : 0;
    args.layer = node.layer;
    plan_masses(args, inputs_.exact() + inputs_.middle(false), device_);
    return args;
}

void Masses::prepare(const Graph& graph, cudaStream_t stream) {
    size_t bytes = 0;
    for (const AttentionNode& node : graph.attention) {
        if (node.cache != nullptr && node.cache->placement().evicts(node.layer))
            bytes = std::max(bytes, mass_part_bytes(args_of(node)));
    }
    if (bytes <= parts_.bytes()) return;
    check(cudaStreamSynchronize(stream), "the stream");
    parts_ = DeviceMemory(bytes);
}

cudaError_t Masses::add_up(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream) {
    MassArgs args = args_of(node);
    for (int i = 0; i < args.n_problems; i++) args.problems[i].q = static_cast<const float*>(dst->src[i]->data);
    args.parts = parts_.as<float2>();
    return add_up_masses(args, stream);
}

void Masses::take(KvCache& cache, cudaStream_t stream) {
    auto* const masses = copy_->as<float>();
    check(cudaMemcpyAsync(masses, masses_.as<void>(), masses_.bytes(), cudaMemcpyDeviceToHost, stream),
          "a copy of masses");
    check(cudaStreamSynchronize(stream), "the stream");
    for (int il = 0; il < cache.placement().n_layers(); il++) {
        for (int r = 0; cache.placement().evicts(il) && r < cache.placement().n_regions(); r++) {
            const int64_t at = place(cache, r, il);
            float* const to = cache.masses(r, il);
            for (int i = 0; at >= 0 && i < cache.placement().cells(r, il).end(); i++) to[i] += masses[at + i];
        }
    }
}

}  // namespace lkv::cuda
