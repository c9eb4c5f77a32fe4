// Tokens of several sequences, each of which reads its own slots (Problem::own): parts are shared out among the tokens.
#pragma once

#include "ops/cuda/routes.h"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Parts are shared out by the tokens' steps; each token has one at least, and no more than n_split or than its steps are worth. By a warp,
// whose lanes have a token each and every 32nd after it.
constexpr int apart_turns = most_direct_tokens / 32;

struct ApartShares {
    uint32_t counts[apart_turns];  // of this lane's tokens
    uint32_t all = 0;

    __device__ explicit ApartShares(const CutProblem& p) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int k = 0; k < apart_turns; k++) {
            const int token = 32 * k + lane;
            counts[k] = token < p.n_tokens ? count(p, token) : 0;
            all += counts[k];
        }
#pragma unroll
        for (int o = 16; o > 0; o /= 2) all += __shfl_xor_sync(0xffffffffu, all, o);
    }
    __device__ int parts(const CutProblem& p, uint32_t count) const {
        const auto share = static_cast<int>(all == 0 ? 1 : count * static_cast<uint32_t>(p.apart) / all);
        const int least = max(step_slots, p.least_tiles * p.tile);  // slots that are worth a part
        return max(1, min(min(p.n_split, share), static_cast<int>(count) * step_slots / least));
    }
    __device__ int parts_of(const CutProblem& p, int token) const { return parts(p, count(p, token)); }

private:
    __device__ uint32_t count(const CutProblem& p, int token) const {
        const int begin = p.own.begins != nullptr ? __ldg(p.own.begins + token) : 0;
        return static_cast<uint32_t>(__ldg(p.own.ends + token) - begin);
    }
};

// Parts with work that a launch of the problem left of a token, by a whole warp.
__device__ inline int parts_of_token(const CutProblem& p, const SlotCounts& counts, int token) {
    return p.apart != 0 ? ApartShares(p).parts_of(p, token) : Parts(p, counts).count;
}

// What thread block `index` of a work item has: steps begin … end - 1 of those that a token reads.
struct ApartShare {
    int part = -1;  // of the token's; -1: there is nothing to do
    int token = -1;
    int begin = 0, end = 0;
    const int32_t* steps = nullptr;

    __device__ ApartShare(const CutProblem& p, int index) {
        const ApartShares shares(p);
        const int lane = static_cast<int>(threadIdx.x) % 32;
        int first = 0;  // part of this turn's tokens
#pragma unroll
        for (int k = 0; k < apart_turns; k++) {
            const int own = 32 * k + lane < p.n_tokens ? shares.parts(p, shares.counts[k]) : 0;
            const int until = first + warp_prefix(own, lane);
            const uint32_t behind = __ballot_sync(0xffffffffu, until > index);
            first = __shfl_sync(0xffffffffu, until, 31);
            if (behind == 0 || part >= 0) continue;
            const int at = __ffs(static_cast<int>(behind)) - 1;
            const int parts = __shfl_sync(0xffffffffu, own, at);
            const auto count = static_cast<int>(__shfl_sync(0xffffffffu, shares.counts[k], at));
            token = 32 * k + at;
            part = index - __shfl_sync(0xffffffffu, until - own, at);
            begin = count * part / parts;
            end = count * (part + 1) / parts;
            steps = p.own.steps + static_cast<int64_t>(token) * p.own.capacity;
            if (p.own.begins != nullptr) steps += __ldg(p.own.begins + token);
        }
    }
};

// Thread blocks of a work item and its query rows that ApartShare knows: a token's share is rounded down, and one at least.
inline unsigned apart_blocks(const CutProblem& p) { return static_cast<unsigned>(p.apart + p.n_tokens); }

}  // namespace lkv::cuda
