#include "ops/cuda/expand/expand.cuh"
#include "ops/cuda/instances.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/plan.h"

namespace lkv::cuda {

namespace {

// V in K's place.
AttnArgs values_as_keys(const AttnArgs& args) {
    AttnArgs v = args;
    for (RegionArgs& region : v.regions) {
        region.k_rows = region.v_rows;
        region.k_row_bytes = region.v_row_bytes;
        region.k_groups = region.v_groups;
    }
    v.k_group = args.v_group;
    v.k_blocks = args.v_blocks;
    v.k_b_planes = args.v_b != nullptr ? args.v_b_planes : nullptr;
    v.k_bias = nullptr;
    v.k_norm = nullptr;
    v.n_rot = 0;
    return v;
}

}  // namespace

cudaError_t attend_expanded(const AttnArgs& args, cudaStream_t stream) {
    AttnArgs full = on_expanded_rows(args);
    auto* const at = reinterpret_cast<uint8_t*>(args.partial + parts_floats(full));
    const ExpandedRows to(args);
    const AttnArgs values = values_as_keys(args);
    full.regions[0].k_rows = at + to.k;
    full.regions[0].v_rows = at + to.v;
    full.regions[0].seq = reinterpret_cast<const uint64_t*>(at + to.seq);
    full.regions[0].pos = reinterpret_cast<const int32_t*>(at + to.pos);
    full.n_slots = reinterpret_cast<const int32_t*>(at + to.n_slots);
    const int chunks = args.context > args.expand ? (args.context + args.expand - 1) / args.expand : 1;
    if (chunks == 1) full.expand = 0;
    const dim3 grid(static_cast<unsigned>(args.expand / expand_tile), static_cast<unsigned>(args.n_kv));
    const unsigned row_blocks = static_cast<unsigned>((args.n_tokens * args.n_head + 7) / 8);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int first_tile = chunk * (args.expand / expand_tile);
        cudaError_t error =
            launch_next(expand_kernel, grid, expand_threads, static_cast<size_t>(expand_tile * expand_pitch(args)),
                        stream, args, first_tile, at + to.k, reinterpret_cast<uint64_t*>(at + to.seq),
                        reinterpret_cast<int32_t*>(at + to.pos), reinterpret_cast<int32_t*>(at + to.n_slots));
        if (error == cudaSuccess) {
            error = launch_next(expand_kernel, grid, expand_threads,
                                static_cast<size_t>(expand_tile * expand_pitch(values)), stream, values, first_tile,
                                at + to.v, static_cast<uint64_t*>(nullptr), static_cast<int32_t*>(nullptr),
                                static_cast<int32_t*>(nullptr));
        }
        if (error == cudaSuccess) error = attend(full, stream);
        if (error == cudaSuccess && chunks > 1) {
            error = launch_next(add_chunk_kernel, dim3(row_blocks), expand_threads, 0, stream, full,
                                reinterpret_cast<float2*>(at + to.ml), chunk == 0, chunk + 1 == chunks);
        }
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace lkv::cuda
