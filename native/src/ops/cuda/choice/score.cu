// Estimates of steps. A warp scores the leading units of 16 slots, two warps a step; all 16 share out the other units of their eight steps'
// means. Rows come by asynchronous copies while those of the eight steps before are scored.
#include <cuda_fp16.h>

#include <algorithm>

#include "ops/cuda/choice/choice.h"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/mla/scores.cuh"

namespace lkv::cuda {

namespace {

constexpr int score_warps = 16;
constexpr int score_threads = 32 * score_warps;
constexpr int steps_at_once = score_warps / 2;
constexpr int half_step = step_slots / 2;  // slots of a warp
constexpr int score_fixed = 4096;          // bytes of the kernel's own variables, at most

// Rows as they lie in memory modulo 16, so far apart that eight begin in different banks.
constexpr int staged_pitch(int bytes) { return (bytes + 30) / 16 * 16 | 16; }

// Shared memory, in this order, in bytes.
struct ScoreLayout {
    int queries;  // uint4 [units][rows / 8][32]
    int rest;     // f32 [2][warps][steps_at_once][rows], two rounds by turns
    int halves;   // float2 [2][warps][rows]
    int row_pitch, mean_pitch;
    int rows;    // of a stage: [warps][half_step] leading units, then [steps_at_once] means
    int stages;  // 2: the next rows come while these are scored

    ScoreLayout(const ChoiceArgs& p, int n_rows, int n_stages)
        : queries(2 * p.k_blocks * n_rows * 64),
          rest(2 * score_warps * steps_at_once * n_rows * 4),
          halves(2 * score_warps * n_rows * 8),
          row_pitch(staged_pitch(p.units.lead_bytes)),
          mean_pitch(p.units.mean_bytes > 0 ? staged_pitch(p.units.mean_bytes) : 0),
          rows(score_warps * half_step * row_pitch + steps_at_once * mean_pitch),
          stages(n_stages) {}
    int total() const { return queries + rest + halves + stages * rows; }
};

// Query rows of a thread block: of the heads that share a group of K.
struct ScoreRows {
    int first_head, n_heads;  // of the group
    int first, n;             // of this block

    __device__ ScoreRows(const ChoiceArgs& p, int rows) {
        const int rep = p.n_head / p.n_kv;
        n_heads = p.k_group * rep;
        const int blocks = (n_heads + rows - 1) / rows;
        const int group = static_cast<int>(blockIdx.y) / blocks;
        first_head = group * n_heads;
        first = (static_cast<int>(blockIdx.y) - group * blocks) * rows;
        n = min(rows, n_heads - first);
    }
    __device__ int head(int row) const { return first_head + first + row; }
};

// As operand b of scores (kernels/mla/scores.cuh): lane 4n + t has of row n the four pairs of channels that KeyReader names.
template <int NT>
__device__ void load_score_queries(const ChoiceArgs& p, const ScoreRows& rows, int token, int n_units, uint4* queries) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < n_units * NT * 32; i += score_threads) {
        const int row = i / 32 % NT * 8 + i % 32 / 4;
        const int channel = i / (32 * NT) * unit_channels + 8 * (i % 4);  // q_width is a multiple of 8
        const bool exists = row < rows.n && channel < p.q_width;
        const int64_t at = static_cast<int64_t>(token) * p.n_head + rows.head(exists ? row : 0);
        const auto* const from = reinterpret_cast<const float4*>(p.q + at * p.q_width + (exists ? channel : 0));
        float4 of[2] = {from[0], from[1]};
        if (!exists) of[0] = of[1] = float4{};
        queries[i] = make_uint4(bits(__floats2half2_rn(of[0].x, of[0].z)), bits(__floats2half2_rn(of[0].y, of[0].w)),
                                bits(__floats2half2_rn(of[1].x, of[1].z)), bits(__floats2half2_rn(of[1].y, of[1].w)));
    }
}

// n rows of `bytes` from where the row of `first` lies, row_bytes apart, by so many threads each; to: a multiple of 16
__device__ void copy_score_rows(uint8_t* to, int pitch, const uint8_t* first, uint32_t row_bytes, int bytes, int n,
                                int thread, int threads) {
    constexpr int of_row = 4;
    for (int s = thread / of_row; s < n; s += threads / of_row) {
        const uint8_t* const row = first + static_cast<int64_t>(s) * row_bytes;
        const auto lead = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
        for (int at = 16 * (thread % of_row); at < lead + bytes; at += 16 * of_row) {
            copy_async<16>(to + s * pitch + at, row - lead + at);
        }
    }
}

struct ScoreShared {
    MlaUnit units[most_units];
    bool anyway[2][score_warps];
    float2 sums[steps_at_once][32];
};

// grid: parts x (groups of K, blocks of their query rows) x tokens
template <int NT>
__global__ void __launch_bounds__(score_threads, 1)
    score_kernel(const __grid_constant__ ChoiceArgs p, const __grid_constant__ ScoreLayout layout) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ ScoreShared own;
    static_assert(sizeof own <= score_fixed - 1024);
    constexpr int n_rows = 8 * NT;
    let_next_start();
    auto* const queries = reinterpret_cast<uint4*>(shared);
    auto* const rest = reinterpret_cast<float*>(shared + layout.queries);
    auto* const halves = reinterpret_cast<float2*>(shared + layout.queries + layout.rest);
    uint8_t* const stages = shared + layout.queries + layout.rest + layout.halves;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int token = static_cast<int>(blockIdx.z);
    const ScoreRows rows(p, n_rows);
    const RegionArgs& region = p.regions[0];
    const GroupTable group = region.k_groups[rows.first_head / (p.n_head / p.n_kv) / p.k_group];
    if (warp == 0) note_units(region.chunks + group.chunks, 4 * p.k_blocks, 0, own.units);
    __syncthreads();
    int n_units = 2 * p.k_blocks;
    while (n_units > 0 && own.units[n_units - 1].kind == kind_none) n_units--;
    const int lead = min(p.units.lead, n_units);
    const bool scaled = n_units > 0 && format_scaled_by_group(static_cast<Format>(own.units[0].kind));
    const int lead_bytes = lead < n_units ? own.units[lead].codes : static_cast<int>(group.bytes);
    wait_for_previous();

    const int n_slots = p.n_slots[0];
    const bool apart = p.own.ends != nullptr;
    const int list_begin = apart && p.own.begins != nullptr ? p.own.begins[token] : 0;
    const int n_steps = apart ? p.own.ends[token] - list_begin : (n_slots + step_slots - 1) / step_slots;
    const int32_t* const list = apart ? p.own.steps + static_cast<int64_t>(token) * p.own.capacity + list_begin : nullptr;
    const auto step_at = [&](int i) { return list != nullptr ? slot_of_step(list[i]) / step_slots : i; };
    const auto begin = static_cast<int>(int64_t{n_steps} * blockIdx.x / gridDim.x);
    const auto end = static_cast<int>(int64_t{n_steps} * (blockIdx.x + 1) / gridDim.x);
    const int q_pos = p.q_pos[token];
    const uint64_t q_seq = uint64_t{1} << p.q_seq[token];

    const auto stage_of = [&](int parity) { return stages + (layout.stages > 1 ? parity * layout.rows : 0); };
    const auto copy = [&](int first, int parity) {
        uint8_t* const stage = stage_of(parity);
        const int i = first + warp / 2;
        if (i < end) {
            const int slot = step_at(i) * step_slots + warp % 2 * half_step;
            copy_score_rows(stage + warp * half_step * layout.row_pitch, layout.row_pitch,
                            region.k_row(slot) + group.first, region.k_row_bytes, lead_bytes,
                            min(half_step, n_slots - slot), lane, 32);
            if (lead < n_units && warp % 2 == 0) {
                copy_score_rows(stage + score_warps * half_step * layout.row_pitch + warp / 2 * layout.mean_pitch,
                                layout.mean_pitch, p.means + static_cast<int64_t>(step_at(i)) * region.k_row_bytes + group.first,
                                0, static_cast<int>(group.bytes), 1, lane, 4);
            }
        }
        copies_commit();
    };
    copy(begin, 0);
    load_score_queries<NT>(p, rows, token, n_units, queries);

    const float to_log2 = p.scale * log2_e;
    const int g = lane / 4;
    float top = -INFINITY;  // of this lane's head, in the warps that add up a step
    float sum = 0.0f;
#pragma unroll 1
    for (int first = begin, parity = 0; first < end; first += steps_at_once, parity ^= 1) {
        copies_wait(0);
        __syncthreads();  // rows and queries are there, the stage before has been read
        if (layout.stages > 1) copy(first + steps_at_once, parity ^ 1);
        const uint8_t* const stage = stage_of(parity);
        const int i = first + warp / 2;
        const int slot = i < end ? step_at(i) * step_slots + warp % 2 * half_step : n_slots;
        uint64_t seq = 0;
        int pos = -1;
        if (lane < half_step && slot + lane < n_slots) {
            seq = region.seq[slot + lane];
            pos = region.pos[slot + lane];
        }
        const bool seen = (seq & q_seq) != 0 && pos >= 0 && pos <= q_pos && (p.window == 0 || q_pos - pos < p.window);
        const uint32_t visible = __ballot_sync(0xffffffffu, seen);
        const bool anyway = __any_sync(0xffffffffu, seen && (q_pos - pos < p.always_last || pos < p.always_first));

        float scores[NT][4] = {};
        if (visible != 0) {
            const uint8_t* at[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int s = g + 8 * k;
                const auto address = reinterpret_cast<uintptr_t>(region.k_row(slot) + group.first) + static_cast<uint32_t>(s) * region.k_row_bytes;
                at[k] = stage + (warp * half_step + s) * layout.row_pitch + address % 16;
            }
            score_rows<NT, true>(scores, at, own.units, 0, lead, scaled, queries, lane);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float a = (visible >> g & 1) != 0 ? scores[n][c] * to_log2 : -INFINITY;
                const float b = (visible >> (g + 8) & 1) != 0 ? scores[n][2 + c] * to_log2 : -INFINITY;
                float most = fmaxf(a, b);
#pragma unroll
                for (int o = 4; o < 32; o *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
                float all = most == -INFINITY ? 0.0f : power_of_two(a - most) + power_of_two(b - most);
#pragma unroll
                for (int o = 4; o < 32; o *= 2) all += __shfl_xor_sync(0xffffffffu, all, o);
                if (g == 0) halves[(parity * score_warps + warp) * n_rows + 8 * n + 2 * lane + c] = make_float2(most, all);
            }
        }
        if (lane == 0) own.anyway[parity][warp] = anyway;

        if (lead < n_units) {  // rows g are the steps' means, the other eight the same again
            const int step = first + g;
            const auto address = reinterpret_cast<uintptr_t>(p.means + static_cast<int64_t>(step_at(min(step, end - 1))) * region.k_row_bytes + group.first);
            const uint8_t* const mean = stage + score_warps * half_step * layout.row_pitch + min(g, end - 1 - first) * layout.mean_pitch + address % 16;
            const uint8_t* const at[2] = {mean, mean};
            float of[NT][4] = {};
            const int from = lead + (n_units - lead) * warp / score_warps;
            const int until = lead + (n_units - lead) * (warp + 1) / score_warps;
            score_rows<NT, true>(of, at, own.units, from, until, scaled, queries, lane);
            float* const to = rest + ((parity * score_warps + warp) * steps_at_once + g) * n_rows + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                to[8 * n] = of[n][0];
                to[8 * n + 1] = of[n][1];
            }
        }
        __syncthreads();  // halves and rests are there, the rows have been read
        if (layout.stages == 1) copy(first + steps_at_once, 0);
        const int added = first + warp;
        if (warp >= steps_at_once || added >= end || lane >= rows.n) continue;
        const float2 a = halves[(parity * score_warps + 2 * warp) * n_rows + lane];
        const float2 b = halves[(parity * score_warps + 2 * warp + 1) * n_rows + lane];
        const float most = fmaxf(a.x, b.x);
        float estimate = -INFINITY;
        if (most > -INFINITY) {
            float others = 0.0f;
            if (lead < n_units) {
#pragma unroll
                for (int w = 0; w < score_warps; w++) {
                    others += rest[((parity * score_warps + w) * steps_at_once + warp) * n_rows + lane];
                }
            }
            estimate = most + log2f(a.y * power_of_two(a.x - most) + b.y * power_of_two(b.x - most)) + others * to_log2;
            const float higher = fmaxf(top, estimate);
            sum = sum * power_of_two(top - higher) + power_of_two(estimate - higher);
            top = higher;
        }
        const bool is_read = own.anyway[parity][2 * warp] || own.anyway[parity][2 * warp + 1];
        p.estimates[(static_cast<int64_t>(token) * p.capacity + added) * p.n_head + rows.head(lane)] =
            is_read && most > -INFINITY ? INFINITY : estimate;
    }
    copies_wait(0);
    if (warp < steps_at_once && lane < n_rows) own.sums[warp][lane] = make_float2(top, sum);
    __syncthreads();
    if (warp != 0 || lane >= rows.n) return;
    float most = -INFINITY;
    for (const auto& of : own.sums) most = fmaxf(most, of[lane].x);
    float all = 0.0f;
    for (const auto& of : own.sums) all += of[lane].y > 0.0f ? of[lane].y * power_of_two(of[lane].x - most) : 0.0f;
    p.sums[(static_cast<int64_t>(token) * gridDim.x + blockIdx.x) * p.n_head + rows.head(lane)] = make_float2(most, all);
}

template <int NT>
cudaError_t launch_score(const ChoiceArgs& args, const ScoreLayout& layout, cudaStream_t stream) {
    const int heads = args.k_group * (args.n_head / args.n_kv);
    const int blocks = args.n_kv / args.k_group * ((heads + 8 * NT - 1) / (8 * NT));
    return launch_next(score_kernel<NT>,
                       dim3(static_cast<unsigned>(args.n_parts), static_cast<unsigned>(blocks),
                            static_cast<unsigned>(args.n_tokens)),
                       score_threads, static_cast<size_t>(layout.total()), stream, args, layout);
}

}  // namespace

cudaError_t score_steps(const ChoiceArgs& args, const Device& device, cudaStream_t stream) {
    const int heads = args.k_group * (args.n_head / args.n_kv);
    for (int n_rows = heads <= 8 ? 8 : (heads <= 16 ? 16 : 32); n_rows >= 8; n_rows /= 2) {
        for (const int stages : {2, 1}) {
            const ScoreLayout layout(args, n_rows, stages);
            if (layout.total() > device.shared_bytes - score_fixed) continue;
            if (n_rows == 8) return launch_score<1>(args, layout, stream);
            return n_rows == 16 ? launch_score<2>(args, layout, stream) : launch_score<4>(args, layout, stream);
        }
    }
    return cudaErrorInvalidConfiguration;
}

}  // namespace lkv::cuda
