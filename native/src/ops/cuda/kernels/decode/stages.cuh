// The stages of the decode kernel, one warp's: copies, scores, softmax, sums. All is inlined. Arrays, which lie in registers once loops are
// unrolled, are no members of what has single values: the compiler would keep these in memory until then, and unroll less.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/decode/blocks.cuh"
#include "ops/cuda/kernels/decode/layout.h"
#include "ops/cuda/kernels/decode/rebuild.cuh"
#include "ops/cuda/kernels/decode/stock_rows.cuh"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/softmax/hadamard.cuh"
#include "ops/cuda/softmax/own_steps.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Where scores come from: the rows as stored, keys rebuilt by each warp, or blocks of tokens (blocks.cuh).
enum class KPath { stored, rebuilt, blocks };

// Threads of a thread block; 0: as many as the plan chose.
template <int threads>
__device__ inline int block_threads() {
    return threads != 0 ? threads : static_cast<int>(blockDim.x);
}

// The item's descriptors by the first `threads` threads: K with 4·KB chunks, V with 4·VB, GroupTables [n_regions][K, V].
template <int KB, int VB>
__device__ inline void load_tables(const Problem& p, const WorkItem& item, int threads, GroupTable* groups,
                                   Chunk* chunks) {
    constexpr int per_region = 4 * (KB + VB);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n_regions * per_region; i += threads) {
        const int r = i / per_region;
        const int j = i - r * per_region;
        const bool of_k = j < 4 * KB;
        const int at = of_k ? j : j - 4 * KB;
        const Chunk chunk = at < 4 * (of_k ? p.k_blocks : p.v_blocks) ? chunks_of(p, item, r, of_k)[at] : Chunk{};
        if (i < 2 * p.n_regions) {  // both are on their way together
            const bool is_k = i % 2 == 0;
            const RegionArgs& region = p.regions[i / 2];
            GroupTable group = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
            // blocks of the kernel that the group does not have are no chunks of its kind
            if ((is_k ? p.k_blocks : p.v_blocks) != (is_k ? KB : VB)) group.kind = any_kind;
            groups[i] = group;
        }
        chunks[i] = chunk;
    }
}

// What a thread block's warps share. groups: [n_regions][K, V]; queries: [KB][4][32]
struct DecodeShared {
    uint8_t* memory;
    GroupTable* groups;
    Chunk* chunks;
    uint2* queries;
    const int32_t* rows_at;  // of a query row: which of [n_tokens, n_head] it is
    const int32_t* n_slots;
    Sight* sight;  // of all query rows
};

// What a thread block has of the slots: tiles begin … end - 1 of all, or of a token's own steps.
template <int MT, bool Apart>
struct DecodeShare {
    int part = -1;  // -1: there is nothing to do
    int begin = 0, end = 0;
    int token = -1;
    const int32_t* steps = nullptr;  // a token's own

    __device__ DecodeShare(const CutProblem& p, const Parts& parts) {
        const int index = static_cast<int>(blockIdx.y);
        if constexpr (Apart) {
            constexpr int tiles = step_slots / (16 * MT);  // of a step
            const ApartShare own(p, index);
            part = own.part;
            token = own.token;
            begin = own.begin * tiles;
            end = own.end * tiles;
            steps = own.steps;
        } else if (index < parts.count) {
            part = index;
            begin = parts.begin(index);
            end = parts.begin(index + 1);
        }
    }
};

template <int VB>
struct DecodeSums {
    float top[2] = {-INFINITY, -INFINITY};
    float weights[2] = {0.0f, 0.0f};
    float of[VB][4][4] = {};
};

// KB, VB: 64-channel blocks of a K and a V group. MT: 16-slot steps of a warp's tile. Kind: as in with_chunk. Apart: Cut::apart.
template <int KB, int VB, int MT, int Kind, KPath Path, bool Apart>
struct DecodeWarp {
    static constexpr bool rebuilds = Path == KPath::rebuilt;
    static constexpr bool in_blocks = Path == KPath::blocks;
    static constexpr int fixed_threads = (rebuilds && KB == 1) || in_blocks || Apart ? 0 : n_threads;
    static constexpr int tile = 16 * MT;
    static constexpr bool stock = is_stock_kind(Kind);
    static constexpr bool judges = in_blocks || stock;  // f16 rows wait for memory, not for masks
    static_assert(!in_blocks || tile == token_block_slots);
    static constexpr bool k_in_place = decode_reads_k_in_place(rebuilds, KB, Kind);
    static constexpr int chunks_per_region = 4 * (KB + VB);

    const DecodeArgs& p;
    const Parts& parts;
    const WorkItem& item;
    const DecodeShared& shared;
    uint8_t* const stages;  // [stages] rows of K, of V; direct: sequences, positions
    WarpRebuild& keys;
    const DecodeShare<MT, Apart>& share;
    const int tile_begin = share.begin;
    const int tile_end = share.end;
    const int threads = block_threads<fixed_threads>();
    const int warps = threads / 32;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int stage_bytes = tile * (p.k_pitch + p.v_pitch + (rebuilds ? 0 : 12));
    uint8_t* const marks = rebuilds ? stages + p.stages * stage_bytes : stages + tile * (p.k_pitch + p.v_pitch);
    const int marks_bytes = rebuilds ? tile * 12 : stage_bytes;

    int run_bits = 0;
    int issue_stage = 0;
    int issue_marks = 0;
    int issued_step = 0;  // which one the tile that is issued next is in
    int staged_step = 0;  // the same of the tile in the stage that has the lane's number

    // A tile's place: region, first slot, slots in use.
    struct Place {
        int r, first, n;
    };
    // step: which one a token's own tile is in
    __device__ __forceinline__ Place place_of(int t, int step) const {
        if constexpr (Apart) {
            const int r = region_of_step(step, p.n_regions);
            const int first = slot_of_step(step) + (t * tile & (step_slots - 1));
            return {r, first, min(tile, shared.n_slots[r] - first)};
        }
        const int r = parts.region_of(t);
        const int first = (t - parts.tiles_before(r)) * tile;
        return {r, first, min(tile, shared.n_slots[r] - first)};
    }

    // Neighbouring tiles that a warp takes at once: as many as one turn of the queries serves, if that leaves no warp without.
    __device__ __forceinline__ void choose_run() {
        if constexpr (rebuilds) {
            while (tile << run_bits < angle_span && warps << (run_bits + 1) <= tile_end - tile_begin) run_bits++;
        }
    }
    __device__ __forceinline__ int tile_at(int i) const {
        return tile_begin + (((i >> run_bits) * warps + warp) << run_bits) + (i & ((1 << run_bits) - 1));
    }

    __device__ __forceinline__ void copy_side(int side, const Place& of, int at) const {
        uint8_t* const to = stages + at * stage_bytes + (side == 0 ? 0 : tile * p.k_pitch);
        const int pitch = side == 0 ? p.k_pitch : p.v_pitch;
        const RegionArgs& region = p.regions[of.r];
        const uint8_t* const rows = side == 0 ? region.k_row(of.first) : region.v_row(of.first);
        const uint32_t row_bytes = side == 0 ? region.k_row_bytes : region.v_row_bytes;
        const GroupTable& group = shared.groups[2 * of.r + side];
        if (in_blocks && group.kind == kind_f16_wide) {  // read where it lies, later
            const uint8_t* const row = rows + static_cast<int64_t>(lane) * row_bytes + group.first;
#pragma unroll
            for (int i = 0; i < KB; i++) {
                if (lane < of.n) prefetch(row + 128 * i);
            }
            return;
        }
        const int n = in_blocks && side == 0 ? tile : of.n;  // all rows of a block hold some of its numbers
        copy_rows<32, rebuilds ? 2 : 1>(lane, to, pitch, rows, row_bytes, group, n);
    }
    // Both sides where they lie alike: half the instructions, which are a third of all with small rows.
    __device__ __forceinline__ void copy_both(const Place& of, int at) const {
        const RegionArgs& region = p.regions[of.r];
        const GroupTable& group = shared.groups[2 * of.r];
        const int across = static_cast<int>(group.bytes) / 16;
        const int down = small_quotient(32, across);
        const int row = small_quotient(lane, across);
        const int byte = 16 * (lane - row * across);
        uint8_t* to = stages + at * stage_bytes + row * p.k_pitch + byte;
        const uint8_t* const keys = region.k_row(of.first);
        const uint8_t* from = keys + static_cast<int64_t>(row) * region.k_row_bytes + group.first + byte;
        const ptrdiff_t to_values = region.v_row(of.first) - keys;
        const uint32_t step = static_cast<uint32_t>(down) * region.k_row_bytes;
#pragma unroll 1
        for (int s = row < down ? row : tile; s < of.n; s += down, to += down * p.k_pitch, from += step) {
            copy_async<16>(to, from);
            copy_async<16>(to + tile * p.k_pitch, from + to_values);
        }
    }
    __device__ __forceinline__ void copy_marks(const Place& of, uint8_t* to) const {
        auto* const seq = reinterpret_cast<uint64_t*>(to);
        auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
        if (lane < tile) {
            copy_mark(seq, pos, p.regions[of.r].seq + of.first, p.regions[of.r].pos + of.first, lane, of.n);
        }
    }
    __device__ __forceinline__ int step_of(int t) const {
        return Apart && t < tile_end ? __ldg(share.steps + t * tile / step_slots) : 0;
    }
    // Direct: all of tile i. Rebuild: K and the marks of tile i and V of the one before, whose buffers are free when K of tile
    // i - stages has been read; the scores take long enough for V to arrive.
    __device__ __forceinline__ void issue(int i) {
        if constexpr (!rebuilds) {
            const int t = tile_at(i);
            if (t < tile_end) {
                const Place of = place_of(t, issued_step);
                if (lane == issue_stage) staged_step = issued_step;
                issued_step = step_of(tile_at(i + 1));
                copy_marks(of, marks + issue_stage * marks_bytes);
                if (p.alike != 0) {
                    copy_both(of, issue_stage);
                } else {
                    copy_side(0, of, issue_stage);
                    copy_side(1, of, issue_stage);
                }
            }
        } else {
#pragma unroll 1
            for (int side = 0; side < 2; side++) {
                const int t = tile_at(i - side);
                if (i < side) continue;
                if (t >= tile_end) continue;
                const Place of = place_of(t, 0);
                if (side == 0) copy_marks(of, marks + issue_marks * marks_bytes);
                if (k_in_place && side == 0) continue;
                // V's stage is the one before K's
                const int at = side == 0 ? issue_stage : (issue_stage == 0 ? p.stages : issue_stage) - 1;
                copy_side(side, of, at);
            }
            issue_marks = issue_marks == p.stages ? 0 : issue_marks + 1;
        }
        issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
        copies_commit();
    }

    using Rows = QueryRow[2];                // 2c and 2c + 1
    using Queries = uint32_t[KB][4][2];      // operand b
    using Zeros = float[KB][2][2];           // of stock rows, see StockRows::key_zeros
    using Latents = uint32_t[KB][MT][4][4];  // operand a

    __device__ __forceinline__ const float* query_row(int row) const {
        return row < item.n_rows ? p.q + static_cast<int64_t>(shared.rows_at[row]) * p.q_width : nullptr;
    }
    // Operand b of step s of block b, for chunk c of a query row.
    __device__ __forceinline__ uint2 query_words(const float* row, int b, int c, int s) const {
        if constexpr (stock) {
            const auto value = [&](int y) {
                const int channel = 64 * b + StockRows<Kind>::key_channel(s, c, y);
                return row != nullptr && channel < p.q_width ? row[channel] * StockRows<Kind>::query_unit(s) : 0.0f;
            };
            return make_uint2(bits(__floats2half2_rn(value(0), value(2))), bits(__floats2half2_rn(value(1), value(3))));
        }
        const int channel = 64 * b + 16 * c;
        return make_uint2(query_pair(row, p.q_width, channel + pair_channel(s)),
                          query_pair(row, p.q_width, channel + pair_channel(s + 4)));
    }
    // By all threads of the thread block; then direct queries to registers.
    __device__ __forceinline__ void fill_queries(Queries& q, Zeros& zeros) const {
        if constexpr (rebuilds) {
            keys.fill_queries(p, threadIdx.x, threads, [&](int row) { return query_row(row); });
            copies_wait(p.stages);
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < decode_rows * KB * 16; i += threads) {
                const int row = i / (KB * 16);
                const int at = i % (KB * 16);  // (block, chunk, step)
                const int s = at % 4;
                shared.queries[(at / 16 * 4 + s) * 32 + row * 4 + at / 4 % 4] =
                    query_words(query_row(row), at / 16, at / 4 % 4, s);
            }
        }
        __syncthreads();
        if constexpr (!rebuilds &&
                      !in_blocks) {  // those leave no room for queries beside sums: they load them for every tile
            load_queries(q);
#pragma unroll
            for (int b = 0; b < KB; b++) {
                if constexpr (stock) StockRows<Kind>::key_zeros(q[b], zeros[b]);
            }
        }
    }
    __device__ __forceinline__ void load_queries(Queries& q) const {
#pragma unroll
        for (int b = 0; b < KB; b++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint2 of = shared.queries[(b * 4 + i) * 32 + lane];
                q[b][i][0] = of.x;
                q[b][i][1] = of.y;
            }
        }
    }

    __device__ __forceinline__ void see_rows(Rows& of) const {
#pragma unroll
        for (int i = 0; i < 2; i++) of[i] = load_query_row(p, 2 * c + i < item.n_rows ? shared.rows_at[2 * c + i] : -1);
    }

    // K of a tile, times the queries; or the latents that keys are rebuilt from.
    __device__ __forceinline__ void read_keys(const Place& of, const uint8_t* k_rows, const Chunk* k_chunks,
                                              const Queries& q, const Zeros& zeros, float (&s)[MT][4],
                                              Latents& latents) const {
        if constexpr (stock) {
#pragma unroll
            for (int b = 0; b < KB; b++) {
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const uint8_t* const row = k_rows + (16 * m + g) * p.k_pitch + k_chunks[4 * b].affine;
                    StockRows<Kind>::score(row, row + 8 * p.k_pitch, c, q[b], zeros[b], s[m]);
                }
            }
        } else {
            read_chunks(of, k_rows, k_chunks, q, s, latents);
        }
    }
    __device__ __forceinline__ void read_chunks(const Place& of, const uint8_t* k_rows, const Chunk* k_chunks,
                                                const Queries& q, float (&s)[MT][4], Latents& latents) const {
        const auto k_row = [&](int slot) -> const uint8_t* {
            if constexpr (!k_in_place) return k_rows + slot * p.k_pitch;
            // past the last slot any row will do
            const int at = of.first + min(slot, of.n - 1);
            const RegionArgs& region = p.regions[of.r];
            return region.k_row(at) + shared.groups[2 * of.r].first;
        };
        with_group_kind<Kind>(shared.groups[2 * of.r].kind, [&](auto kind) __attribute__((always_inline)) {
            read_rows<decltype(kind)::value, KB, MT>(
                k_row, k_chunks, lane, [&](int b, int m, int j, const uint32_t (&a)[4]) __attribute__((always_inline)) {
                    if constexpr (rebuilds) {
#pragma unroll
                        for (int e = 0; e < 4; e++) latents[b][m][j][e] = a[e];
                    } else {
                        mma(s[m], a, q[b][j][0], q[b][j][1]);
                    }
                });
        });
    }

    // The group's bytes of slot s of a tile of full rows, where they lie. Those of a slot without a token may be anything: another's serve.
    __device__ __forceinline__ const uint8_t* row_in_cache(int side, const Place& of, uint32_t used, int s) const {
        const RegionArgs& region = p.regions[of.r];
        const int at = of.first + ((used >> s & 1) != 0 ? s : __ffs(static_cast<int>(used)) - 1);
        return (side == 0 ? region.k_row(at) : region.v_row(at)) + shared.groups[2 * of.r + side].first;
    }
    // Scores of a tile by its kind. used: a bit a slot that holds a token, of which there are some
    __device__ __forceinline__ void score_tile(const Place& of, uint32_t used, const uint8_t* k_rows,
                                               const Chunk* k_chunks, float (&s)[MT][4]) const {
        Queries q;
        load_queries(q);
        switch (static_cast<Format>(shared.groups[2 * of.r].kind)) {
            case Format::c4:
                return score_block<4>(k_rows, p.k_pitch, k_chunks, q, lane, s);
            case Format::c3:
                return score_block<3>(k_rows, p.k_pitch, k_chunks, q, lane, s);
            case Format::c2:
                return score_block<2>(k_rows, p.k_pitch, k_chunks, q, lane, s);
            default:
                return read_rows<kind_f16_wide, KB, MT>(
                    [&](int slot) { return row_in_cache(0, of, used, slot); }, k_chunks, lane,
                    [&](int b, int m, int j, const uint32_t (&a)[4])
                        __attribute__((always_inline)) { mma(s[m], a, q[b][j][0], q[b][j][1]); });
        }
    }
    __device__ __forceinline__ void add_tile(const Place& of, uint32_t used, const uint8_t* v_rows,
                                             const Chunk* v_chunks, const uint32_t (&w)[MT][2],
                                             float (&sums)[VB][4][4]) const {
        const int kind = shared.groups[2 * of.r + 1].kind;
        if (kind == kind_f16_wide) {
            const auto row_at = [&](int slot) { return row_in_cache(1, of, used, slot); };
            return add_rows<kind_f16_wide>(row_at, v_chunks, w, lane, sums);
        }
        with_value_kind(kind, [&](auto constant) __attribute__((always_inline)) {
            const auto row_at = [&](int slot) { return v_rows + slot * p.v_pitch; };
            add_rows<decltype(constant)::value>(row_at, v_chunks, w, lane, sums);
        });
    }

    // What the query rows see between them, to shared memory; a barrier follows.
    __device__ __forceinline__ void share_sight(const Rows& rows) const {
        if (!judges || warp != 0) return;
        Sight sight = sees_nothing;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (rows[i].pos < 0) continue;
            sight.first_pos = min(sight.first_pos, rows[i].pos);
            sight.last_pos = max(sight.last_pos, rows[i].pos);
            sight.seq |= rows[i].seq;
        }
#pragma unroll
        for (int o = 1; o < 4; o *= 2) {
            sight.first_pos = min(sight.first_pos, __shfl_xor_sync(0xffffffffu, sight.first_pos, o));
            sight.last_pos = max(sight.last_pos, __shfl_xor_sync(0xffffffffu, sight.last_pos, o));
            sight.seq |= __shfl_xor_sync(0xffffffffu, sight.seq, o);
        }
        if (lane == 0) *shared.sight = sight;
    }
    // Which rows see a tile.
    __device__ __forceinline__ Seen judge_tile(const uint8_t* of_tile, uint32_t& used) const {
        const Sight sight = *shared.sight;
        const auto* const seq = reinterpret_cast<const uint64_t*>(of_tile);
        const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
        uint64_t slots;
        const Seen seen = judge<32>(
            sight, p.window == 0 ? INT_MAX : p.window, lane,
            [&](int s, int& slot_pos) {
                slot_pos = pos[s % tile];
                return seq[s % tile];
            },
            slots);
        used = static_cast<uint32_t>(slots);
        return seen;
    }

    // s[m]: scores of slots 16m + g and 16m + g + 8 for query rows 2c and 2c + 1, masked; then their weights, as operand b of the sums.
    __device__ __forceinline__ void make_weights(Seen seen, const uint64_t* seq, const int32_t* pos, const Rows& rows,
                                                 DecodeSums<VB>& sums, float (&s)[MT][4], uint32_t (&w)[MT][2]) const {
        float tile_max[2] = {-INFINITY, -INFINITY};
        if (seen == Seen::by_all && p.alibi_slopes == nullptr) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[m][e] *= p.scale * log2_e;
                    tile_max[e % 2] = fmaxf(tile_max[e % 2], s[m][e]);
                }
            }
        } else {
            mask(seq, pos, rows, s, tile_max);
        }
        weigh(tile_max, sums, s, w);
    }
    __device__ __forceinline__ void mask(const uint64_t* seq, const int32_t* pos, const Rows& rows, float (&s)[MT][4],
                                         float (&tile_max)[2]) const {
        const float scale = p.scale * log2_e;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int slot = 16 * m + g + 8 * h;
                const uint64_t slot_seq = seq[slot];
                const int slot_pos = pos[slot];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int distance = rows[i].pos - slot_pos;
                    const bool seen =
                        (slot_seq & rows[i].seq) != 0 && distance >= 0 && (p.window == 0 || distance < p.window);
                    float& x = s[m][2 * h + i];
                    x = seen ? x * scale - rows[i].slope * static_cast<float>(distance) : -INFINITY;
                    tile_max[i] = fmaxf(tile_max[i], x);
                }
            }
        }
    }
    __device__ __forceinline__ void weigh(float (&tile_max)[2], DecodeSums<VB>& sums, const float (&s)[MT][4],
                                          uint32_t (&w)[MT][2]) const {
        bool moved = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int o = 4; o < 32; o *= 2)
                tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(0xffffffffu, tile_max[i], o));
            moved = moved || tile_max[i] > sums.top[i] + stale_max;
        }
        if (__any_sync(0xffffffffu, moved)) raise_maxima(sums, tile_max);
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) base[i] = sums.top[i] == -INFINITY ? 0.0f : sums.top[i];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const __half2 weight =
                    __floats2half2_rn(exp2f(s[m][2 * h] - base[0]), exp2f(s[m][2 * h + 1] - base[1]));
                const float2 as_used = __half22float2(weight);  // the weights as the product sees them
                sums.weights[0] += as_used.x;
                sums.weights[1] += as_used.y;
                w[m][h] = transposed(bits(weight));
            }
        }
    }
    __device__ __forceinline__ static void raise_maxima(DecodeSums<VB>& sums, const float (&tile_max)[2]) {
        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float old = sums.top[i];
            sums.top[i] = fmaxf(old, tile_max[i]);
            rescale[i] = sums.top[i] == -INFINITY ? 1.0f : exp2f(old - sums.top[i]);
            sums.weights[i] *= rescale[i];
        }
#pragma unroll
        for (int b = 0; b < VB; b++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) sums.of[b][j][e] *= rescale[e % 2];
            }
        }
    }

    // Free slots hold anything, NaN too: zero bytes decode to finite values in every format.
    __device__ __forceinline__ void clear_holes(const uint64_t* seq, uint8_t* v_rows) const {
        const bool hole = lane < tile && seq[lane % tile] == 0;
        if (!__any_sync(0xffffffffu, hole)) return;
        for (int i = 0; hole && i < p.v_pitch / 16; i++) {
            reinterpret_cast<uint4*>(v_rows + lane * p.v_pitch)[i] = make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void add_values(int r, const uint8_t* v_rows, const Chunk* v_chunks,
                                               const uint32_t (&w)[MT][2], float (&sums)[VB][4][4]) const {
        if constexpr (stock) {
#pragma unroll
            for (int b = 0; b < VB; b++) {
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    StockRows<Kind>::add(v_rows + (16 * m + 2 * c) * p.v_pitch + v_chunks[4 * b].affine, p.v_pitch, g,
                                         w[m], sums[b]);
                }
            }
        } else {
            add_chunks(r, v_rows, v_chunks, w, sums);
        }
    }
    __device__ __forceinline__ void add_chunks(int r, const uint8_t* v_rows, const Chunk* v_chunks,
                                               const uint32_t (&w)[MT][2], float (&sums)[VB][4][4]) const {
        with_group_kind<Kind>(shared.groups[2 * r + 1].kind, [&](auto kind) __attribute__((always_inline)) {
            add_rows<decltype(kind)::value>([&](int slot) { return v_rows + slot * p.v_pitch; }, v_chunks, w, lane,
                                            sums);
        });
    }

    // All tiles of the warp. Steps before the first tile only issue copies: one place in the code for them, which is fetched once.
    __device__ __forceinline__ void walk(const Rows& rows, DecodeSums<VB>& sums) {
        Queries q = {};
        Zeros zeros = {};
        int stage = 0;
        int marks_stage = 0;
        issued_step = step_of(tile_at(0));
#pragma unroll 1
        for (int step = -p.stages; step < 0 || tile_at(step) < tile_end; step++) {
            if (!rebuilds && step != 0) {  // all stages are free at first, later that of the tile before
                __syncwarp();
                issue(step < 0 ? step + p.stages : step + p.stages - 1);
            }
            const int t = tile_at(max(step, 0));
            uint8_t* const k_rows = stages + stage * stage_bytes;
            const Place of = place_of(t, Apart ? __shfl_sync(0xffffffffu, staged_step, stage) : 0);
            const Chunk* const k_chunks = shared.chunks + of.r * chunks_per_region;
            float s[MT][4] = {};
            [[maybe_unused]] Latents latents;
            [[maybe_unused]] uint32_t used = 0;
            Seen seen = Seen::by_some;
            if (step >= 0) {
                copies_wait(p.stages - 1);
                __syncwarp();
                if constexpr (judges) {
                    seen = judge_tile(marks + stage * marks_bytes, used);
                    if (seen == Seen::by_none) {
                        stage = stage + 1 == p.stages ? 0 : stage + 1;
                        continue;
                    }
                }
                if constexpr (in_blocks) {
                    score_tile(of, used, k_rows, k_chunks, s);
                } else {
                    read_keys(of, k_rows, k_chunks, q, zeros, s, latents);
                }
            }
            if constexpr (rebuilds) {
                __syncwarp();
                issue(step + p.stages);
            }
            if (step < 0) {
                if (step < -1) continue;
                fill_queries(q, zeros);  // while the first tile is under way
                continue;
            }
            uint8_t* const v_rows = k_rows + tile * p.k_pitch;
            const auto* const seq =
                reinterpret_cast<const uint64_t*>(marks + (rebuilds ? marks_stage : stage) * marks_bytes);
            const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            if constexpr (rebuilds) {
                marks_stage = marks_stage == p.stages ? 0 : marks_stage + 1;
                keys.template score<KB, MT>(p, latents, seq, pos, s);
            }
            uint32_t w[MT][2];
            make_weights(seen, seq, pos, rows, sums, s, w);
            if constexpr (rebuilds) {
                copies_wait(p.stages - 1);
                __syncwarp();
            }
            if (seen != Seen::by_all) clear_holes(seq, v_rows);
            if constexpr (in_blocks) {
                add_tile(of, used, v_rows, k_chunks + 4 * KB, w, sums.of);
            } else {
                add_values(of.r, v_rows, k_chunks + 4 * KB, w, sums.of);
            }
        }
    }

    __device__ __forceinline__ int channel_of_sum(int i) const {
        if constexpr (stock) return StockRows<Kind>::sum_channel(g, i);
        return sum_channel(g, i);
    }
    // The warps' sums meet where the tiles were, and become the item's part.
    __device__ __forceinline__ void leave(DecodeSums<VB>& own) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int o = 4; o < 32; o *= 2) own.weights[i] += __shfl_xor_sync(0xffffffffu, own.weights[i], o);
        }
        copies_wait(0);
        __syncthreads();
        constexpr int width = 64 * VB;
        auto* const ml = reinterpret_cast<float2*>(shared.memory);       // [warps][decode_rows] maximum, sum
        auto* const all = ml + warps * decode_rows;                      // [decode_rows] of all warps
        auto* const sums = reinterpret_cast<float*>(all + decode_rows);  // [warps][item.n_rows][width + 8]
        constexpr int pitch = width + 8;
        if (g == 0) {
            ml[warp * decode_rows + 2 * c] = make_float2(own.top[0], own.weights[0]);
            ml[warp * decode_rows + 2 * c + 1] = make_float2(own.top[1], own.weights[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = 2 * c + e % 2;
            if (row < item.n_rows) {
                float* const to = sums + (warp * item.n_rows + row) * pitch;
#pragma unroll
                for (int b = 0; b < VB; b++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        to[64 * b + channel_of_sum(2 * j + e / 2)] = own.of[b][j][e];
                    }
                }
            }
        }
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < max(warps * decode_rows, 32)) {
            // as many neighbours as warps hold a row's maxima and sums; of two warps, half of the first one repeats the last row
            const int row = min(static_cast<int>(threadIdx.x) / warps, decode_rows - 1);
            float2& of = ml[threadIdx.x % warps * decode_rows + row];
            float top = of.x;
#pragma unroll 1
            for (int o = 1; o < warps; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
            const float share = of.x == -INFINITY ? 0.0f : exp2f(of.x - top);
            float total = share * of.y;
#pragma unroll 1
            for (int o = 1; o < warps; o *= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
            of.x = share;
            if (threadIdx.x % warps == 0) all[row] = make_float2(top, total);
        }
        __syncthreads();
        // Rolled: instructions of loops that run once come from device memory, where a step's weights have displaced them.
        const bool whole = (Apart ? p.n_split : parts.count) == 1 && p.v_b == nullptr && p.leaves == Leaves::results;
        const int64_t first = static_cast<int64_t>(share.part) * p.n_tokens * p.n_head;
#pragma unroll 1
        for (int i = threadIdx.x; i < item.n_rows * width; i += threads) {
            const int row = i / width;
            const int d = i - row * width;
            const auto sum_of = [&](int d) {
                float sum = 0.0f;
#pragma unroll 8
                for (int w = 0; w < warps; w++)
                    sum += ml[w * decode_rows + row].x * sums[(w * item.n_rows + row) * pitch + d];
                return sum;
            };
            float sum = sum_of(d);
            if (whole && p.v_hadamard != 0) {
                const float other = sum_of(d ^ 32);
                float of[2] = {(d & 32) == 0 ? sum : other, (d & 32) == 0 ? other : sum};
                times_hadamard(of, p.v_hadamard, lane);
                sum = of[(d & 32) / 32];
            }
            const int at = shared.rows_at[row];
            if (whole) {
                const float total = all[row].y;
                if (d < p.head_dim)
                    p.out[static_cast<int64_t>(at) * p.head_dim + d] = total > 0.0f ? sum / total : 0.0f;
                continue;
            }
            if (d == 0) reinterpret_cast<float2*>(p.partial_ml)[first + at] = all[row];
            if (d < 64 * p.v_blocks) p.partial[(first + at) * 64 * p.v_blocks + d] = sum;
        }
    }
};

}  // namespace lkv::cuda
