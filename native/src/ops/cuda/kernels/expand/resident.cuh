// Latents times B where all of B of a thread block's heads, one of 128 dimensions or as many as these hold, stays in shared memory. Each
// warpgroup walks over tiles of 64 slots by itself, so that one decodes or turns while another multiplies, and nobody waits for a barrier.
// Where B came in steps for 128 slots at a time, it was read from the L2 cache as often as a context has so many slots.
#pragma once

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/warpgroup.cuh"
#include "ops/cuda/kernels/expand/keys.cuh"
#include "ops/cuda/kernels/expand/layout.h"
#include "ops/cuda/kernels/mla/units.cuh"

namespace lkv::cuda {

// A warp's latents of one unit: 16 slots x 16 channels twice, operands a.
using UnitPair = uint32_t[2][4];

// B to shared memory, a channel a row of 16 bytes, in the order of KeyReader's pairs. By all threads; zeros behind the last channel and the
// last head.
__device__ inline void copy_factor(const ExpandSide& side, int head0, int column0, int head_dim,
                                   const ResidentFactor& layout, uint8_t* to) {
    constexpr int in_unit = 32 * 16;  // pieces of eight dimensions; eight lanes write 128 bytes
    for (int i = static_cast<int>(threadIdx.x); i < 16 * layout.depth; i += static_cast<int>(blockDim.x)) {
        const int row = i / 32 % 4 * 8 + i % 8;
        const int column = (i % in_unit / 128 * 4 + i / 8 % 4) * 8;
        const int channel = i / in_unit * 32 + row % 8 / 2 * 8 + row / 16 * 4 + row % 2 * 2 + row / 8 % 2;
        const int head = small_quotient(column, head_dim);
        uint8_t* const at = to + column / 8 * layout.pitch + (i / in_unit * 32 + row) * 16;
        if (channel < side.rank && head < side.heads) {
            const int64_t from = static_cast<int64_t>(head0 + head) * side.rank + channel;
            copy_async<16>(at, side.factor + from * head_dim + column0 + column - head * head_dim);
        } else {
            *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
        }
    }
}

// The units of every region's rows of one group. By all threads; a barrier follows.
struct ResidentUnits {
    MlaUnit of[max_regions][most_units];
    int n[max_regions];

    __device__ void note(const Problem& p, const ExpandSide& side, bool is_k, int group) {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp >= p.n_regions) return;
        const RegionArgs& region = p.regions[warp];
        const GroupTable& table = (is_k ? region.k_groups : region.v_groups)[group];
        const int found = note_units(region.chunks + table.chunks, 4 * side.blocks, 0, of[warp]);
        if (threadIdx.x % 32 == 0) n[warp] = found;
    }
};

// Calls f(bits) as a constant, f16 included.
template <class Use>
__device__ __forceinline__ void with_unit(int kind, Use&& use) {
    if (kind == kind_f16_wide) return use(std::integral_constant<int, 16>{});
    with_bits(static_cast<uint8_t>(kind), use);
}

// B times the latents of a warp's 16 slots. rows: of the lane's slots g and g + 8. The products stand in one place for all kinds of units: for
// each kind they would have registers of their own.
__device__ __forceinline__ void multiply_latents(float (&acc)[64], const uint8_t* const (&rows)[2],
                                                 const MlaUnit* units, int n_units, const Operand& factor, int lane) {
    uint32_t words[2][4];
    uint32_t affine[2] = {};
    int kind = kind_none;
    int segment_end = 0;
    const auto load = [&](int u) __attribute__((always_inline)) {
        const MlaUnit unit = units[u];
        kind = unit.kind;
        const bool begins = u == segment_end;
        segment_end = unit.end;
        with_unit(kind, [&](auto bits) __attribute__((always_inline)) {
            constexpr int Bits = decltype(bits)::value;
            const KeyReader<Bits> reader(lane);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t loaded[KeyReader<Bits>::n_words];
                reader.load(rows[i] + unit.codes, loaded);
#pragma unroll
                for (int k = 0; k < KeyReader<Bits>::n_words; k++) words[i][k] = loaded[k];
                if constexpr (Bits < 16) {
                    if (begins) affine[i] = UnitAffine<Bits>(unit).of(rows[i]);
                }
            }
        });
    };
    if (n_units > 0) load(0);
#pragma unroll 1
    for (int u = 0; u < n_units; u++) {
        // before the unit is decoded: the compiler takes the registers of the last one's operand for something else as soon as its products have
        // begun. Meanwhile the other warpgroups decode.
        warpgroup_wait_all();
        uint32_t pairs[2][4];
        with_unit(kind, [&](auto bits) __attribute__((always_inline)) {
            constexpr int Bits = decltype(bits)::value;
            const KeyReader<Bits> reader(lane);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t loaded[KeyReader<Bits>::n_words];
#pragma unroll
                for (int k = 0; k < KeyReader<Bits>::n_words; k++) loaded[k] = words[i][k];
                reader.decode(loaded, affine[i], pairs[i]);
            }
        });
        if (u + 1 < n_units) load(u + 1);
        UnitPair a;
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[k][i] = pairs[i % 2][2 * k + i / 2];
        }
        warpgroup_begin();
#pragma unroll
        for (int k = 0; k < 2; k++) {
            warpgroup_mma(acc, a[k], factor.at(static_cast<uint32_t>(512 * u + 256 * k)), u + k > 0);
        }
        warpgroup_commit();
    }
    warpgroup_wait(acc);
}

// A warp's 16 slots of one region: those of lanes 4g … 4g + 3 are g and g + 8.
struct LatentTile {
    const uint8_t* first;  // of the group, in slot 0
    int64_t page;
    int row_bytes;
    int r, slot, last;

    __device__ LatentTile(const Problem& p, const Parts& parts, bool is_k, int group, int t, int warp)
        : r(parts.region_of(t)) {
        const RegionArgs& region = p.regions[r];
        first = (is_k ? region.k_rows : region.v_rows) + (is_k ? region.k_groups : region.v_groups)[group].first;
        page = is_k ? region.k_page : region.v_page;
        row_bytes = static_cast<int>(is_k ? region.k_row_bytes : region.v_row_bytes);
        slot = (t - parts.tiles_before(r)) * expand_tile + resident_slots * (warp % 4);
        last = p.n_slots[r] - 1;
    }
    __device__ int slot_of(int s) const { return min(slot + s, last); }
    __device__ const uint8_t* row(int s) const { return first + row_offset(slot_of(s), page, row_bytes); }
};

// Bias and norm of keys, before RoPE. acc: of slots g and g + 8 as mma has them
__device__ __forceinline__ void finish_heads(const Problem& p, const ExpandSide& side, float (&acc)[64], int head0,
                                             int lane) {
    if (side.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (column >= side.heads * p.head_dim) continue;
            const float bias = side.bias[head0 * p.head_dim + column];
            acc[i / 2 * 4 + i % 2] += bias;
            acc[i / 2 * 4 + 2 + i % 2] += bias;
        }
    }
    if (side.norm == nullptr) return;
    float power[2][2] = {};  // of both slots, of the first and the last 64 dimensions
#pragma unroll
    for (int i = 0; i < 64; i++) power[i / 2 % 2][i / 32] += acc[i] * acc[i];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (p.head_dim == 128) power[i][0] = power[i][1] = power[i][0] + power[i][1];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            for (const int o : {1, 2}) power[i][half] += __shfl_xor_sync(0xffffffffu, power[i][half], o);
            power[i][half] = rsqrtf(power[i][half] / static_cast<float>(p.head_dim) + p.k_norm_eps);
        }
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        acc[i] *= power[i / 2 % 2][i / 32] * side.norm[column & (p.head_dim - 1)];
    }
}

// RoPE. eight: cosine and sine of eight positions in every plane. Slots g and g + 8 are so far apart as a rule, and half of the sines, which
// four lanes a cycle get, are products.
__device__ __forceinline__ void turn_slots(const Problem& p, float (&acc)[64], const LatentTile& tile,
                                           const float2* eight, int lane) {
    const int32_t* const positions = p.regions[tile.r].pos;
    const int g = lane / 4;
    const int pos[2] = {positions[tile.slot_of(g)], positions[tile.slot_of(g + 8)]};
    const bool apart = __all_sync(0xffffffffu, pos[1] == pos[0] + 8 || tile.slot + g + 8 > tile.last);
    turn_keys(p, acc, lane, [&](int plane, float2(&of)[2]) __attribute__((always_inline)) {
        const uint64_t phase = p.phases[plane];
        of[0] = angle_of(phase, pos[0]);
        if (apart) {
            const float2 by = eight[plane];
            of[1] = make_float2(of[0].x * by.x - of[0].y * by.y, of[0].x * by.y + of[0].y * by.x);
        } else {
            of[1] = angle_of(phase, pos[1]);
        }
    });
}

}  // namespace lkv::cuda
