// What lies where in the scratch buffer: the partial sums of all splits, then the temporaries of each thread. The same
// constructors measure (null base) and hand out, so sizes and pointers cannot drift apart.
#pragma once

#include <cstdint>

#include "ops/cpu/codes/code_scores.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/latent_attn.h"
#include "ops/cpu/softmax.h"
#include "ops/cpu/tile.h"

namespace lkv {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Hands out consecutive arrays, each on a cache line of its own.
class Arena {
public:
    static constexpr size_t line = 64;

    explicit Arena(void* base = nullptr)
        : at_((reinterpret_cast<uintptr_t>(base) + line - 1) / line * line), begin_(at_) {}

    template <class T>
    T* take(int64_t n) {
        T* p = reinterpret_cast<T*>(at_);
        at_ += (static_cast<size_t>(n) * sizeof(T) + line - 1) / line * line;
        return p;
    }

    size_t bytes() const { return at_ - begin_; }

private:
    uintptr_t at_;
    uintptr_t begin_;
};

// One softmax state and one weighted sum per split and row; row = token · n_head + head.
struct PartialSums {
    float* sums;           // [n_split, n_rows, acc_width]
    SoftmaxState* states;  // [n_split, n_rows]
    int64_t n_rows;
    int acc_width;

    PartialSums(Arena& arena, const LatentAttnParams& p, const LatentAttnPlan& plan)
        : n_rows(int64_t{p.n_tokens} * p.n_head), acc_width(plan.acc_width) {
        sums = arena.take<float>(plan.n_split * n_rows * acc_width);
        states = arena.take<SoftmaxState>(plan.n_split * n_rows);
    }

    float* sum(int split, int64_t row) const { return sums + (split * n_rows + row) * acc_width; }
    SoftmaxState& state(int split, int64_t row) const { return states[split * n_rows + row]; }
};

// Queries of some tokens and one stretch of heads as integers, for one region's rows: made once for many tiles.
struct CodedRun {
    const RegionView* region;  // null: none yet
    int first_head;
    int n_tokens;
    int32_t* tokens;
    CodedQueries queries;
};

// Temporaries of one thread. Bounded by the batch, the ranks and the tile: nothing grows with the context.
struct ThreadScratch {
    int32_t* tokens;  // [n_tokens] tokens that see the tile
    uint64_t* masks;  // [n_tokens] what they see of it
    float* scores;    // [block_rows, 64]
    float* k_latent;  // by channel
    float* k;         // by channel
    float* v_latent;  // by channel
    float* v;         // by slot
    float* rope;      // cos, sin: [2, n_rot/2, 64]
    const float** a;  // row pointers of a product
    float** c;
    uint8_t* zero_row;  // stands in for slots nobody sees
    uint32_t* words;    // [k_words, 64] a tile of codes, transposed
    CodedRun* coded;    // [runs] queries as integers, of every stretch of heads that shares a latent
    int n_runs;

    ThreadScratch(Arena& arena, const LatentAttnParams& p, const LatentAttnPlan& plan) {
        const bool k_rebuild = p.rebuilds();
        const int block_rows = plan.block_tokens * plan.unit_heads * (p.n_head / p.n_kv);
        const int n_pointers = std::max({block_rows, p.head_dim, tile_slots});
        tokens = arena.take<int32_t>(p.n_tokens);
        masks = arena.take<uint64_t>(p.n_tokens);
        scores = arena.take<float>(block_rows * tile_slots);
        k_latent = arena.take<float>(k_rebuild ? plan.k_kept * tile_slots : 0);
        k = arena.take<float>((k_rebuild ? p.head_dim : plan.k_kept) * tile_slots);
        v_latent = arena.take<float>(plan.v_rebuild ? plan.v_kept * tile_slots : 0);
        v = arena.take<float>(round_up(plan.v_rebuild ? p.head_dim : plan.v_kept, panel_width) * tile_slots);
        rope = arena.take<float>(k_rebuild && p.rope_freqs != nullptr ? p.n_rot * tile_slots : 0);
        a = arena.take<const float*>(n_pointers);
        c = arena.take<float*>(n_pointers);
        zero_row = arena.take<uint8_t>(plan.row_bytes);
        words = arena.take<uint32_t>(int64_t{plan.k_words} * tile_slots);
        n_runs = plan.k_words == 0 ? 0 : plan.unit_heads / p.k_group + 1;
        coded = arena.take<CodedRun>(n_runs);
        rows_ = std::min(max_coded_rows, p.k_group * (p.n_head / p.n_kv) * plan.block_tokens);
        packs_ = coded_packs(plan.k_kept, plan.k_segments) * rows_;
        sums_ = plan.k_segments * rows_;
        coded_ints_ = arena.take<int32_t>(int64_t{n_runs} * (rows_ + packs_));
        coded_floats_ = arena.take<float>(int64_t{n_runs} * 2 * sums_);
    }

    // To be called once by the thread that owns this, before it looks at `coded`.
    void forget_coded() const {
        for (int i = 0; i < n_runs; i++) {
            int32_t* const ints = coded_ints_ + int64_t{i} * (rows_ + packs_);
            float* const floats = coded_floats_ + int64_t{i} * 2 * sums_;
            coded[i] = {nullptr, 0, 0, ints, {ints + rows_, floats, floats + sums_, 0}};
        }
    }

private:
    int rows_;
    int packs_;
    int sums_;
    int32_t* coded_ints_;
    float* coded_floats_;
};

}  // namespace lkv
