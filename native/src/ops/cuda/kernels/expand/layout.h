// The plans of what expands rebuilt keys, and where it keeps what it makes.
#pragma once

#include "ops/cuda/kernels/flash/layout.h"
#include "ops/cuda/kernels/mla/layout.h"
#include "ops/cuda/kernels/prefill/layout.h"

namespace lkv::cuda {

// How latents are expanded: from chunks of any format; from units of 32 channels by single warps; from these by four warps at once, with B
// in shared memory as a whole (resident.cuh); so, and multiplied with the queries where they are made (score.cuh).
enum class ExpandBy : int32_t { chunks, units, resident, scores };

constexpr int expand_tile = prefill_tile(1);  // slots, of a chunk's tiles
constexpr int expand_slots = 128;             // that a thread block expands: two tiles, of one region each
static_assert(expand_tile == context_step && expand_tile == flash_tile && expand_slots == chunk_step &&
              expand_tile == key_tile);

struct ExpandArgs : CutProblem {
    int32_t chunk;  // Plan::chunk
    ExpandBy by;
    int32_t multiprocessors;
};

// K and V become full rows for the flash kernel, or the prefill kernel.
struct ExpandPlan {
    ExpandBy by;
    int32_t multiprocessors;
    int32_t flash;  // 1: for the flash kernel
    PrefillPlan prefill;

    // Whether sums pass from chunk to chunk inside the kernel; else a chunk leaves parts, which are added up behind it.
    bool carries(const CutProblem& p) const { return flash != 0 && p.n_split == 1; }
};

// K alone becomes full rows, or scores, for the MLA kernel.
struct ExpandKeysPlan {
    ExpandBy by;
    int32_t multiprocessors;
    int32_t score_blocks;  // thread blocks a head that make scores
    MlaPlan mla;
};

// Behind the parts' sums: what a chunk of the context is expanded to. Bytes from the first, multiples of 16.
struct ExpandedRows {
    int64_t k = 0;  // f16 [chunk][n_kv][head_dim], or in the order of FlashTiles
    int64_t v;
    int64_t seq;      // u64 [chunk], 0: no token
    int64_t pos;      // i32 [chunk]
    int64_t n_slots;  // i32 [4], the first
    int64_t ml;       // f32 [n_tokens][n_head][2] of the chunks before: maximum and sum; their sums are in `out`
    int64_t total;

    LKV_HD ExpandedRows(const Problem& p, int chunk) {
        v = int64_t{chunk} * p.n_kv * p.head_dim * 2;
        seq = 2 * v;
        pos = seq + int64_t{chunk} * 8;
        n_slots = pos + int64_t{chunk} * 4;
        ml = n_slots + 16;
        total = ml + (int64_t{p.n_tokens} * p.n_head * 8 + 15) / 16 * 16;
    }
};

// Where the rows of a chunk go. seq, pos, n_slots: of these rows, or null
struct ExpandTo {
    uint8_t* k;  // f16 [chunk][n_kv][head_dim]
    uint8_t* v;
    uint64_t* seq;
    int32_t* pos;
    int32_t* n_slots;
    int32_t in_tiles;  // 1: in the order of FlashTiles

    // Eight channels of a slot's head.
    LKV_HD uint8_t* at(const Problem& p, bool is_k, int slot, int head, int piece) const {
        const int64_t row = (int64_t{slot} * p.n_kv + head) * p.head_dim * 2 + 16 * piece;
        return (is_k ? k : v) + (in_tiles != 0 ? FlashTiles(p).at(slot, head, piece) : row);
    }
};

// Floats of the parts that attention on a chunk leaves; what the chunk is expanded to lies behind them.
size_t chunk_parts_floats(const Plan& plan);

// Attention on the full rows that a chunk is expanded to.
PrefillArgs on_expanded_rows(const CutProblem& p, const PrefillPlan& plan);

cudaError_t attend_expanded(const Plan& plan, const CutProblem* beside, cudaStream_t stream);
cudaError_t launch_expanded_keys(const Plan& plan, cudaStream_t stream);
cudaError_t merge_expanded_keys(const Plan& plan, const CutProblem* full, cudaStream_t stream);

// Kernels that keep B in shared memory (resident.cuh).

constexpr int resident_groups = 4;  // warpgroups of a thread block, each with 64 slots at a time
constexpr int resident_threads = 128 * resident_groups;
constexpr int resident_slots = 16;        // of a warp
constexpr int resident_own_bytes = 4096;  // the kernels' own variables, at most

// B of a thread block's 128 dimensions, as products by warpgroups read it. Sizes in bytes.
struct ResidentFactor {
    int depth;  // channels, rounded up to whole units
    int pitch;  // from eight dimensions to the next: matrices of 128 bytes begin at multiples of that
    int total;

    LKV_HD explicit constexpr ResidentFactor(int rank)
        : depth((rank + 31) / 32 * 32), pitch(16 * depth), total(16 * pitch) {}
};

// Rebuilt keys that are only multiplied with queries (score.cuh): they are made, turned and multiplied in registers, and only scores leave.

// Query rows of one KV head, padded to 8, 16 or 32.
LKV_HD constexpr int score_rows(const Problem& p) {
    const int rows = p.n_tokens * (p.n_head / p.n_kv);
    return rows <= 8 ? 8 : (rows <= 16 ? 16 : 32);
}

// Shared memory, in this order. Sizes in bytes, multiples of 16.
struct ScoreLayout {
    ResidentFactor factor;
    int queries;  // see load_query_pairs

    LKV_HD explicit ScoreLayout(const Problem& p) : factor(p.k_rank_max), queries(score_rows(p) * 256) {}
    LKV_HD int total() const { return factor.total + queries; }
};

// Where a chunk's scores go: f32 [n_tokens · n_head][slots].
struct ScoreTo {
    float* scores;
    int32_t slots;
    int32_t first_tile;  // of the chunk, of expand_tile slots
};

// Floats of a chunk's scores.
inline size_t score_floats(const Plan& p) {
    return static_cast<size_t>(p.n_tokens) * static_cast<size_t>(p.n_head) * static_cast<size_t>(p.chunk);
}

// Whether full rows of keys, and of values, are made so.
bool plan_resident(const Device& device, const Problem& p, bool has_norm, bool with_values);
// slots: of a chunk, that may be in use. sides: 1, K alone
cudaError_t launch_resident(const ExpandArgs& args, const ExpandTo& to, int slots, unsigned sides, int first_tile,
                            cudaStream_t stream);

// Thread blocks a head; 0: the shape is not one for it.
int plan_scores(const Device& device, const Problem& p);
cudaError_t launch_scores(const CutProblem& args, int blocks, const ScoreTo& to, cudaStream_t stream);

}  // namespace lkv::cuda
