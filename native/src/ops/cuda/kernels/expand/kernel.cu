#include <algorithm>

#include "ops/cuda/attend.h"
#include "ops/cuda/kernels/expand/kernel.cuh"
#include "ops/cuda/kernels/expand/layout.h"
#include "ops/cuda/softmax/merge.h"

namespace lkv::cuda {

namespace {

// slots: of a chunk, that may be in use. sides: 1, K alone
cudaError_t expand(const ExpandArgs& args, const ExpandSide& k, const ExpandSide& v, const ExpandTo& to, int slots,
                   unsigned sides, int first_tile, cudaStream_t stream) {
    if (args.by == ExpandBy::resident) return launch_resident(args, to, slots, sides, first_tile, stream);
    const dim3 grid(static_cast<unsigned>(round_up(slots, expand_slots) / expand_slots),
                    static_cast<unsigned>(args.n_kv / std::min(k.heads, v.heads) * (args.head_dim / k.columns)), sides);
    const auto kernel = args.by == ExpandBy::chunks ? expand_kernel<ExpandBy::chunks> : expand_kernel<ExpandBy::units>;
    return launch_next(kernel, grid, expand_threads, expand_shared, stream, args, k, v, to, first_tile);
}

// What a chunk's keys become lies behind the parts.
float* behind_parts(const Plan& plan) { return plan.partial + mla_parts_floats(plan); }

MlaArgs with_keys(const Plan& plan, const ExpandKeysPlan& own, int first) {
    MlaArgs latent{plan, own.mla};
    MlaKeys& keys = latent.mla.keys;
    keys.rows = reinterpret_cast<const uint8_t*>(behind_parts(plan));
    keys.scores = behind_parts(plan);
    keys.chunk_slots = plan.chunk;
    keys.first_tile = first;
    keys.continues = first > 0 ? 1 : 0;
    keys.n_parts = plan.context > plan.chunk ? plan.n_split : 0;
    return latent;
}

// The keys of a chunk, or their scores.
cudaError_t make_keys(const Plan& plan, const ExpandKeysPlan& own, int first, cudaStream_t stream) {
    ExpandArgs args{plan, plan.chunk, own.by, own.multiprocessors};
    args.tile = expand_tile;
    float* const at = behind_parts(plan);
    if (own.by == ExpandBy::scores) return launch_scores(args, own.score_blocks, {at, plan.chunk, first}, stream);
    const ExpandSide k(args, true);
    const ExpandTo to{reinterpret_cast<uint8_t*>(at), nullptr, nullptr, nullptr, nullptr, 0};
    return expand(args, k, k, to, std::min(plan.chunk, plan.context), 1, first, stream);
}

}  // namespace

// All chunks have the same parts.
cudaError_t merge_expanded_keys(const Plan& plan, const CutProblem* full, cudaStream_t stream) {
    return merge_mla(with_keys(plan, plan.as<ExpandKeysPlan>(), 0), full, stream);
}

// K of every chunk, V as it is: for few query rows, whose sums of latents are less work than full rows of V.
cudaError_t launch_expanded_keys(const Plan& plan, cudaStream_t stream) {
    const auto own = plan.as<ExpandKeysPlan>();
    const int tiles = plan.chunk / expand_tile;
    for (int first = 0; first == 0 || first * expand_tile < plan.context; first += tiles) {
        cudaError_t error = make_keys(plan, own, first, stream);
        if (error == cudaSuccess) error = launch_mla(with_keys(plan, own, first), plan.items, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t attend_expanded(const Plan& plan, const CutProblem* beside, cudaStream_t stream) {
    const auto own = plan.as<ExpandPlan>();
    const ExpandArgs args{plan, plan.chunk, own.by, own.multiprocessors};
    PrefillArgs full = on_expanded_rows(plan, own.prefill);
    auto* const at = reinterpret_cast<uint8_t*>(plan.partial + chunk_parts_floats(plan));
    const ExpandedRows of(plan, plan.chunk);
    const ExpandTo to{at + of.k,
                      at + of.v,
                      reinterpret_cast<uint64_t*>(at + of.seq),
                      reinterpret_cast<int32_t*>(at + of.pos),
                      reinterpret_cast<int32_t*>(at + of.n_slots),
                      own.flash};
    auto* const ml = reinterpret_cast<float2*>(at + of.ml);
    full.regions[0].k_rows = to.k;
    full.regions[0].v_rows = to.v;
    full.regions[0].seq = to.seq;
    full.regions[0].pos = to.pos;
    full.n_slots = to.n_slots;
    if (own.flash != 0) full.tile = flash_slots(plan.head_dim);
    const ExpandSide k(args, true);
    const ExpandSide v(args, false);
    const int chunks = std::max(1, (plan.context + plan.chunk - 1) / plan.chunk);
    const bool carries = own.carries(plan);
    full.leaves = carries || (chunks == 1 && beside == nullptr) ? Leaves::results : Leaves::parts;
    const int slots = std::min(plan.chunk, plan.context);
    const auto row_blocks = static_cast<unsigned>(plan.n_tokens * plan.n_head + 3) / (expand_threads / 32);
    const auto add = [&](CutProblem parts, bool first, bool last) {
        parts.out = plan.out;
        return launch_next(add_chunk_kernel, dim3(row_blocks), expand_threads, 0, stream, parts, ml, first, last);
    };
    cudaError_t error = beside != nullptr ? add(*beside, true, false) : cudaSuccess;
    for (int chunk = 0; chunk < chunks && error == cudaSuccess; chunk++) {
        error = expand(args, k, v, to, slots, 2, chunk * (plan.chunk / expand_tile), stream);
        if (error != cudaSuccess) break;
        FlashCarry carry;
        if (carries) carry = {ml, chunk > 0 || beside != nullptr ? 1 : 0, chunk + 1 < chunks ? 1 : 0};
        error = own.flash != 0 ? launch_flash({full, carry, 1}, full.n_kv, stream) : launch_prefill(full, stream);
        if (error != cudaSuccess || carries) continue;
        if (full.leaves == Leaves::parts) {
            error = add(full, chunk == 0 && beside == nullptr, chunk + 1 == chunks);
        } else if (full.n_split > 1) {
            error = merge_parts(full, nullptr, stream);
        }
    }
    return error;
}

}  // namespace lkv::cuda
