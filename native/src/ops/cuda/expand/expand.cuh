// Attention on expanded rows: a chunk of the context becomes full rows of f16 once for all query rows, is attended to as any full cache is,
// and the next chunk takes its place. What a chunk leaves is merged into the sums of those before: nothing grows with the context.
//
// Expanding is a product of latents, decoded on the way, with B of the heads that share them. A thread block makes 128 slots x up to 128
// dimensions of whole heads, 32 channels a step:
//
//   latents   decoded in registers where they come in the MLA kernel's units, each warp its own 32 slots; else in shared memory
//   B         copied three steps deep
//   product   a warp has 32 x 128; the result waits in shared memory for bias, norm and RoPE, and leaves in whole rows
#pragma once

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/gpu/warpgroup.cuh"
#include "ops/cuda/mla/units.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/shared_plan.h"
#include "ops/cuda/softmax/parts.cuh"
#include "ops/cuda/step/angle.cuh"
#include "ops/latent_attn.h"

namespace lkv::cuda {

constexpr int expand_columns = 128;
constexpr int expand_depth = 32;  // channels of a step
constexpr int expand_stages = 3;
constexpr int expand_threads = 128;
constexpr int latent_pitch = 2 * expand_depth + 16;    // bytes, odd multiples of 16
constexpr int factor_pitch = 2 * expand_columns + 16;  // also of the result
constexpr int column_pitch = 16 * expand_depth + 16;   // from eight dimensions to the next, where warpgroups multiply
constexpr int expand_shared = 2 * expand_slots * latent_pitch + expand_stages * expand_depth * factor_pitch;
static_assert(expand_shared >= expand_slots * factor_pitch && expand_columns == most_expanded_head);

// K or V as it is expanded.
struct ExpandSide {
    const uint16_t* factor;  // f16 [n_kv][rank][head_dim]; null: rows are full already
    const float* bias;       // [n_kv, head_dim]
    const float* norm;       // [head_dim]
    int32_t rank;
    int32_t group;   // KV heads that share a latent
    int32_t blocks;  // of 64 stored channels
    int32_t heads;   // that a thread block makes
    int32_t n_rot;

    ExpandSide(const AttnArgs& p, bool is_k)
        : factor(is_k ? p.k_b_rows : p.v_b),
          bias(is_k ? p.k_bias : nullptr),
          norm(is_k ? p.k_norm : nullptr),
          rank(is_k ? p.k_rank_max : p.v_rank_max),
          group(is_k ? p.k_group : p.v_group),
          blocks(is_k ? p.k_blocks : p.v_blocks),
          heads(1),
          n_rot(is_k ? p.n_rot : 0) {
        for (int n = 2; n <= group && n * p.head_dim <= expand_columns; n++) {
            if (group % n == 0) heads = n;
        }
    }
};

// A thread's slot.
struct ExpandSlot {
    const uint8_t* row;   // of the group's first staged byte; of the last slot in use where this one is not
    const Chunk* chunks;  // of the group
    bool exists;
    int pos;
    uint64_t seq;
};

__device__ inline ExpandSlot slot_of(const AttnArgs& p, const Parts& parts, bool is_k, int group, int first_tile) {
    const int thread = static_cast<int>(threadIdx.x);
    const int at = first_tile + static_cast<int>(blockIdx.x) * (expand_slots / expand_tile) + thread / expand_tile;
    ExpandSlot to{};
    if (at >= parts.n_tiles) return to;
    const int r = parts.region_of(at);
    const RegionArgs& region = p.regions[r];
    const GroupTable& table = (is_k ? region.k_groups : region.v_groups)[group];
    const int slot = (at - parts.tiles_before(r)) * expand_tile + thread % expand_tile;
    const int last = p.n_slots[r] - 1;
    to.chunks = region.chunks + table.chunks;
    to.row = (is_k ? region.k_rows : region.v_rows) +
             static_cast<int64_t>(min(slot, last)) * (is_k ? region.k_row_bytes : region.v_row_bytes) + table.first;
    to.exists = slot <= last;
    to.pos = to.exists ? region.pos[slot] : 0;
    to.seq = to.exists ? region.seq[slot] : 0;
    return to;
}

// 16 channels in their order, zero where there are none.
__device__ inline void put_chunk(const ExpandSlot& slot, int j, void* to) {
    uint32_t x[8] = {};
    if (slot.row != nullptr) pairs_of_chunk(slot.row, slot.chunks[j], x);
    auto* const at = static_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        at[i] = make_uint4(__byte_perm(x[4 * i], x[4 * i + 1], 0x5410), __byte_perm(x[4 * i], x[4 * i + 1], 0x7632),
                           __byte_perm(x[4 * i + 2], x[4 * i + 3], 0x5410),
                           __byte_perm(x[4 * i + 2], x[4 * i + 3], 0x7632));
    }
}

// 16 channels as pairs, see pairs_of_chunk; f32 rows come whole.
__device__ inline void load_pairs(const ExpandSlot& slot, int j, uint32_t (&x)[8]) {
    const Chunk chunk = slot.chunks[j];
    const uint8_t* const from = slot.row + chunk.codes;
    const bool whole = chunk.kind == static_cast<uint8_t>(Format::f32) && chunk.valid == chunk_width &&
                       reinterpret_cast<uintptr_t>(from) % 16 == 0;
    if (!whole) return pairs_of_chunk(slot.row, chunk, x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 of = reinterpret_cast<const float4*>(from)[i];
        x[i / 2 * 4 + i % 2 * 2] = bits(__floats2half2_rn(of.x, of.z));
        x[i / 2 * 4 + i % 2 * 2 + 1] = bits(__floats2half2_rn(of.y, of.w));
    }
}

// 16 of a step's 32 channels, in the order of KeyReader's pairs.
__device__ inline void put_pairs(const ExpandSlot& slot, int j, uint8_t* to) {
    uint32_t x[8] = {};
    if (slot.row != nullptr) load_pairs(slot, j, x);
#pragma unroll
    for (int q = 0; q < 4; q++) *reinterpret_cast<uint2*>(to + 16 * q + 8 * (j % 2)) = make_uint2(x[q], x[q + 4]);
}

// Steps up to the last channel that any of the thread block's slots stores.
__device__ inline int steps_of(const ExpandSlot& slot, int n_chunks) {
    int kept = 0;
    for (int j = static_cast<int>(threadIdx.x) % 32; j < n_chunks; j += 32) {
        if (slot.row != nullptr && slot.chunks[j].kind != kind_none) kept = j + 1;
    }
    int steps = 0;
    for (int bit = 8; bit >= 0; bit--) {  // at most 2048 channels
        if (__syncthreads_or((kept + 1) / 2 >= steps + (1 << bit))) steps += 1 << bit;
    }
    return steps;
}

// A thread's four pieces of a step's 32 channels of B: eight dimensions each, of channels x, x + 8, x + 16 and x + 24. Rows of a step lie in
// the order of KeyReader's pairs, those of its first product before those of its second; BY_WARPS: whole, else as warpgroup_mma has them.
template <bool BY_WARPS>
class FactorCopies {
public:
    __device__ FactorCopies(const ExpandSide& side, int head0, int head_dim) : rank_(side.rank) {
        constexpr int pieces = expand_columns / 8;
        const int thread = static_cast<int>(threadIdx.x);
        const int column = thread % pieces * 8;
        const int head = small_quotient(column, head_dim);
        channel_ = thread / pieces;
        exists_ = head < side.heads;
        from_ = side.factor + (static_cast<int64_t>(head0 + head) * side.rank + channel_) * head_dim + column -
                head * head_dim;
        const int row = channel_ / 4 * 16 + channel_ % 2 * 8 + channel_ % 4 / 2;
        to_ = BY_WARPS ? row * factor_pitch + column * 2 : column / 8 * column_pitch + row * 16;
        step_ = 8 * head_dim;
    }
    // The next step's, into its stage.
    __device__ void issue(uint8_t* stage) {
        if (!exists_) return;
#pragma unroll
        for (int k = 0; k < 4; k++, channel_ += 8, from_ += step_) {
            uint8_t* const at = stage + to_ + 2 * k * (BY_WARPS ? factor_pitch : 16);
            if (channel_ < rank_) {
                copy_async<16>(at, from_);
            } else {
                *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
            }
        }
    }

private:
    const uint16_t* from_;
    int rank_, channel_, to_, step_;
    bool exists_;
};

// A warp's latents of one step: 32 slots x 16 channels twice, operands a.
using LatentPair = uint32_t[2][2][4];  // [product][16 slots][word]

__device__ __forceinline__ float (&four_of(float (&acc)[64], int n))[4] {
    return *reinterpret_cast<float (*)[4]>(acc + 4 * n);
}

__device__ __forceinline__ void expand_step(float (&acc)[2][64], const LatentPair& a, const uint8_t* factor, int lane) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint32_t b[4];
            load_four<true>(b, factor + (16 * k + lane % 16) * factor_pitch + 32 * n + lane / 16 * 16);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(four_of(acc[m], 2 * n), a[k][m], b[0], b[1]);
                mma(four_of(acc[m], 2 * n + 1), a[k][m], b[2], b[3]);
            }
        }
    }
}

// Calls f(bits) as a constant, f16 included.
template <class Use>
__device__ __forceinline__ void with_unit(int kind, Use&& use) {
    if (kind == kind_f16_wide) return use(std::integral_constant<int, 16>{});
    with_bits(static_cast<uint8_t>(kind), use);
}

// One unit of the lane's four slots.
template <int Bits>
__device__ __forceinline__ void decode_unit(const KeyReader<Bits>& reader,
                                            const uint32_t (&words)[4][KeyReader<Bits>::n_words],
                                            const uint32_t (&affine)[4], LatentPair& a) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint32_t x[4];
        uint32_t y[4];
        reader.decode(words[2 * m], affine[2 * m], x);
        reader.decode(words[2 * m + 1], affine[2 * m + 1], y);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            a[k][m][0] = x[2 * k];
            a[k][m][1] = y[2 * k];
            a[k][m][2] = x[2 * k + 1];
            a[k][m][3] = y[2 * k + 1];
        }
    }
}

// Bias, norm and RoPE of one head's key. x: f16 [head_dim] in shared memory. By one warp
__device__ inline void finish_key(const AttnArgs& p, const ExpandSide& side, int head, int pos, __half* x, int lane) {
    constexpr int most = most_expanded_head / 64;  // pairs of dimensions of a lane
    const int planes = side.n_rot / 2;
    float2 of[most];
    float power = 0.0f;
    struct Dims {
        int x, y;
    };
    const auto dims = [&](int i) {  // of pair i: a plane's, or neighbours behind them
        return i < planes && p.rope_neox != 0 ? Dims{i, i + planes} : Dims{2 * i, 2 * i + 1};
    };
#pragma unroll
    for (int k = 0; k < most; k++) {
        const int i = lane + 32 * k;
        of[k] = make_float2(0.0f, 0.0f);
        if (2 * i >= p.head_dim) continue;
        const Dims d = dims(i);
        of[k] = make_float2(__half2float(x[d.x]), __half2float(x[d.y]));
        if (side.bias != nullptr) {
            of[k].x += side.bias[head * p.head_dim + d.x];
            of[k].y += side.bias[head * p.head_dim + d.y];
        }
        power += of[k].x * of[k].x + of[k].y * of[k].y;
    }
    float inverse = 1.0f;
    if (side.norm != nullptr) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) power += __shfl_xor_sync(0xffffffffu, power, o);
        inverse = rsqrtf(power / static_cast<float>(p.head_dim) + p.k_norm_eps);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < most; k++) {
        const int i = lane + 32 * k;
        if (2 * i >= p.head_dim) continue;
        const Dims d = dims(i);
        if (side.norm != nullptr) {
            of[k].x *= inverse * side.norm[d.x];
            of[k].y *= inverse * side.norm[d.y];
        }
        if (i < planes) {
            const auto [cosine, sine] = angle_of(p, i, pos);
            of[k] = make_float2((of[k].x * cosine - of[k].y * sine) * p.rope_mscale,
                                (of[k].x * sine + of[k].y * cosine) * p.rope_mscale);
        }
        x[d.x] = __float2half_rn(of[k].x);
        x[d.y] = __float2half_rn(of[k].y);
    }
}

// RoPE of whole heads where a lane has both dimensions of its planes: neighbours, or APART blocks of eight dimensions from each other.
// pos: of slots g and g + 8 of both sixteens
template <int APART>
__device__ __forceinline__ void turn_keys(const AttnArgs& p, float (&acc)[2][64], const int (&pos)[2][2], int lane) {
#pragma unroll
    for (int n = 0; n < 16; n++) {
        if (APART != 0 && n / (APART + (APART == 0)) % 2 != 0) continue;
#pragma unroll
        for (int e = 0; e < (APART == 0 ? 1 : 2); e++) {
            const int column = 8 * n + lane % 4 * 2 + e;
            const int d = column - small_quotient(column, p.head_dim) * p.head_dim;
            const uint64_t phase = p.phases[APART == 0 ? d / 2 : d];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const auto [cosine, sine] = angle_of(phase, pos[m][i]);
                    float& x = acc[m][4 * n + 2 * i + e];
                    float& y = acc[m][4 * (n + APART) + 2 * i + (APART == 0 ? 1 : e)];
                    const float turned = (x * cosine - y * sine) * p.rope_mscale;
                    y = (x * sine + y * cosine) * p.rope_mscale;
                    x = turned;
                }
            }
        }
    }
}

// The same, if this shape's keys need no more than that. False: finish_key does it all.
__device__ __forceinline__ bool turn_whole_keys(const AttnArgs& p, const ExpandSide& side, float (&acc)[2][64],
                                                const int* positions, int lane) {
    if (side.n_rot != p.head_dim || side.bias != nullptr || side.norm != nullptr) return false;
    int pos[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) pos[i / 2][i % 2] = positions[lane / 4 + 8 * i];
    if (p.rope_neox == 0) {
        turn_keys<0>(p, acc, pos, lane);
    } else if (p.head_dim == 128) {
        turn_keys<8>(p, acc, pos, lane);
    } else if (p.head_dim == 64) {
        turn_keys<4>(p, acc, pos, lane);
    } else {
        return false;
    }
    return true;
}

// Where the rows of a chunk go. seq, pos, n_slots: of these rows, or null
struct ExpandTo {
    uint8_t* k;  // f16 [expand][n_kv][head_dim]
    uint8_t* v;
    uint64_t* seq;
    int32_t* pos;
    int32_t* n_slots;
};

// grid: 128 slots of a chunk x heads of a thread block x {K, V}. BY: latents come in units of 32 channels, mla/units.cuh
// (otherwise in tables of 16), products by the four warps at once
enum class ExpandBy { chunks, units, warpgroup };
template <ExpandBy BY>
__global__ void __launch_bounds__(expand_threads, 2)
    expand_kernel(const __grid_constant__ AttnArgs p, const __grid_constant__ ExpandSide of_k,
                  const __grid_constant__ ExpandSide of_v, const __grid_constant__ ExpandTo to, int first_tile) {
    let_next_start();
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ int positions[expand_slots];
    __shared__ const uint8_t* rows_of[expand_slots];
    __shared__ MlaUnit own_units[expand_threads / 32][most_units];
    uint8_t* const latents = shared;
    uint8_t* const factors = shared + 2 * expand_slots * latent_pitch;
    const bool is_k = blockIdx.z == 0;
    const ExpandSide& side = is_k ? of_k : of_v;
    const int head0 = static_cast<int>(blockIdx.y) * side.heads;
    if (head0 >= p.n_kv) return;
    wait_for_previous();
    const Parts parts(p);
    const int thread = static_cast<int>(threadIdx.x);
    const int left = (parts.n_tiles - first_tile) * expand_tile;
    const bool notes = is_k && to.seq != nullptr && blockIdx.y == 0;
    if (notes && blockIdx.x == 0 && thread == 0) *to.n_slots = max(0, min(p.expand, left));
    const int slot0 = static_cast<int>(blockIdx.x) * expand_slots;
    if (slot0 >= left) return;
    const ExpandSlot slot = slot_of(p, parts, is_k, small_quotient(head0, side.group), first_tile);
    positions[thread] = slot.pos;
    if (notes) {
        to.seq[slot0 + thread] = slot.seq;
        to.pos[slot0 + thread] = slot.pos;
    }
    uint8_t* const out = is_k ? to.k : to.v;
    const auto row_at = [&](int s) {
        return out + (static_cast<int64_t>(slot0 + s) * p.n_kv + head0) * p.head_dim * 2;
    };
    if (side.factor == nullptr) {  // one head
        for (int j = 0; 16 * j < p.head_dim; j++) {
            __align__(16) uint8_t x[32];
            put_chunk(slot, j, x);
            for (int i = 0; i < 2 && 16 * j + 8 * i < p.head_dim; i++) {
                *reinterpret_cast<uint4*>(row_at(thread) + 32 * j + 16 * i) = *reinterpret_cast<uint4*>(x + 16 * i);
            }
        }
        return;
    }

    const int n_steps = steps_of(slot, 4 * side.blocks);
    const int warp = thread / 32;
    const int lane = thread % 32;
    constexpr bool by_warps = BY != ExpandBy::warpgroup;
    FactorCopies<by_warps> copies(side, head0, p.head_dim);
    for (int step = 0; step < expand_stages - 1; step++) {
        if (step < n_steps) copies.issue(factors + step * expand_depth * factor_pitch);
        copies_commit();
    }
    float acc[2][64] = {};  // of 16 slots each, [dimensions / 8][4]
    // Before a step's product: its B is there, the one three steps further on its way.
    const auto next_factor = [&](int step) {
        copies_wait(expand_stages - 2);
        if constexpr (!by_warps) before_async_access();
        __syncthreads();  // this step has come, the one before was read
        const int ahead = step + expand_stages - 1;
        if (ahead < n_steps) copies.issue(factors + ahead % expand_stages * expand_depth * factor_pitch);
        copies_commit();
        return factors + step % expand_stages * expand_depth * factor_pitch;
    };
    int n_units = 0;
    const uint8_t* rows[4];  // of the lane's slots
    MlaUnit* const units = own_units[warp];
    if constexpr (BY != ExpandBy::chunks) {
        n_units = note_units(slot.chunks, slot.row != nullptr ? 4 * side.blocks : 0, units);
        rows_of[thread] = slot.row;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = rows_of[32 * warp + lane / 4 + 8 * i];
    }
    if constexpr (BY == ExpandBy::warpgroup) {
        uint32_t words[4][4];
        uint32_t affine[4] = {};
        int kind = kind_none;
        const auto load = [&](int u) {
            kind = kind_none;
            if (u >= n_units) return;
            const MlaUnit unit = units[u];
            kind = unit.kind;
            with_unit(kind, [&](auto bits) __attribute__((always_inline)) {
                constexpr int Bits = decltype(bits)::value;
                const KeyReader<Bits> reader(lane);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t of[KeyReader<Bits>::n_words];
                    reader.load(rows[i] + unit.codes, of);
#pragma unroll
                    for (int k = 0; k < KeyReader<Bits>::n_words; k++) words[i][k] = of[k];
                    if constexpr (Bits < 16) affine[i] = u32_at<true>(rows[i] + unit.affine);
                }
            });
        };
        load(0);
#pragma unroll 1
        for (int u = 0; u < n_steps; u++) {
            LatentPair a = {};
            if (kind != kind_none) {
                with_unit(kind, [&](auto bits) __attribute__((always_inline)) {
                    constexpr int Bits = decltype(bits)::value;
                    uint32_t of[4][KeyReader<Bits>::n_words];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#pragma unroll
                        for (int k = 0; k < KeyReader<Bits>::n_words; k++) of[i][k] = words[i][k];
                    }
                    decode_unit<Bits>(KeyReader<Bits>(lane), of, affine, a);
                });
            }
            load(u + 1);
            warpgroup_wait_all();  // the products of the step before, whose B is replaced now
            const Operand factor(static_cast<uint32_t>(__cvta_generic_to_shared(next_factor(u))), column_pitch);
            warpgroup_begin();
#pragma unroll
            for (int k = 0; k < 2; k++) {
#pragma unroll
                for (int m = 0; m < 2; m++) warpgroup_mma(acc[m], a[k][m], factor.at(256 * k), true);
            }
            warpgroup_commit();
        }
        warpgroup_wait(acc[0]);
        warpgroup_wait(acc[1]);
    } else if constexpr (BY == ExpandBy::units) {
        const auto run = [&](auto bits, int& u, int end) __attribute__((always_inline)) {
            constexpr int Bits = decltype(bits)::value;
            const KeyReader<Bits> reader(lane);
            constexpr int n_words = KeyReader<Bits>::n_words;
            uint32_t words[4][n_words];
            uint32_t affine[4] = {};
            int at = 0;
            int segment_end = u;
            const auto load = [&] {
#pragma unroll
                for (int i = 0; i < 4; i++) reader.load(rows[i] + at, words[i]);
            };
            const auto begin_segment = [&] {
                const MlaUnit unit = units[u];
                segment_end = unit.end;
                at = unit.codes;
                if constexpr (Bits < 16) {
#pragma unroll
                    for (int i = 0; i < 4; i++) affine[i] = u32_at<true>(rows[i] + unit.affine);
                }
                load();
            };
#pragma unroll 1
            while (u < end) {
                if (u == segment_end) begin_segment();
                LatentPair a;
                decode_unit<Bits>(reader, words, affine, a);
                at += 4 * Bits;
                if (u + 1 < segment_end) load();
                expand_step(acc, a, next_factor(u), lane);
                u++;
            }
        };
        int u = 0;
#pragma unroll 1
        while (u < n_units) {
            const MlaUnit unit = units[u];
            const int end = min(static_cast<int>(unit.kind_end), n_units);
            if (unit.kind == kind_f16_wide) {
                run(std::integral_constant<int, 16>{}, u, end);
            } else {
                with_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) { run(bits, u, end); });
            }
        }
        for (; u < n_steps; u++) next_factor(u);  // the other slots' regions store more channels
    } else {
        const auto load_latents = [&](int step) {
            uint8_t* const at = latents + (step % 2 * expand_slots + thread) * latent_pitch;
            put_pairs(slot, 2 * step, at);
            put_pairs(slot, 2 * step + 1, at);
        };
        if (n_steps > 0) load_latents(0);
#pragma unroll 1
        for (int step = 0; step < n_steps; step++) {
            const uint8_t* const factor = next_factor(step);
            if (step + 1 < n_steps) load_latents(step + 1);
            const uint8_t* const from = latents + (step % 2 * expand_slots + 32 * warp) * latent_pitch;
            LatentPair a;
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int k = 0; k < 2; k++) load_a(a[k][m], from + 16 * m * latent_pitch + 32 * k, latent_pitch, lane);
            }
            expand_step(acc, a, factor, lane);
        }
    }
    copies_wait(0);
    const bool turned = turn_whole_keys(p, side, acc, positions + 32 * warp, lane);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint8_t* const at =
                    shared + (32 * warp + 16 * m + lane / 4 + 8 * i) * factor_pitch + 16 * n + lane % 4 * 4;
                *reinterpret_cast<uint32_t*>(at) =
                    bits(__floats2half2_rn(acc[m][4 * n + 2 * i], acc[m][4 * n + 2 * i + 1]));
            }
        }
    }
    __syncthreads();
    if (!turned && (side.n_rot > 0 || side.bias != nullptr || side.norm != nullptr)) {
        for (int i = warp; i < expand_slots * side.heads; i += expand_threads / 32) {
            const int s = i % expand_slots;
            const int h = i / expand_slots;
            finish_key(p, side, head0 + h, positions[s],
                       reinterpret_cast<__half*>(shared + s * factor_pitch) + h * p.head_dim, lane);
        }
        __syncthreads();
    }
    const int pieces = side.heads * p.head_dim / 8;
    for (int i = thread; i < expand_slots * pieces; i += expand_threads) {
        const int s = i / pieces;
        const int at = (i - s * pieces) * 16;
        *reinterpret_cast<uint4*>(row_at(s) + at) = *reinterpret_cast<const uint4*>(shared + s * factor_pitch + at);
    }
}

// The parts of a chunk and the chunks before it, whose sums are in p.out and their maxima and sums of weights in ml. By one warp a
// query row. p: of the attention on the chunk's rows; first, last: of the chunks
__global__ void __launch_bounds__(expand_threads)
    add_chunk_kernel(const __grid_constant__ AttnArgs p, float2* ml, bool first, bool last) {
    let_next_start();
    wait_for_previous();
    const Parts parts(p);
    const int lane = threadIdx.x % 32;
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (expand_threads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const auto* const of = reinterpret_cast<const float2*>(p.partial_ml) + row;
    const float2 before = first ? make_float2(-INFINITY, 0.0f) : ml[row];
    __syncwarp();  // all lanes have read it
    float top = before.x;
    for (int s = 0; s < parts.count; s++) top = fmaxf(top, of[s * rows].x);
    const auto share = [&](const float2& x) { return x.y > 0.0f ? exp2f(x.x - top) : 0.0f; };
    const bool mine = 4 * lane < p.head_dim;
    auto* const out = reinterpret_cast<float4*>(p.out + row * p.head_dim) + lane;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float total = before.y * share(before);
    if (!first && mine && before.y > 0.0f) add_share(sum, share(before), *out);
    for (int s = 0; s < parts.count; s++) {
        const float2 part = of[s * rows];
        if (part.y <= 0.0f) continue;
        total += part.y * share(part);
        if (mine) {
            add_share(sum, share(part),
                      reinterpret_cast<const float4*>(p.partial + (s * rows + row) * 64 * p.v_blocks)[lane]);
        }
    }
    if (last) {
        const float by = total > 0.0f ? 1.0f / total : 0.0f;
        sum = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
    } else if (lane == 0) {
        ml[row] = make_float2(top, total);
    }
    if (mine) *out = sum;
}

}  // namespace lkv::cuda
