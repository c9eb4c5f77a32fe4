#include <algorithm>

#include "ops/cuda/expand/expand.cuh"
#include "ops/cuda/instances.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/plan.h"

namespace lkv::cuda {

namespace {

// slots: of a chunk, that may be in use. sides: 1, K alone
cudaError_t expand(const AttnArgs& args, const ExpandSide& k, const ExpandSide& v, const ExpandTo& to, int slots,
                   unsigned sides, int first_tile, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(round_up(slots, expand_slots) / expand_slots),
                    static_cast<unsigned>(args.n_kv / std::min(k.heads, v.heads)), sides);
    const auto kernel = args.expand_by == ExpandBy::chunks  ? expand_kernel<ExpandBy::chunks>
                        : args.expand_by == ExpandBy::units ? expand_kernel<ExpandBy::units>
                                                            : expand_kernel<ExpandBy::warpgroup>;
    return launch_next(kernel, grid, expand_threads, expand_shared, stream, args, k, v, to, first_tile);
}

cudaError_t expand_own(const AttnArgs& args, const ExpandSide& k, const ExpandSide& v, const ExpandTo& to,
                       cudaStream_t stream) {
    AttnArgs own = args;
    own.n_regions = 1;
    own.regions[0] = args.own;
    own.n_slots = args.n_own;
    own.expand_by = ExpandBy::chunks;
    return expand(own, k, v, to, args.n_tokens, 2, 0, stream);
}

// K of every chunk as full rows, V as it is: for few query rows, whose sums of latents are less work than full rows of V.
cudaError_t attend_expanded_keys(const AttnArgs& args, cudaStream_t stream) {
    AttnArgs latent = args;
    AttnArgs tiles_of = args;
    tiles_of.tile = expand_tile;
    auto* const rows = reinterpret_cast<uint8_t*>(args.partial + parts_floats(args));
    const ExpandedRows of(args);
    const ExpandTo to{rows + of.k, nullptr, nullptr, nullptr, nullptr};
    const ExpandSide k(args, true);
    const int slots = std::min(args.expand, args.context);
    const int tiles = args.expand / expand_tile;
    for (int first = 0; first == 0 || first * expand_tile < args.context; first += tiles) {
        cudaError_t error = expand(tiles_of, k, k, to, slots, 1, first, stream);
        latent.mla.keys = {to.k, first, tiles, first > 0 ? 1 : 0};
        if (error == cudaSuccess) error = launch_mla(latent, stream);
        if (error != cudaSuccess) return error;
    }
    latent.mla.keys.first_tile = 0;  // whose parts are all there are
    return merge_mla(latent, stream);
}

}  // namespace

cudaError_t attend_expanded(const AttnArgs& args, cudaStream_t stream) {
    if (args.mla.rows != 0) return attend_expanded_keys(args, stream);
    AttnArgs full = on_expanded_rows(args);
    auto* const at = reinterpret_cast<uint8_t*>(args.partial + parts_floats(full));
    const ExpandedRows of(args);
    const ExpandTo to{at + of.k, at + of.v, reinterpret_cast<uint64_t*>(at + of.seq),
                      reinterpret_cast<int32_t*>(at + of.pos), reinterpret_cast<int32_t*>(at + of.n_slots)};
    auto* const ml = reinterpret_cast<float2*>(at + of.ml);
    full.regions[0].k_rows = to.k;
    full.regions[0].v_rows = to.v;
    full.regions[0].seq = to.seq;
    full.regions[0].pos = to.pos;
    full.n_slots = to.n_slots;
    const ExpandSide k(args, true);
    const ExpandSide v(args, false);
    // behind those of the cache the batch's own rows
    const int own = args.own.k_rows != nullptr ? 1 : 0;
    const int chunks = own + std::max(1 - own, (args.context + args.expand - 1) / args.expand);
    if (chunks == 1) full.expand = 0;
    const int slots = std::min(args.expand, args.context);
    const auto row_blocks = static_cast<unsigned>(args.n_tokens * args.n_head + 3) / (expand_threads / 32);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int first_tile = chunk * (args.expand / expand_tile);
        cudaError_t error = own != 0 && chunk + 1 == chunks ? expand_own(args, k, v, to, stream)
                                                            : expand(args, k, v, to, slots, 2, first_tile, stream);
        if (error == cudaSuccess) error = attend(full, stream);
        if (error == cudaSuccess && chunks > 1) {
            error = launch_next(add_chunk_kernel, dim3(row_blocks), expand_threads, 0, stream, full, ml, chunk == 0,
                                chunk + 1 == chunks);
        }
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace lkv::cuda
