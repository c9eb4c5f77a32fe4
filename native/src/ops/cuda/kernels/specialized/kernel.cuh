// Attention for up to 8 query rows on a K that is rebuilt from latents of up to 256 channels, by warps with roles (compute
// capability 9.0's own code, sm_90a):
//
//   4 warps make    K's latents as stored -> f16 in shared memory           make_latents.cuh
//           note    positions, sequences, queries turned to a tile          note_tiles.cuh
//   2 x 4 score     latents · B, RoPE, times the queries, softmax weights   score_keys.cuh
//   4 warps sum     V's latents in registers, times the weights             sum_values.cuh
//
// Roles are tiles of 64 slots apart and tell each other by barriers in shared memory; rows are read where they lie. Thread blocks whose KV
// heads share latents of 256 channels work in pairs, clusters of two: each makes every second tile of K's latents and copies it to the
// other, and each sums half of V's channels with the weights of both.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/decode/finish.cuh"
#include "ops/cuda/kernels/specialized/make_latents.cuh"
#include "ops/cuda/kernels/specialized/score_keys.cuh"
#include "ops/cuda/kernels/specialized/sum_values.cuh"
#include "ops/cuda/rows/copy.cuh"

namespace lkv::cuda {

// The item's B of K, which depends on no earlier kernel, by the copy engine: [unit][steps of 16 channels][factor_step], and the
// table of angles. By the warps that sum, once the barriers are there. thread: of theirs
template <int B, bool Absorbs>
__device__ inline void load_factor(const SpecializedArgs& p, const SpecializedLayout& plan, int head_kv, int thread,
                                   SpecializedBarriers& barriers, uint8_t* factor, uint2* angles) {
    constexpr int stored_step = factor_step(B, false);
    const int steps = 4 * B * plan.plane_tiles / product_tiles;  // of a head
    const uint8_t* const from =
        reinterpret_cast<const uint8_t*>(p.k_b_cores) + static_cast<int64_t>(head_kv) * steps * stored_step;
    const Arrivals arrivals(&barriers.factor_arrives);
    if constexpr (Absorbs) {
        // without the dimensions that columns replace; one warp's lanes would copy one after the other, 2 900 cycles for all
        constexpr int bytes = 256 * absorbed_block(0);
        if (thread == 0) {
            arrivals.announce(static_cast<uint32_t>(p.unit * steps * bytes + plan.tables.angles));
        }
        if (thread == 32) arrivals.copy(angles, p.rebuilt_angles, static_cast<uint32_t>(plan.tables.angles));
        for (int i = thread / 32; thread % 32 == 0 && i < p.unit * steps; i += n_summing_warps) {
            arrivals.copy(factor + i * factor_step(B, Absorbs), from + i * stored_step, bytes);
        }
    } else if (thread == 0) {
        arrivals.announce(static_cast<uint32_t>(plan.factor + plan.tables.angles));
        arrivals.copy(angles, p.angles, static_cast<uint32_t>(plan.tables.angles));
        arrivals.copy(factor, from, static_cast<uint32_t>(plan.factor));
    }
}

// A thread block's part where softmax/combine.cu merges: of `n_rows` rows the sums of V from first_channel on, and from the first one on
// their maxima and sums of weights. Otherwise as end_part. By all threads.
template <class SumAt>
__device__ inline void store_part(const SpecializedArgs& p, int split, int n_rows, const int32_t* rows_at,
                                  const float2* all, int first_channel, int width, SumAt&& sum_at) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_rows * width; i += specialized_threads) {
        const int row = i / width;
        const int d = first_channel + i - row * width;
        const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + rows_at[row];
        if (d == 0) reinterpret_cast<float2*>(p.partial_ml)[at] = all[row];
        if (d < 64 * p.v_blocks) p.partial[at * 64 * p.v_blocks + d] = sum_at(row, d - first_channel);
    }
}

// Behind it neither thread block of a pair has anything for the other. All that was sent has been waited for but the last arrivals of those that
// score, who are done first and have the time for an arrival that orders them: it fences all memory of the GPU.
__device__ __forceinline__ void leave_pair(SpecializedBarriers& barriers, bool scores) {
    if (scores) {
        cluster_arrive();
    } else {
        cluster_arrive_relaxed();
    }
    cluster_wait();
    Arrivals(&barriers.maxima_passed).wait(0);
}

// The maximum and the sum of weights of a query row, of all warps that score.
__device__ __forceinline__ float2 joined_maxima(const float2 (&of_row)[n_scoring_warps][decode_rows], int row) {
    float top = -INFINITY;
    float sum = 0.0f;
    for (int w = 0; w < n_scoring_warps; w++) top = fmaxf(top, of_row[w][row].x);
    for (int w = 0; w < n_scoring_warps; w++) {
        const float2 of = of_row[w][row];
        if (of.x != -INFINITY) sum += of.y * exp2f(of.x - top);
    }
    return make_float2(top, sum);
}

// B: 64-channel blocks of a K and a V group. Kind: as in with_chunk. Absorbs: p.absorbed_span is not 0. paired: p.pair is not 0.
template <int B, int Kind, bool Absorbs, bool paired>
__global__ void __launch_bounds__(specialized_threads, 1)
    decode_specialized_kernel(const __grid_constant__ SpecializedArgs p) {
    if constexpr (!has_warpgroup_products) return;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ SpecializedBarriers barriers;
    constexpr int items = summed_items(paired);
    // of a query row, of a pair its other item's too: which of [n_tokens, n_head] it is
    __shared__ int32_t rows_at[items * decode_rows];
    __shared__ int32_t n_slots[max_regions];
    __shared__ float2
        maxima[items][n_scoring_warps][decode_rows];  // of a scoring warp's rows, and their sums of weights
    static_assert(sizeof(maxima[0]) == passed_maxima);
    let_next_start();
    const SlotCounts counts(p);  // on their way for 1.2 us; what does not depend on them comes first
    barriers.init(p.unit, B, paired);
    if (paired) cluster_arrive_relaxed();
    const SpecializedLayout plan(p);
    const WorkItem item(p, blockIdx.x);
    const int split = blockIdx.y;
    const int lane = threadIdx.x % 32;
    // from one lane, so that the compiler keeps what follows from it in uniform registers
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

    uint8_t* const factor = shared;
    uint8_t* const latents = factor + plan.factor;
    auto* const weights = reinterpret_cast<TileWeights*>(latents + plan.latents);
    auto* const groups = reinterpret_cast<GroupTable*>(latents + plan.latents + plan.weights);
    auto* const chunks = reinterpret_cast<Chunk*>(reinterpret_cast<uint8_t*>(groups) + plan.groups);
    uint8_t* const tables_at = reinterpret_cast<uint8_t*>(chunks) + plan.chunks;
    const RebuildTables tables(tables_at, plan.tables, plan.plane_tiles, plan.turned_tiles, p.unit);
    uint8_t* const notes = tables_at + plan.tables.total();
    const int buffer_bits = __ffs(p.stages) - 1;
    const int note_bits = __ffs(note_buffers(B, p.unit, Absorbs)) - 1;

    ValueSums<summed_groups(paired)> sums[items];
    float row_max[2] = {-INFINITY, -INFINITY};
    float row_sum[2] = {0.0f, 0.0f};
    const int summing_warp = warp - n_making_warps;
    const int scoring_warp = summing_warp - n_summing_warps;
    constexpr int making_and_scoring = 32 * (n_making_warps + n_scoring_warps);
    const auto scoring_warps = [] { asm volatile("bar.sync 6, %0;" ::"n"(32 * n_scoring_warps) : "memory"); };
    const auto tiles_of = [&](const Parts& parts) {
        const int begin = __shfl_sync(0xffffffffu, parts.begin(split), 0);
        const int end = __shfl_sync(0xffffffffu, parts.begin(split + 1), 0);
        return TileRows<B>{p, counts, parts, begin, end - begin, groups, chunks, n_slots};
    };
    const auto start = [&] {
        __syncthreads();
        wait_for_previous();
        if (paired) cluster_wait();  // the other's barriers are there
    };
    // Every role is set up by its own warps, and leaves where the part has no tiles.
    if (warp < n_making_warps) {
        TileNoter<B> noter(p, tables, barriers, notes, plan.note, note_bits, warp);
        const Parts parts(p, counts);
        if (split >= parts.count) return;
        if (threadIdx.x == 0) {
#pragma unroll
            for (int r = 0; r < max_regions; r++) n_slots[r] = counts.of[r];
        }
        const TileRows<B> rows = tiles_of(parts);
        start();
        make_latents<B, Kind, paired>(rows, barriers, latents, buffer_bits, warp, noter, rows_at, item.n_rows, [] {
            asm volatile("bar.sync 3, %0;" ::"n"(making_and_scoring) : "memory");
        });
    } else if (scoring_warp < 0) {
        const int thread = threadIdx.x - 32 * n_making_warps;
        constexpr int threads = 32 * n_summing_warps;
        static_assert(max_regions * TableEntry<B, B>::per_region <= threads);
        const TableEntry<B, B> entry(p, item, thread);
        // columns without a query row are multiplied too
        for (int i = thread; i < plan.weights / 16; i += threads) {
            reinterpret_cast<uint4*>(weights)[i] = make_uint4(0, 0, 0, 0);
        }
        tables.fill_extras(p, item.head_kv, p.unit, thread, threads);
        const Parts parts(p, counts);
        if (split >= parts.count) return;
        const TileRows<B> rows = tiles_of(parts);
        // the first tiles' rows, of which earlier kernels write no more than a few
        constexpr int apart = tiles_at_once(B);
        if (summing_warp < apart) {
            rows.fetch(rows.cursor(summing_warp + (paired ? pair_rank() * apart : 0)), 0, paired);
        }
        // by other warps than K's, where there are enough
        const int v_warp = apart <= 2 ? summing_warp - 2 : summing_warp;
        if (v_warp >= 0 && v_warp < apart) rows.fetch(rows.cursor(v_warp), 1);
        entry.store(groups, chunks);
        start();
        // the first product is behind the first latents, which take longer than B to come
        load_factor<B, Absorbs>(p, plan, item.head_kv, thread, barriers, factor, tables.angles);
        sum_values<B, Kind, paired>(rows, barriers, weights, summing_warp, sums);
    } else {
        const int thread = threadIdx.x - 32 * (n_making_warps + n_summing_warps);
        if (thread < items * item.n_rows) {
            const bool own = thread < item.n_rows;
            const WorkItem of(p, own ? blockIdx.x : blockIdx.x ^ 1);
            rows_at[thread] = of.few_row_at(p, own ? thread : thread - item.n_rows);
        }
        scoring_warps();
        // where everything lies, before it is there
        KeyScorer scorer(p, tables, item, rows_at, scoring_warp);
        const auto row_at = [&](int row) -> const float* {
            return row < item.n_rows ? p.q + static_cast<int64_t>(rows_at[row]) * p.q_width : nullptr;
        };
        auto column = tables.first_column(p, thread, 32 * n_scoring_warps, row_at);
        const Parts parts(p, counts);
        if (split >= parts.count) return;
        const TileRows<B> rows = tiles_of(parts);
        const TileCursor first = rows.cursor(scorer.first_tile());
        start();
        // one trip to the L2 cache for all of it
        column.load();
        scorer.look();
        const TileMarks marks = first.i < rows.count ? TileMarks(p.regions[first.region], first) : TileMarks();
        column.store(tables);
        tables.fill_more_columns(p, thread, 32 * n_scoring_warps, row_at);
        // who makes latents waits for the queries, not these for latents
        asm volatile("bar.arrive 3, %0;" ::"n"(making_and_scoring) : "memory");
        scoring_warps();
        scorer.run<B, Absorbs, paired>(rows, Absorbs ? Reach(marks, ~uint64_t{0}).lowest : 0, barriers, latents, notes,
                                       plan.note, buffer_bits, note_bits, factor, weights);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row_max[i] = scorer.row_max[i];
            row_sum[i] = scorer.row_sum[i];
        }
    }

    const int g = lane / 4;
    const int c = lane % 4;
    if (scoring_warp >= 0 && g == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2& of = maxima[0][scoring_warp][2 * c + i];
            of = make_float2(row_max[i], row_sum[i]);
            if (paired) send(in_peer(&of) + sizeof(maxima[0]), of, in_peer(&barriers.maxima_passed));
        }
    }
    // the sums meet where B was, which a part without tiles has not waited for
    Arrivals(&barriers.factor_arrives).wait(0);
    if (paired) {
        leave_pair(barriers, scoring_warp >= 0);
    } else {
        __syncthreads();
    }
    constexpr int width = 64 * B / items;
    constexpr int pitch = width + 8;
    constexpr int side_by_side = B / items;  // warps that sum different channels
    constexpr int slices = n_summing_warps / side_by_side;
    const int n_rows = items * item.n_rows;
    auto* const all = reinterpret_cast<float2*>(shared);                       // [n_rows] maximum, sum
    auto* const shares = reinterpret_cast<float*>(all + items * decode_rows);  // [slices][n_rows]
    float* const total = shares + slices * items * decode_rows;                // [slices][n_rows][pitch]
    if (scoring_warp < 0 && summing_warp >= 0) {
        const int slice = summing_warp / side_by_side;
        const int block = summing_warp % side_by_side;
#pragma unroll
        for (int of = 0; of < items; of++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (2 * c + i >= item.n_rows) continue;
                const int row = of * item.n_rows + 2 * c + i;
                if (block == 0 && g == 0) shares[slice * n_rows + row] = sums[of].base[i];
                float* const to = total + (slice * n_rows + row) * pitch + 64 * block;
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) to[sum_channel(g, 2 * j + h)] = sums[of].of[j][2 * h + i];
                }
            }
        }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n_rows) {
        const bool own = static_cast<int>(threadIdx.x) < item.n_rows;
        const int row = own ? threadIdx.x : threadIdx.x - item.n_rows;
        all[threadIdx.x] = joined_maxima(maxima[own ? 0 : items - 1], row);
        for (int slice = 0; slice < slices; slice++) {
            float& of = shares[slice * n_rows + threadIdx.x];
            of = of == -INFINITY ? 0.0f : exp2f(of - all[threadIdx.x].x);
        }
    }
    __syncthreads();
    const auto sum_at = [&](int row, int d) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < slices; s++) sum += shares[s * n_rows + row] * total[(s * n_rows + row) * pitch + d];
        return sum;
    };
    if constexpr (paired) {
        store_part(p, split, n_rows, rows_at, all, pair_rank() * width, width, sum_at);
    } else {
        const Parts parts(p, SlotCounts(n_slots));
        end_part<specialized_threads, false>(p, p.v_b != nullptr, parts, item, split, rows_at, all, width, shared,
                                             total, pitch, sum_at);
    }
}

}  // namespace lkv::cuda
