// How the work is cut: heads in items, the slots in use in parts. The grid is fixed, so that one captured graph serves a cache
// as it fills; how many of its parts have work follows from the number of slots, which lies on the device.
#pragma once

#include "ops/cuda/softmax/sight.h"

namespace lkv::cuda {

// a / b, neither of them negative: exact for a below 2^20, and four instructions where a division has some 25, one behind the other. A
// decode kernel's set-up, which runs once, had dozens of those.
__device__ inline int small_quotient(int a, int b) {
    return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// The used slots of every region, read on the device.
struct SlotCounts {
    int32_t of[max_regions];

    __device__ explicit SlotCounts(const Problem& p) {
#pragma unroll
        for (int r = 0; r < max_regions; r++) of[r] = r < p.n_regions ? p.n_slots[r] : 0;
    }
    // As they were stored, of all regions.
    __device__ explicit SlotCounts(const int32_t* n_slots) {
#pragma unroll
        for (int r = 0; r < max_regions; r++) of[r] = n_slots[r];
    }
};

// How many of its parts the windows' kernel has, and what each of its thread blocks does, in slots of latents.
struct WindowShare {
    int parts;
    float each;

    __device__ explicit WindowShare(const Sharing& s) {
        int windows = 0;
        int latents = 0;
        for (int r = 0; r < s.n_windows; r++) windows += __ldg(s.windows + r);
        for (int r = 0; r < s.n_latents; r++) latents += __ldg(s.latents + r);
        const float work = static_cast<float>(windows) * s.window_cost;
        const float share = work / fmaxf(1.0f, work + static_cast<float>(latents));
        parts = min(s.parts, max(1, static_cast<int>(static_cast<float>(s.all_parts) * share + 0.5f)));
        each = work / static_cast<float>(parts * s.window_blocks);
    }
};

struct Parts {
    int before_1, before_2,
        n_tiles;  // tiles before regions 1 and 2, and all; not an array, which would leave the registers
    int tile;     // slots of a tile: the plan's, or fewer where it shrinks
    int count;    // parts with work, 1 … n_split
    bool halves;  // two thread blocks take half the query rows of a part each: enough are idle

    __device__ explicit Parts(const CutProblem& p) : Parts(p, SlotCounts(p)) {}
    __device__ Parts(const CutProblem& p, const SlotCounts& n_slots) : tile(p.tile) {
        static_assert(max_regions == 3);
        if (p.shrinks != 0) {
            const int all = n_slots.of[0] + n_slots.of[1] + n_slots.of[2];
            while (tile > least_shrunk_tile && all <= tile / 2 * enough_parts) tile /= 2;
        }
        const int tile_bits = __ffs(tile) - 1;
        const auto tiles = [&](int r) { return (n_slots.of[r] + tile - 1) >> tile_bits; };
        before_1 = tiles(0);
        before_2 = before_1 + tiles(1);
        n_tiles = before_2 + tiles(2);
        const int worth = p.least_tiles == 1 ? n_tiles : (n_tiles + p.least_tiles - 1) / p.least_tiles;
        int most = p.n_split;
        if (p.sharing.parts != 0) {
            const int windows = WindowShare(p.sharing).parts;
            // latents keep all where the windows have a single one
            most = p.n_slots == p.sharing.windows
                       ? windows
                       : max(1, small_quotient(most * (p.sharing.all_parts - windows + 1), p.sharing.all_parts));
        }
        count = max(1, min(most, worth));
        halves = p.halves != 0 && 2 * count <= p.n_split;
    }
    // The first tile of a part, or the last one's end.
    __device__ int begin(int part) const {
        const auto each = static_cast<int>(static_cast<uint32_t>(n_tiles) / static_cast<uint32_t>(count));
        return each * part + small_quotient((n_tiles - each * count) * part, count);  // at most 132 parts
    }
    __device__ int region_of(int t) const { return (t >= before_1 ? 1 : 0) + (t >= before_2 ? 1 : 0); }
    __device__ int tiles_before(int region) const { return region == 0 ? 0 : (region == 1 ? before_1 : before_2); }
};

// Whose rows and heads a thread block takes: KV heads that share their K and V groups, and their query heads, of all tokens.
struct WorkItem {
    int head_kv;  // the first KV head
    int k_group, v_group;
    int rep;         // query heads of a KV head
    int unit_heads;  // query heads of the item
    int n_rows;      // query rows: tokens x unit_heads

    __device__ WorkItem(const CutProblem& p, int index)
        : head_kv(index * p.unit),
          k_group(small_quotient(head_kv, p.k_group)),
          v_group(small_quotient(head_kv, p.v_group)),
          rep(small_quotient(p.n_head, p.n_kv)),
          unit_heads(p.unit * rep),
          n_rows(p.n_tokens * unit_heads) {}
    // Which of [n_tokens, n_head] a query row is. As int or unsigned: a division of unsigned ones is shorter.
    template <class Int>
    __device__ int row_at(const CutProblem& p, Int row) const {
        return row_of(p, row / unit_heads, row);
    }
    // The same of the few rows that a decode kernel has.
    __device__ int few_token(int row) const { return small_quotient(row, unit_heads); }
    __device__ int few_row_at(const CutProblem& p, int row) const { return row_of(p, few_token(row), row); }
    // Which of the item's KV heads such a row is of.
    __device__ int few_head(int row) const { return small_quotient(row - few_token(row) * unit_heads, rep); }

private:
    __device__ int row_of(const CutProblem& p, int token, int row) const {
        return token * p.n_head + head_kv * rep + row - token * unit_heads;
    }
};

// The sum of x over the lanes up to this one.
template <class T>
__device__ __forceinline__ T warp_prefix(T x, int lane) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const T before = __shfl_sync(0xffffffffu, x, max(lane - o, 0));
        if (lane >= o) x += before;
    }
    return x;
}

// Sums are of weights relative to a maximum that may be this many powers of two too low: it rarely moves, and f16 holds it.
constexpr float stale_max = 8.0f;

// Whether this thread block is the last of n that count themselves in `done`, which is 0 again then; what the others wrote before is there.
// By all threads; answer: of the thread block.
__device__ __forceinline__ bool is_last(uint32_t* done, unsigned n, bool& answer) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) answer = atomicInc(done, n - 1) == n - 1;
    __syncthreads();
    if (!answer) return false;
    __threadfence();
    return true;
}

// sum += share · x
__device__ inline void add_share(float4& sum, float share, const float4& x) {
    sum.x += share * x.x;
    sum.y += share * x.y;
    sum.z += share * x.z;
    sum.w += share * x.w;
}

}  // namespace lkv::cuda
