#include "runtime/cuda/warm_up.h"

#include <algorithm>
#include <vector>

#include "ops/cuda/attend.h"
#include "ops/cuda/softmax/merge.h"
#include "runtime/cuda/layer_tables.h"
#include "runtime/gpu.h"

namespace lkv::cuda {

void WarmUp::attach(const KvCache& cache, const HParams& h) {
    // every region that has a slot, from the first on, then the middle alone
    std::vector<int32_t> one_slot(max_regions, 0);
    for (int r = 0; r < cache.placement().n_regions(); r++) {
        one_slot[static_cast<size_t>(r)] = std::min(1, cache.placement().cells(r).capacity());
    }
    one_slot.push_back(1);
    n_slots_ = DeviceMemory::of(one_slot);
    std::vector<int32_t> lists(2 * small_batch, 0);
    std::fill_n(lists.begin(), small_batch, 1);
    one_step_ = DeviceMemory::of(lists);
    done_ = DeviceMemory::of(std::vector<uint32_t>(static_cast<size_t>(most_counters(h)), 0));
}

void WarmUp::prepare(const Graph& graph, const PartBytes& parts) {
    size_t q = 0;
    size_t out = 0;
    for (const AttentionNode& node : graph.attention) {
        for (const std::optional<LatentAttnParams>& p : {node.full, node.latents}) {
            if (!p) continue;
            const auto rows = static_cast<size_t>(p->n_tokens) * static_cast<size_t>(p->n_head);
            q = std::max(q, rows * static_cast<size_t>(p->q_width));
            out = std::max(out, rows * static_cast<size_t>(p->head_dim));
        }
    }
    if (q * sizeof(float) > q_.bytes()) q_ = DeviceMemory::of(std::vector<float>(q, 1.0f));
    const auto grow = [](DeviceMemory& memory, size_t bytes) {
        if (bytes > memory.bytes()) memory = DeviceMemory(bytes);
    };
    grow(out_, out * sizeof(float));
    grow(partial_, parts.sums);
    grow(partial_ml_, parts.maxima);
}

cudaError_t WarmUp::run(const Plan& plan, cudaStream_t stream) const {
    const std::optional<Plan> few = warm_up(plan);
    if (!few) return cudaSuccess;
    Plan args = *few;
    args.q = q_.as<float>();
    args.out = out_.as<float>();
    args.partial = partial_.as<float>();
    args.partial_ml = partial_ml_.as<float>();
    args.done = done_.as<uint32_t>();
    args.n_slots = n_slots_.as<int32_t>();
    if (args.apart != 0) {
        args.apart = 1;
        args.own = {nullptr, one_step_.as<int32_t>(), one_step_.as<int32_t>() + small_batch, 1};
    }
    if (args.v_hadamard == 0) return attend(args, stream);
    args.leaves = Leaves::parts;  // so that merging has some
    const cudaError_t error = attend(args, stream);
    return error == cudaSuccess ? merge_parts(args, nullptr, stream) : error;
}

cudaError_t WarmUp::choose(const Plan& plan, const Chooser& chooser, int row_layer, cudaStream_t stream) const {
    Plan args = plan;
    args.q = q_.as<float>();
    args.n_slots = n_slots_.as<int32_t>() + max_regions;
    return chooser.warm_up(args, row_layer, stream);
}

}  // namespace lkv::cuda
