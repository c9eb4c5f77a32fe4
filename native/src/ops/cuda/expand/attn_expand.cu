#include <algorithm>

#include "ops/cuda/expand/expand.cuh"
#include "ops/cuda/expand/score.h"
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

// What a chunk's keys become lies behind the parts.
AttnArgs with_keys(const AttnArgs& args, int first) {
    float* const at = args.partial + parts_floats(args);
    AttnArgs latent = args;
    MlaKeys& keys = latent.mla.keys;
    keys.as = args.expand_by == ExpandBy::scores ? MlaK::scores : MlaK::rows;
    keys.rows = reinterpret_cast<const uint8_t*>(at);
    keys.scores = at;
    keys.chunk_slots = args.expand;
    keys.first_tile = first;
    keys.continues = first > 0 ? 1 : 0;
    keys.n_parts = args.context > args.expand ? args.n_split : 0;
    return latent;
}

// The keys of a chunk, or their scores.
cudaError_t make_keys(const AttnArgs& args, int first, cudaStream_t stream) {
    float* const at = args.partial + parts_floats(args);
    if (args.expand_by == ExpandBy::scores) {
        return launch_scores(args, {at, args.expand, first}, stream);
    }
    const ExpandSide k(args, true);
    const ExpandTo to{reinterpret_cast<uint8_t*>(at), nullptr, nullptr, nullptr, nullptr};
    return expand(args, k, k, to, std::min(args.expand, args.context), 1, first, stream);
}

}  // namespace

AttnArgs all_expanded_keys(const AttnArgs& args) { return with_keys(args, 0); }  // all chunks have the same parts

// K of every chunk, V as it is: for few query rows, whose sums of latents are less work than full rows of V.
cudaError_t launch_expanded_keys(const AttnArgs& args, cudaStream_t stream) {
    AttnArgs tiles_of = args;
    tiles_of.tile = expand_tile;
    const int tiles = args.expand / expand_tile;
    for (int first = 0; first == 0 || first * expand_tile < args.context; first += tiles) {
        cudaError_t error = make_keys(tiles_of, first, stream);
        if (error == cudaSuccess) error = launch_mla(with_keys(args, first), stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t attend_expanded(const AttnArgs& args, const AttnArgs* beside, cudaStream_t stream) {
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
    const int chunks = std::max(1, (args.context + args.expand - 1) / args.expand);
    full.leaves = chunks == 1 && beside == nullptr ? Leaves::results : Leaves::parts;
    const int slots = std::min(args.expand, args.context);
    const auto row_blocks = static_cast<unsigned>(args.n_tokens * args.n_head + 3) / (expand_threads / 32);
    const auto add = [&](AttnArgs parts, bool first, bool last) {
        parts.out = args.out;
        return launch_next(add_chunk_kernel, dim3(row_blocks), expand_threads, 0, stream, parts, ml, first, last);
    };
    cudaError_t error = beside != nullptr ? add(*beside, true, false) : cudaSuccess;
    for (int chunk = 0; chunk < chunks && error == cudaSuccess; chunk++) {
        error = expand(args, k, v, to, slots, 2, chunk * (args.expand / expand_tile), stream);
        if (error == cudaSuccess) error = attend(full, stream);
        if (error == cudaSuccess && full.leaves == Leaves::parts) {
            error = add(full, chunk == 0 && beside == nullptr, chunk + 1 == chunks);
        }
    }
    return error;
}

}  // namespace lkv::cuda
