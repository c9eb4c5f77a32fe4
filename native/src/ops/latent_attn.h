// latent_attn: attention over a cache whose rows are quantized, possibly low-rank, K and V. The contract of every
// implementation (reference expression, CPU, CUDA); no ggml here.
//
//   z(t)   = read_slot(rows, t)                                   the stored vector of slot t, group g of KV head j
//   k(t)   = z                                        direct      (full, rotated, absorbed: q already lives in z's space)
//          = rope(norm(B_k[j]ᵀ z + b_k[j]), pos(t))   rebuild; without B_k of rows that are whole keys before bias, norm and RoPE
//   p(t)   = softmax over visible t of (cap(scale · q·k(t)) − slope · (pos(q) − pos(t)))     all regions in one softmax; with sinks also over
//          the logit sinks[h], whose value (of dimensions) is sink_values[j]
//   out[h] = Σ_t p(t) z_v(t)                                      V full   (per KV head)
//          = B_v[j]ᵀ Σ_t p(t) z_v(t)                              V latent (any order of the two sums is legal)
//
// Tokens in two forms (full rows of an exact window, latents of the middle) are two such problems with one softmax over both: their
// results are averaged by their sums of weights.
//
// Slot t is visible to a query token of sequence s at position n when bit s of seq(t) is set, 0 <= pos(t) <= n and
// (window == 0 or n − pos(t) < window). A query that sees no slot gets zeros. A query token always has its own slot written first.
// Undefined: q, rows or B that are not finite; slots >= n_slots.
#pragma once

#include <cstdint>

#include "cache/region_view.h"

namespace lkv {

constexpr int max_regions = 3;  // sink · recent · middle

struct LatentAttnParams {
    // queries, after bias, norm, RoPE and, for rotated and absorbed, E_q
    const float* q;   // [n_tokens, n_head, q_width]
    int32_t q_width;  // head_dim (full, rebuild) or r_max (rotated, absorbed; zero past the group's rank)
    int32_t n_tokens;
    const int32_t* q_pos;  // [n_tokens]
    const int32_t* q_seq;  // [n_tokens] sequence id, 0 .. 63

    // heads
    int32_t n_head;
    int32_t n_kv;  // query head h reads KV head h / (n_head / n_kv)
    int32_t head_dim;
    int32_t k_group;  // KV heads that share one K latent
    int32_t v_group;
    float scale;                // 1/sqrt(head_dim) of the original head
    float softcap;              // c: scaled products become c · tanh(products / c); 0: they stay
    int32_t window;             // sliding window in tokens, 0 = none
    const float* alibi_slopes;  // [n_head] or null
    const float* sinks;         // [n_head] or null
    const float* sink_values;   // [n_kv, head_dim]; null: zeros

    // K rebuild (null k_b: direct, or with k_raw rows that are whole keys before bias, norm and RoPE)
    bool k_raw;
    const float* k_b;     // [n_kv, k_rank_max, head_dim]: row c is what channel c of the latent adds to k
    const float* k_bias;  // [n_kv, head_dim] or null
    const float* k_norm;  // [head_dim] RMS norm weight or null
    float k_norm_eps;
    int32_t k_rank_max;
    const float* rope_freqs;  // [n_rot/2] radians per position, or null
    float rope_mscale;        // multiplies cos and sin
    int32_t n_rot;            // rotated dims (the rest pass through)
    bool rope_neox;           // planes (i, i + n_rot/2) instead of (2i, 2i+1)

    // V latent (null v_b: full)
    const float* v_b;  // [n_kv, v_rank_max, head_dim]
    int32_t v_rank_max;

    RegionView regions[max_regions];
    int32_t n_regions;

    float* out;  // [n_tokens, n_head, head_dim]

    bool rebuilds() const { return k_b != nullptr || k_raw; }
};

// Reads shapes and layouts, no data. Throws std::invalid_argument, "[latent_attn] expected …; got …", when they contradict each other.
void check_latent_attn(const LatentAttnParams& params);

}  // namespace lkv
