// Estimates of steps. In a pass a warp scores the leading units of two steps, of 32 slots each. While the first one's rows come, all warps
// share out the means of the pass's steps; the second one's come while the first is scored.
#include <cuda_fp16.h>

#include <optional>

#include "ops/cuda/choice/step_list.cuh"
#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/mla/scores.cuh"

namespace lkv::cuda {

namespace {

constexpr int most_score_warps = 16;
constexpr int steps_of_warp = 2;   // in a pass
constexpr int mean_shares = 8;     // of the means' units
constexpr int score_fixed = 6144;  // bytes of the kernel's own variables, at most

// Rows, which begin on multiples of 4, as they lie in memory modulo 16, so far apart that eight begin in different banks.
LKV_HD constexpr int staged_bytes(int lead, int bytes) { return round_up(lead + bytes, 16); }
constexpr int staged_pitch(int bytes) { return staged_bytes(12, bytes) | 16; }

// Shared memory, in this order, in bytes. What the means need makes room for the rows of every warp's second step.
struct ScoreLayout {
    int warps;
    int lead_queries;       // uint4 [lead units][rows / 8][32]
    int rest;               // f32 [steps of a pass][rows]
    int row_pitch, rows;    // [warps][step_slots] leading units
    int mean_queries;       // uint4 [units of the means][rows / 8][32]
    int shares;             // f32 [mean_shares][steps of a pass][rows]
    int mean_pitch, means;  // [steps of a pass] rows

    ScoreLayout(const ScoredUnits& units, int n_rows, int n_warps)
        : warps(n_warps),
          lead_queries(units.lead * n_rows * 64),
          rest(steps() * n_rows * 4),
          row_pitch(staged_pitch(units.lead_bytes)),
          rows(n_warps * step_slots * row_pitch),
          mean_queries(units.of_mean * n_rows * 64),
          shares(units.of_mean > 0 ? mean_shares * rest : 0),
          mean_pitch(staged_pitch(units.mean_bytes)),
          means(units.of_mean > 0 ? steps() * mean_pitch : 0) {}
    LKV_HD int steps() const { return steps_of_warp * warps; }
    int total() const {
        const int of_means = mean_queries + shares + means;
        return lead_queries + rest + rows + (of_means > rows ? of_means : rows);
    }
};

// Query rows of a thread block: of the heads that share a group of K.
struct ScoreRows {
    int first_head;
    int n;

    __device__ ScoreRows(const ChoiceArgs& p, int rows) {
        const int heads = p.k_group * (p.n_head / p.n_kv);
        const int blocks = (heads + rows - 1) / rows;
        const int group = static_cast<int>(blockIdx.y) / blocks;
        const int first = (static_cast<int>(blockIdx.y) - group * blocks) * rows;
        first_head = group * heads + first;
        n = min(rows, heads - first);
    }
};

// As operand b of scores (kernels/mla/scores.cuh): lane 4n + t has of row n the four pairs of channels that KeyReader names.
template <int NT>
__device__ void load_score_queries(const ChoiceArgs& p, const ScoreRows& rows, int token, int first_unit, int n_units,
                                   uint4* queries) {
    const float* const q = p.q + (static_cast<int64_t>(token) * p.n_head + rows.first_head) * p.q_width;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < n_units * NT * 32; i += static_cast<int>(blockDim.x)) {
        const int row = i / 32 % NT * 8 + i % 32 / 4;
        const int channel = (first_unit + i / (32 * NT)) * unit_channels + 8 * (i % 4);  // q_width is a multiple of 8
        const bool exists = row < rows.n && channel < p.q_width;
        const auto* const from = reinterpret_cast<const float4*>(q + (exists ? row * p.q_width + channel : 0));
        float4 of[2] = {from[0], from[1]};
        if (!exists) of[0] = of[1] = float4{};
        queries[i] = query_pairs(of);
    }
}

__device__ __forceinline__ int staged_lead(const uint8_t* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
}
// A row's first bytes, by `threads` of a warp. to: a multiple of 16, behind which the row begins as it does in memory
__device__ __forceinline__ void copy_score_row(uint8_t* to, const uint8_t* row, int bytes, int thread, int threads) {
    const int lead = staged_lead(row);
    for (int at = 16 * thread; at < lead + bytes; at += 16 * threads) copy_async<16>(to + at, row - lead + at);
}

struct ScoreShared {
    MlaUnit units[most_units];
    uint64_t arrivals[steps_of_warp][most_score_warps];
    float2 sums[most_score_warps][32];
};

// grid: parts x (groups of K, blocks of their query rows) x tokens
template <int NT>
__global__ void __launch_bounds__(32 * most_score_warps, 1)
    score_kernel(const __grid_constant__ ChoiceArgs p, const __grid_constant__ ScoreLayout layout) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ ScoreShared own;
    static_assert(sizeof own <= score_fixed - 1024);
    constexpr int n_rows = 8 * NT;
    let_next_start();
    auto* const queries = reinterpret_cast<uint4*>(shared);
    auto* const rest = reinterpret_cast<float*>(shared + layout.lead_queries);
    uint8_t* const all_rows = shared + layout.lead_queries + layout.rest;
    auto* const mean_queries = reinterpret_cast<uint4*>(all_rows + layout.rows);
    auto* const shares = reinterpret_cast<float*>(all_rows + layout.rows + layout.mean_queries);
    uint8_t* const means = all_rows + layout.rows + layout.mean_queries + layout.shares;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    const int token = static_cast<int>(blockIdx.z);
    const ScoreRows rows(p, n_rows);
    const RegionArgs& region = p.regions[0];
    const GroupTable group = region.k_groups[rows.first_head / (p.k_group * (p.n_head / p.n_kv))];
    if (warp < steps_of_warp && lane < layout.warps) Arrivals(&own.arrivals[warp][lane]).init();
    if (warp == 0) note_units(region.chunks + group.chunks, 4 * p.k_blocks, 0, own.units);
    __syncthreads();
    int n_units = 2 * p.k_blocks;  // that are scored
    while (n_units > 0 && own.units[n_units - 1].kind == kind_none) n_units--;
    n_units = min(n_units, p.units.lead + p.units.of_mean);
    const int lead = min(p.units.lead, n_units);
    const bool scaled = n_units > 0 && format_scaled_by_group(static_cast<Format>(own.units[0].kind));
    wait_for_previous();

    const int n_slots = p.n_slots[0];
    const StepList list(p, token);
    const auto begin = static_cast<int>(int64_t{list.n} * blockIdx.x / gridDim.x);
    const auto end = static_cast<int>(int64_t{list.n} * (blockIdx.x + 1) / gridDim.x);
    const int q_pos = p.q_pos[token];
    const uint64_t q_seq = uint64_t{1} << p.q_seq[token];
    const auto mean_of = [&](int i) {
        return p.means + static_cast<int64_t>(list.at(i)) * region.k_row_bytes + group.first;
    };
    const auto row_of = [&](int i, int s) { return region.k_row(list.at(i) * step_slots + s) + group.first; };
    const auto rows_at = [&](int k) { return all_rows + (k * layout.warps + warp) * step_slots * layout.row_pitch; };
    // One copy of a row by the copy engine, or four lanes a row.
    const auto copy_rows = [&](int i, int k) {
        uint8_t* const to = rows_at(k);
        const int n = i < end ? min(step_slots, n_slots - list.at(i) * step_slots) : 0;
        if (has_bulk_copies) {
            const Arrivals arrive(&own.arrivals[k][warp]);
            const uint8_t* const row = row_of(min(i, end - 1), lane);
            const int lead = staged_lead(row);
            const auto bytes = static_cast<uint32_t>(lane < n ? staged_bytes(lead, p.units.lead_bytes) : 0);
            const uint32_t all = __reduce_add_sync(0xffffffffu, bytes);
            if (lane == 0) arrive.announce(all);
            __syncwarp();
            if (bytes > 0) arrive.copy(to + lane * layout.row_pitch, row - lead, bytes);
        } else {
            constexpr int of_row = 4;
            for (int s = lane / of_row; s < n; s += 32 / of_row) {
                copy_score_row(to + s * layout.row_pitch, row_of(i, s), p.units.lead_bytes, lane % of_row, of_row);
            }
        }
        copies_commit();
    };

    const float to_log2 = p.scale * log2_e;
    // The means of a pass's steps, into `rest`: warps share out their units.
    const auto score_means = [&](int first, int n_pass) {
        for (int task = warp; lead < n_units && task / mean_shares * 16 < n_pass; task += layout.warps) {
            const int share = task % mean_shares;
            const int tile = task / mean_shares * 16;
            const int at[2] = {min(tile + g, n_pass - 1), min(tile + g + 8, n_pass - 1)};
            const uint8_t* const from[2] = {means + at[0] * layout.mean_pitch + staged_lead(mean_of(first + at[0])),
                                            means + at[1] * layout.mean_pitch + staged_lead(mean_of(first + at[1]))};
            float of[1][NT][4] = {};
            score_rows<NT, false>(of, from, own.units, lead + (n_units - lead) * share / mean_shares,
                                  lead + (n_units - lead) * (share + 1) / mean_shares, scaled,
                                  mean_queries - lead * NT * 32, lane);
            float* const to = shares + (share * layout.steps() + tile + g) * n_rows + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) to[e / 2 * 8 * n_rows + 8 * n + e % 2] = of[0][n][e];
            }
        }
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < n_pass * n_rows; i += static_cast<int>(blockDim.x)) {
            float of = 0.0f;
#pragma unroll
            for (int share = 0; share < mean_shares; share++) {
                of += lead < n_units ? shares[share * layout.steps() * n_rows + i] : 0.0f;
            }
            rest[i] = of * to_log2;
        }
        before_async_access();
        __syncthreads();  // rests are there, and room for more rows
    };

    float top = -INFINITY;  // of this lane's head: the largest estimate, and the sum relative to it
    float sum = 0.0f;
    const int head = g / 2 < NT ? 8 * (g / 2) + 2 * (lane % 4) + g % 2 : n_rows;
#pragma unroll 1
    for (int first = begin, pass = 0; first < end; first += layout.steps(), pass++) {
        const int n_pass = min(layout.steps(), end - first);
        for (int i = warp; lead < n_units && i < n_pass; i += layout.warps) {
            copy_score_row(means + i * layout.mean_pitch, mean_of(first + i), p.units.mean_bytes, lane, 32);
        }
        copies_commit();
        copy_rows(first + warp, 0);
        static_assert(steps_of_warp == 2);
        uint64_t seq[steps_of_warp] = {};
        int pos[steps_of_warp];
#pragma unroll
        for (int k = 0; k < steps_of_warp; k++) {
            const int i = first + warp + k * layout.warps;
            const int slot = i < end ? list.at(i) * step_slots + lane : n_slots;
            if (slot < n_slots) seq[k] = region.seq[slot];
            pos[k] = slot < n_slots ? region.pos[slot] : -1;
        }
        load_score_queries<NT>(p, rows, token, lead, n_units - lead, mean_queries);
        if (pass == 0) load_score_queries<NT>(p, rows, token, 0, lead, queries);
        copies_wait(1);
        __syncthreads();  // means and queries are there
        score_means(first, n_pass);
        copy_rows(first + warp + layout.warps, 1);
#pragma unroll 1
        for (int k = 0; k < steps_of_warp; k++) {
            const int i = first + warp + k * layout.warps;
            const int at_pos = k == 0 ? pos[0] : pos[1];
            const bool seen = ((k == 0 ? seq[0] : seq[1]) & q_seq) != 0 && at_pos >= 0 && at_pos <= q_pos &&
                              (p.window == 0 || q_pos - at_pos < p.window);
            const uint32_t visible = __ballot_sync(0xffffffffu, seen);  // of no step behind the last
            const bool anyway =
                __any_sync(0xffffffffu, seen && (q_pos - at_pos < p.always_last || at_pos < p.always_first));
            copies_wait(1 - k);
            Arrivals(&own.arrivals[k][warp]).wait(static_cast<uint32_t>(pass & 1));
            __syncwarp();
            float scores[2][NT][4] = {};
            if (visible != 0) {
                const uint8_t* at[4];
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const int s = g + 8 * r;
                    at[r] = rows_at(k) + s * layout.row_pitch + staged_lead(row_of(i, s));
                }
                score_rows<NT, false, 2>(scores, at, own.units, 0, lead, scaled, queries, lane);
            }
            float most_of_head = -INFINITY;
            float sum_of_head = 0.0f;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float x[4];
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        x[r] =
                            (visible >> (g + 8 * r) & 1) != 0 ? scores[r / 2][n][r % 2 * 2 + c] * to_log2 : -INFINITY;
                    }
                    float most = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
#pragma unroll
                    for (int o = 4; o < 32; o *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
                    const float base = most == -INFINITY ? 0.0f : most;
                    float all = (power_of_two(x[0] - base) + power_of_two(x[1] - base)) +
                                (power_of_two(x[2] - base) + power_of_two(x[3] - base));
#pragma unroll
                    for (int o = 4; o < 32; o *= 2) all += __shfl_xor_sync(0xffffffffu, all, o);
                    if (g == 2 * n + c) {
                        most_of_head = most;
                        sum_of_head = all;
                    }
                }
            }
            if (head >= rows.n || i >= end) continue;
            float estimate = -INFINITY;
            if (visible != 0) {
                estimate = most_of_head + log2f(sum_of_head) + rest[(i - first) * n_rows + head];
                const float higher = fmaxf(top, estimate);
                sum = sum * power_of_two(top - higher) + power_of_two(estimate - higher);
                top = higher;
            }
            p.estimates[(static_cast<int64_t>(token) * p.capacity + i) * p.n_head + rows.first_head + head] =
                anyway ? INFINITY : estimate;
        }
        before_async_access();
        __syncthreads();  // all has been read
    }
    if (head < n_rows) own.sums[warp][head] = make_float2(top, sum);
    __syncthreads();
    if (warp != 0 || lane >= rows.n) return;
    float most = -INFINITY;
    for (int w = 0; w < layout.warps; w++) most = fmaxf(most, own.sums[w][lane].x);
    float all = 0.0f;
    for (int w = 0; w < layout.warps; w++) {
        const float2 of = own.sums[w][lane];
        all += of.y > 0.0f ? of.y * power_of_two(of.x - most) : 0.0f;
    }
    p.sums[(static_cast<int64_t>(token) * gridDim.x + blockIdx.x) * p.n_head + rows.first_head + lane] =
        make_float2(most, all);
}

// How many query rows a thread block has, and warps.
struct ScoreShape {
    int rows, warps;
};
std::optional<ScoreShape> shape_of(const ScoredUnits& units, int heads, const Device& device) {
    for (int rows = heads <= 8 ? 8 : (heads <= 16 ? 16 : 32); rows >= 8; rows /= 2) {
        for (int warps = most_score_warps; warps >= mean_shares; warps /= 2) {
            if (ScoreLayout(units, rows, warps).total() <= device.shared_bytes - score_fixed) return {{rows, warps}};
        }
    }
    return std::nullopt;
}

template <int NT>
cudaError_t launch_score(const ChoiceArgs& args, const ScoreLayout& layout, cudaStream_t stream) {
    const int heads = args.k_group * (args.n_head / args.n_kv);
    const int blocks = args.n_kv / args.k_group * ((heads + 8 * NT - 1) / (8 * NT));
    return launch_next(
        score_kernel<NT>,
        dim3(static_cast<unsigned>(args.n_parts), static_cast<unsigned>(blocks), static_cast<unsigned>(args.n_tokens)),
        32 * layout.warps, static_cast<size_t>(layout.total()), stream, args, layout);
}

}  // namespace

cudaError_t score_steps(const ChoiceArgs& args, const Device& device, cudaStream_t stream) {
    const std::optional<ScoreShape> shape = shape_of(args.units, args.k_group * (args.n_head / args.n_kv), device);
    if (!shape) return cudaErrorInvalidConfiguration;
    const ScoreLayout layout(args.units, shape->rows, shape->warps);
    if (shape->rows == 8) return launch_score<1>(args, layout, stream);
    return shape->rows == 16 ? launch_score<2>(args, layout, stream) : launch_score<4>(args, layout, stream);
}

bool scores_fit(const ScoredUnits& units, int heads, const Device& device) {
    return shape_of(units, heads, device).has_value();
}

}  // namespace lkv::cuda
