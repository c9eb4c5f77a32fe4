// What query rows see: a row by itself, those of a thread block between them, and which slots of a tile.
#pragma once

#include <climits>
#include <cstdint>

#include "ops/cuda/softmax/cut.h"

namespace lkv::cuda {

enum class Seen : int32_t { by_none, by_some, by_all };

// What the query rows of a thread block see between them.
struct alignas(16) Sight {
    int first_pos;
    int last_pos;
    unsigned long long seq;
};
constexpr Sight sees_nothing{INT_MAX, -1, 0};

#if defined(__CUDACC__)

constexpr float log2_e = 1.4426950408889634f;  // maxima and scores are powers of two

// A query row; pos: -1 where there is none
struct QueryRow {
    int pos;
    uint64_t seq;
    float slope;  // of scores as powers of two
};

// at: which of [n_tokens, n_head], below 0: none
__device__ __forceinline__ QueryRow load_query_row(const Problem& p, int at) {
    const bool exists = at >= 0;
    const int row = exists ? at : 0;
    const int token = row / p.n_head;
    return {exists ? p.q_pos[token] : -1, exists ? uint64_t{1} << p.q_seq[token] : 0,
            exists && p.alibi_slopes != nullptr ? p.alibi_slopes[row - token * p.n_head] * log2_e : 0.0f};
}

__device__ __forceinline__ void add_token(Sight& sight, const Problem& p, int token) {
    atomicMin(&sight.first_pos, p.q_pos[token]);
    atomicMax(&sight.last_pos, p.q_pos[token]);
    atomicOr(&sight.seq, 1ull << p.q_seq[token]);
}

// Which rows see a tile of n slots, by every warp for itself. mark(s, pos): sequences of slot s, 0 where it is free, and its position; used: a
// bit a slot
template <int n, class Mark>
__device__ __forceinline__ Seen judge(const Sight& sight, int window, int lane, const Mark& mark, uint64_t& used) {
    used = 0;
    bool any = false;
    bool all = true;
#pragma unroll
    for (int s = 0; s < n; s += 32) {
        int pos;
        const uint64_t seq = mark(lane + s, pos);
        used |= uint64_t{__ballot_sync(0xffffffffu, seq != 0)} << s;
        any = any | (((seq & sight.seq) != 0) & (pos <= sight.last_pos) & (sight.first_pos - pos < window));
        all = all & ((seq & sight.seq) == sight.seq) & (pos <= sight.first_pos) & (sight.last_pos - pos < window);
    }
    if (!__any_sync(0xffffffffu, any)) return Seen::by_none;
    return __all_sync(0xffffffffu, all) ? Seen::by_all : Seen::by_some;
}

#endif

}  // namespace lkv::cuda
