// What a thread block knows: its regions, query rows and tiles, in shared memory.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/mla/codes.cuh"
#include "ops/cuda/kernels/mla/tiles.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Where the shares of K's units begin that warps side by side over the same slots take, and where the last one ends: of 2, 4 and 8 shares.
constexpr int n_share_bounds = 3 + 5 + 9;
__device__ inline int share_bounds(int shares_bits) { return (1 << shares_bits) + shares_bits - 3; }

// One side of one region, in shared memory.
struct MlaSide {
    const uint8_t* rows;  // slot 0, from the group's first byte
    int64_t page;         // bytes from a page of slots to the next one
    uint32_t row_bytes;
    uint32_t bytes;  // of the group
    uint32_t lead;   // of the group's first byte behind a multiple of 16
    int32_t pitch;   // of a staged tile; 0: rows are read where they lie
    int32_t n_units;
    int32_t scales;  // byte of a row's group, from `rows`, where its four scales lie; -1: segments have their own
    int32_t first;   // slot of the region, or of made keys, that is number 0 here
    uint8_t bounds[n_share_bounds];

    __device__ const uint8_t* row(int slot) const { return rows + row_offset(first + slot, page, row_bytes); }
};

struct MlaRegion {
    MlaSide k, v;
    const int32_t* pos;
    const uint64_t* seq;
    int32_t n_slots;
    int32_t most_steps;  // of a tile
    int32_t first_step;
    int32_t end_step;
    int32_t key_row;  // of slot 0, in a chunk of keys

    // Steps from this one on that lie in one page.
    __device__ int steps_in_page(int step) const {
        constexpr int page_steps = page_slots / step_slots;
        return page_steps - ((v.first / step_slots + step) & (page_steps - 1));
    }
};

struct MlaRow {
    uint64_t seq;  // bit; 0: no query
    int32_t pos;
    int32_t at;  // of [n_tokens, n_head]
    float slope;
    int32_t head;  // KV head, of the item's
};

// Positions and sequences of a tile's slots.
struct MlaMarks {
    uint64_t seq[most_tile];
    int32_t pos[most_tile];
};

struct MlaShared {
    MlaRegion regions[max_regions];
    MlaRow rows[32];
    MlaMarks marks[2];
    float scales[2][32];                 // of sums before a tile
    float before[32];                    // what a row's mean counts for that the chunks before left
    uint32_t tokens[2][most_tile / 32];  // bit s of a word: a slot that holds a token
};

// A tile of one region: 32, 64 or 128 slots, of which the last may be none of this part.
struct MlaTile {
    const MlaRegion* region;
    int r;
    int first;  // slot
    int slots;
    int valid;  // slots in use
    int next;   // step behind it

    // step: its first one; end: of the part
    __device__ MlaTile(const MlaShared& own, const MlaSteps& steps, int step, int end) : r(steps.region_of(step)) {
        region = &own.regions[r];
        const int most = min(region->most_steps, region->steps_in_page(step - region->first_step));
        next = min(min(end, region->end_step), step + most);
        first = (step - region->first_step) * step_slots;
        slots = next - step > 2 ? 128 : (next - step) * step_slots;
        valid = min((next - step) * step_slots, region->n_slots - first);
    }
    // i: of a token's own steps; those that lie one behind the other are one tile
    __device__ MlaTile(const MlaShared& own, const int32_t* steps, int i, int end) : r(0) {
        region = &own.regions[0];
        int at[most_tile / step_slots];
#pragma unroll
        for (int k = 0; k < most_tile / step_slots; k++) at[k] = i + k < end ? __ldg(steps + i + k) : -1;
        const int most = min(region->most_steps, region->steps_in_page(slot_of_step(at[0]) / step_slots));
        int n = 1;
        bool on = true;
#pragma unroll
        for (int k = 1; k < most_tile / step_slots; k++) {
            on = on && k < most && at[k] == at[0] + k;
            n += on ? 1 : 0;
        }
        next = i + n;
        first = slot_of_step(at[0]);
        slots = n > 2 ? 128 : n * step_slots;
        valid = min(n * step_slots, region->n_slots - first);
    }
};

// The tile that begins with step i of a thread block's share.
template <bool Apart>
__device__ inline MlaTile tile_of(const MlaShared& own, const MlaSteps& all, const MlaShare<Apart>& share, int i) {
    if constexpr (Apart) return MlaTile(own, share.steps, i, share.end);
    return MlaTile(own, all, i, share.end);
}

// About as many instructions as a unit of K takes, and a run of units that have one scale.
__device__ inline int cost_of(const MlaUnit& unit, bool begins) {
    const int run = begins ? 60 : 0;
    switch (static_cast<Format>(unit.kind)) {
        case Format::n8:
            return 54 + run;
        case Format::n6:
        case Format::n4:
            return 46 + run;
        case Format::n3:
            return 60 + run;
        case Format::n2:
        case Format::n1:
            return 38 + run;
        default:
            return 80;
    }
}

// Shares that take about as long. By one warp.
__device__ inline void share_out(const MlaUnit* units, int n_units, uint8_t (&bounds)[n_share_bounds]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const MlaUnit unit = units[lane];
    const int cost = lane < n_units ? cost_of(unit, lane == 0 || units[lane - 1].kind != unit.kind) : 0;
    const int until = warp_prefix(cost, lane);
    const int all = __shfl_sync(0xffffffffu, until, 31);
    const int middle = lane < n_units ? 2 * until - cost : 4 * all;  // doubled
#pragma unroll
    for (int shares_bits = 1; shares_bits <= 3; shares_bits++) {
#pragma unroll
        for (int s = 0; s <= 1 << shares_bits; s++) {
            const uint32_t before = __ballot_sync(0xffffffffu, middle << shares_bits < 2 * all * s);
            if (lane == 0) bounds[share_bounds(shares_bits) + s] = static_cast<uint8_t>(__popc(before));
        }
    }
}

// What a thread block knows before an earlier kernel of the step has ended. token: whose rows it has, -1: all tokens'
__device__ inline void set_up(const MlaArgs& p, const MlaSteps& steps, const MlaSlots& n_slots, int token,
                              MlaShared& own, MlaUnit* units) {
    const WorkItem item(p, static_cast<int>(blockIdx.x));
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread - (mla_threads - 32);
    if (row >= 0 && row < p.mla.rows) {
        const int of_block = static_cast<int>(blockIdx.y) * p.mla.rows + row;
        const bool exists = of_block < (token < 0 ? item.n_rows : item.unit_heads);
        const int of_item = max(token, 0) * item.unit_heads + of_block;
        const int at = exists ? item.few_row_at(p, of_item) : 0;
        const int of = small_quotient(at, p.n_head);
        own.rows[row] = {exists ? 1ull << p.q_seq[of] : 0, exists ? p.q_pos[of] : -1, exists ? at : -1,
                         exists && p.alibi_slopes != nullptr ? p.alibi_slopes[at - of * p.n_head] * log2_e : 0.0f,
                         exists ? item.few_head(of_item) : -1};
    }
    const int warp = thread / 32;
    if (warp >= 2 * p.n_regions) return;
    const int r = warp / 2;
    const bool is_k = warp % 2 == 0;
    const RegionArgs& region = p.regions[r];
    const GroupTable group = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
    // values in a key's row are units of that row
    const bool values = p.mla.keys.as == MlaK::values;
    const GroupTable staged = values ? region.k_groups[item.k_group] : group;
    const int n = note_units(region.chunks + group.chunks, 4 * (is_k ? p.k_blocks : p.v_blocks),
                             group.first - staged.first, units + warp * most_units);
    MlaRegion& to = own.regions[r];
    if (is_k) {
        __syncwarp();
        share_out(units + warp * most_units, n, to.k.bounds);
    }
    if (thread % 32 != 0) return;
    MlaSide& side = is_k ? to.k : to.v;
    side.rows = (is_k ? region.k_rows : region.v_rows) + staged.first;
    side.row_bytes = is_k ? region.k_row_bytes : region.v_row_bytes;
    side.page = is_k ? region.k_page : region.v_page;
    side.bytes = staged.bytes;
    side.lead = staged.first % 16;
    side.n_units = n;
    side.pitch = !values && n > 0 && units[warp * most_units].kind == kind_f16_wide
                     ? 0
                     : mla_pitch(staged.bytes, staged.first, side.row_bytes);
    const MlaUnit unit = units[warp * most_units];
    side.scales = format_scaled_by_group(static_cast<Format>(unit.kind)) ? unit.affine & ~3 : -1;
    const auto of_region = [&](const int32_t (&x)[max_regions]) { return r == 0 ? x[0] : (r == 1 ? x[1] : x[2]); };
    const int first = of_region(n_slots.first);
    side.first = 0;
    if (is_k && p.mla.keys.as == MlaK::scores) {
        side.pitch = 0;
    } else if (is_k && p.mla.keys.as == MlaK::rows) {
        side.row_bytes = static_cast<uint32_t>(p.n_kv * p.head_dim * 2);
        side.page = bytes_of_page(side.row_bytes);
        side.rows = p.mla.keys.rows + item.head_kv * p.head_dim * 2;
        side.first = of_region(n_slots.key_row);
        side.pitch = 0;
    } else {
        side.first = first;
        side.lead = (side.lead + static_cast<uint32_t>(first) * side.row_bytes) % 16;
    }
    if (!is_k) return;
    to.pos = region.pos + first;
    to.seq = region.seq + first;
    to.n_slots = of_region(n_slots.of);
    to.key_row = of_region(n_slots.key_row);
    to.most_steps = (p.mla.small_tiles >> r & 1) != 0 ? 1 : p.mla.tile / step_slots;
    to.first_step = steps.steps_before(r);
    to.end_step = r == 0 ? steps.before_1 : (r == 1 ? steps.before_2 : steps.all);
}

// Tiles of rows, of their positions and sequences, into shared memory.

// Row s of a staged tile begins at lead(tile) + s · pitch, which is where it begins in memory, modulo 16.
__device__ inline uint32_t staged_lead(const MlaSide& side, const MlaTile& tile) {
    return (side.lead + static_cast<uint32_t>(tile.first) * side.row_bytes) % 16;
}

constexpr int copy_threads = 8;  // of a row; a copy of a warp that lies in eight rows takes longer than one in four

// The first warps have V's widest codes, for which the others wait: what is to be done for a tile besides is theirs.
constexpr int spared_threads = 32 * 4;
constexpr int spare_threads = mla_threads - spared_threads;

__device__ inline void copy_rows(uint8_t* stage, const MlaSide& side, const MlaTile& tile) {
    const int pitch = side.pitch;
    const int thread = static_cast<int>(threadIdx.x) - spared_threads;
    if (pitch == 0 || thread < 0) return;
    const auto row_bytes = static_cast<int>(side.row_bytes);
    const auto lead = static_cast<int>(staged_lead(side, tile));
    const uint8_t* from = side.row(tile.first) - lead;
    if (pitch == row_bytes) {  // as in memory
        const int end = lead + tile.valid * row_bytes;
        for (int at = 16 * thread; at < end; at += 16 * spare_threads) copy_async<16>(stage + at, from + at);
        return;
    }
    // Rows are as far from a multiple of 16 in the tile as in memory, and rows_at_once of them a multiple of 16 apart.
    constexpr int rows_at_once = spare_threads / copy_threads;
    constexpr int step = 16 * copy_threads;
    constexpr int usual_row = 2 * step;
    const int row = thread / copy_threads;
    const int begin = lead + row * row_bytes;
    const int first = (begin & ~15) + thread % copy_threads * 16;
    const int left = begin + static_cast<int>(side.bytes) - first;
    uint8_t* to = stage + first + row * (pitch - row_bytes);
    from += first;
#pragma unroll
    for (int k = 0; k < most_tile; k += rows_at_once) {
        if (row + k >= tile.valid) break;
#pragma unroll
        for (int at = 0; at < usual_row; at += step) {
            if (at < left) copy_async<16>(to + at, from + at);
        }
#pragma unroll 1
        for (int at = usual_row; at < left; at += step) copy_async<16>(to + at, from + at);
        to += rows_at_once * pitch;
        from += rows_at_once * row_bytes;
    }
}

// The scales of V's slots, of two tiles by turns.
struct MlaScales {
    uint32_t* stored;  // [tile]
    __half* of;        // [n_scaled_formats][tile] times code_unit; 0 of slots without a token
    int tile;

    // first: where MlaLayout has them
    __device__ MlaScales(uint8_t* first, int slots, int parity)
        : stored(reinterpret_cast<uint32_t*>(first) + parity * slots),
          of(reinterpret_cast<__half*>(first + 8 * slots) + parity * n_scaled_formats * slots),
          tile(slots) {}
    template <int Bits>
    __device__ __half* of_format() const {
        return of + scaled_format<Bits> * tile;
    }
};

__device__ inline void copy_marks(MlaMarks& marks, const MlaScales& scales, const MlaTile& tile) {
    const int s = static_cast<int>(threadIdx.x) - (mla_threads - most_tile);
    if (s < 0 || s >= tile.valid) return;
    copy_async<4>(&marks.pos[s], tile.region->pos + tile.first + s);
    copy_async<8>(&marks.seq[s], tile.region->seq + tile.first + s);
    const MlaSide& v = tile.region->v;
    if (v.scales < 0) return;
    copy_async<4>(&scales.stored[s], v.row(tile.first + s) + v.scales);
}

// Scales of V's slots as weights are multiplied with them: one format, or two, by every thread.
template <int Bits>
__device__ inline void keep_scale(const MlaScales& to, int slot, uint32_t scales) {
    constexpr int at = NormalFormat<Bits>::scale_at;
    const __half2 scale = half2_of(half_of_scale(static_cast<uint8_t>(scales >> (8 * at))));
    const __half2 of = __hmin2(__hmul2(scale, __float2half2_rn(code_unit<Bits>)), __float2half2_rn(most_scale));
    to.of_format<Bits>()[slot] = __ushort_as_half(static_cast<uint16_t>(bits(of)));
}
__device__ inline void keep_scales(const MlaScales& scales, const MlaMarks& marks, const MlaTile& tile) {
    const int slot = static_cast<int>(threadIdx.x) % most_tile;
    if (static_cast<int>(threadIdx.x) < spared_threads || tile.region->v.scales < 0 || slot >= tile.slots) return;
    const bool holds = slot < tile.valid && marks.seq[slot] != 0;
    const uint32_t stored = holds ? scales.stored[slot] : 0;
    static_assert(mla_threads == 4 * most_tile && spared_threads == most_tile);
    switch (static_cast<int>(threadIdx.x) / most_tile) {
        case 1:
            keep_scale<1>(scales, slot, stored);
            keep_scale<2>(scales, slot, stored);
            break;
        case 2:
            keep_scale<3>(scales, slot, stored);
            keep_scale<4>(scales, slot, stored);
            break;
        default:
            keep_scale<6>(scales, slot, stored);
            keep_scale<8>(scales, slot, stored);
    }
}

}  // namespace lkv::cuda
