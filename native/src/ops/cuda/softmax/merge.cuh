// Parts of the sequence become results: weighted by their maxima and sums of weights, added up and, where V is latent, multiplied with B_v. A
// thread block has four query rows of one KV head. Where these are few, thread blocks share out the latent's channels, and those of the same
// rows add up each other's results, as a cluster where there are clusters.
//
// Beside full rows of exact windows the parts that these left join: their maxima and sums of weights, and after the product their sums.
//
// All of it is waited for, so the factor and addresses come before attention ends, and after it one trip to the L2 cache brings
// maxima and the first parts.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/cluster.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/softmax/hadamard.cuh"
#include "ops/cuda/softmax/halve.cuh"
#include "ops/cuda/softmax/own_steps.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

constexpr int merge_threads = 512;
constexpr int merged_rows = 4;

// What becomes of the latent's channels: thread blocks share them out; a thread block has all of them, one block after the other; or there
// is no latent, and they are the result's.
enum class Product { shared, whole, none };

// What a launch left: sums in f32, not normalised, of parts that are Parts'. A kernel that leaves means in f16 has one of its own.
struct LeftSums {
    using Args = CutProblem;
    static constexpr bool means = false;
    SlotCounts counts;

    __device__ explicit LeftSums(const Args& p) : counts(p) {}
    __device__ int parts_of(const Args& p, int token) const { return parts_of_token(p, counts, token); }
};

// 4·Per channels of a part.
template <bool means, int Per>
struct PartChannels {
    static_assert(!means || Per <= 2);
    using Element = std::conditional_t<means, __half, float>;
    using Word = std::conditional_t<means, std::conditional_t<Per == 1, uint2, uint4>, float4>;
    static constexpr int n = means ? 1 : Per;
    Word words[n];

    __device__ __forceinline__ void load(const Element* from, bool exists) {
#pragma unroll
        for (int i = 0; i < n; i++) words[i] = exists ? __ldcg(reinterpret_cast<const Word*>(from) + i) : Word{};
    }
    __device__ __forceinline__ void add_to(float (&sum)[4 * Per], float share) const {
        if constexpr (means) {
            const auto* const pairs = reinterpret_cast<const __half2*>(words);
#pragma unroll
            for (int i = 0; i < 2 * Per; i++) {
                const float2 of = __half22float2(pairs[i]);
                sum[2 * i] += share * of.x;
                sum[2 * i + 1] += share * of.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < Per; i++) {
                sum[4 * i] += share * words[i].x;
                sum[4 * i + 1] += share * words[i].y;
                sum[4 * i + 2] += share * words[i].z;
                sum[4 * i + 3] += share * words[i].w;
            }
        }
    }
};

// Maxima and sums of a row's parts, a lane each and every 32nd after it.
constexpr int held_parts = (most_parts + 31) / 32;

__device__ __forceinline__ void load_maxima(float2 (&of)[held_parts], const CutProblem& p, int at, int count,
                                            int lane) {
    const int64_t all_rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const auto* const maxima = reinterpret_cast<const float2*>(p.partial_ml) + at;
#pragma unroll
    for (int k = 0; k < held_parts; k++) {
        const int part = 32 * k + lane;
        of[k] = part < count ? __ldcg(maxima + part * all_rows) : make_float2(-INFINITY, 0.0f);
    }
}

__device__ __forceinline__ float highest(const float2 (&of)[held_parts]) {
    float top = of[0].x;
#pragma unroll
    for (int k = 1; k < held_parts; k++) top = fmaxf(top, of[k].x);
    return warp_max(top);
}

// What weights relative to a part's own maximum count for, to of[k].x; returns this lane's weights.
__device__ __forceinline__ float share_out(float2 (&of)[held_parts], float top) {
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < held_parts; k++) {
        const float share = of[k].y > 0.0f ? power_of_two(of[k].x - top) : 0.0f;
        total += of[k].y * share;
        of[k].x = share;
    }
    return total;
}

template <int Per, bool Joins>
struct MergeShared {
    float shares[merged_rows][Joins ? most_parts : 1];  // of the full rows' parts, normalised
    int full_rows[merged_rows];
    int full_counts[merged_rows];
    float4 z[64 * Per];  // merged: of a channel its rows
    // sent by each block in turn, rounded up; or of the blocks so far
    float results[merged_rows * most_head_dim + largest_cluster];
    uint64_t arrived;
    bool last;
};

template <class Left, int Per, Product By, bool Joins>
struct MergeBlock {
    using Args = typename Left::Args;
    using Channels = PartChannels<Left::means, Per>;
    using Element = typename Channels::Element;
    static constexpr int width = 64 * Per;
    static constexpr int per_lane = width / 8;
    // parts that are on their way at once, as far as registers go: of many tokens each has few
    static constexpr int ahead = Per == 4 || By == Product::whole ? 2 : 6;
    using Factor = __half2[per_lane];

    const Args& p;
    const CutProblem& full;
    MergeShared<Per, Joins>& own;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int eighth = lane / 4;
    const int head_kv = static_cast<int>(blockIdx.x);
    const int blocks = static_cast<int>(gridDim.y);
    const int first_row = static_cast<int>(blockIdx.z) * merged_rows;
    const bool together = By == Product::shared && cluster_blocks() > 1;
    const int n_pairs = p.head_dim / 2;
    const int n_results = merged_rows * p.head_dim;
    const int share =
        By == Product::shared ? (n_results + blocks - 1) / blocks : n_results;  // that a thread block adds up
    const int rep = small_quotient(p.n_head, p.n_kv);
    const int n_rows = p.n_tokens * rep;
    const int all_rows = p.n_tokens * p.n_head;
    const int all = 64 * p.v_blocks;
    const int first_channel = width / 4 * (warp % 4) + 4 * Per * (lane % 4);  // of those that this lane merges
    const int bits = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;         // counted by bits 4, 3 and 2

    __device__ __forceinline__ int row_at(int row) const {
        const int token = small_quotient(row, rep);
        return token * p.n_head + head_kv * rep + row - token * rep;
    }

    // What a lane multiplies: channels eighth + 8k with pair lane % 4 of four pairs of dimensions.
    __device__ __forceinline__ void load_factor(Factor& b, int block, int pair) const {
        const int channel = width * block + eighth;
        const auto* const from = reinterpret_cast<const __half2*>(p.v_b) +
                                 (static_cast<int64_t>(head_kv) * p.v_rank_max + channel) * n_pairs + lane % 4 + pair;
#pragma unroll
        for (int k = 0; k < per_lane; k++) {
            b[k] = pair < n_pairs && channel + 8 * k < p.v_rank_max
                       ? __ldg(from + static_cast<int64_t>(8 * k) * n_pairs)
                       : __half2{};
        }
    }

    // What it merges: 4·Per channels of its warp's row, of parts eighth + 8k.
    __device__ __forceinline__ const Element* channels_of(int at, int block) const {
        return reinterpret_cast<const Element*>(p.partial) + (static_cast<int64_t>(eighth) * all_rows + at) * all +
               width * block + first_channel;
    }
    __device__ __forceinline__ void load(Channels& x, const Element* from, int k, int count) const {
        x.load(from + k * (int64_t{8} * all_rows * all), eighth + 8 * k < count);
    }

    // This lane's parts' shares to of[k].x; those of the full rows' parts to shared memory. Returns the inverse of the sum of weights.
    // full_count: parts of the full rows
    __device__ __forceinline__ float weigh(float2 (&of)[held_parts], float2 (&beside)[held_parts], int at,
                                           int full_count) const {
        float top = highest(of);
        if constexpr (Joins) top = fmaxf(top, highest(beside));
        float total = share_out(of, top);
        if constexpr (Joins) total += share_out(beside, top);
#pragma unroll
        for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
        const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
        if constexpr (Left::means) {
#pragma unroll
            for (int k = 0; k < held_parts; k++) of[k].x *= of[k].y;
        }
        if (Joins && warp % 4 == 0) {
#pragma unroll
            for (int k = 0; k < held_parts; k++) {
                if (32 * k + lane < full_count) own.shares[warp / 4][32 * k + lane] = beside[k].x * inverse;
            }
            if (lane == 0) {
                own.full_rows[warp / 4] = at;
                own.full_counts[warp / 4] = full_count;
            }
        }
        return inverse;
    }

    // The row's channels of one block to z. x: the first parts, which are on their way.
    __device__ __forceinline__ void merge(Channels (&x)[ahead], const Element* from, const float2 (&of)[held_parts],
                                          int count, bool exists, float inverse) const {
        const auto share_of = [&](int k) { return __shfl_sync(0xffffffffu, of[k / 4].x, eighth + 8 * (k % 4)); };
        float sum[4 * Per] = {};
#pragma unroll
        for (int k = 0; k < ahead; k++) x[k].add_to(sum, share_of(k));
#pragma unroll
        for (int k0 = ahead; 8 * k0 < most_parts; k0 += ahead) {
            if (8 * k0 >= count) break;
#pragma unroll
            for (int k = 0; k < ahead; k++) load(x[k], from, k0 + k, count);
#pragma unroll
            for (int k = 0; k < ahead; k++) {
                if (k0 + k < 4 * held_parts) x[k].add_to(sum, share_of(k0 + k));
            }
        }
        // lanes of eight parts: each is left with one of eight channels or, of four, two with the same
        constexpr int at_once = Per == 1 ? 4 : 8;
#pragma unroll
        for (int h = 0; h < 4 * Per / at_once; h++) {
            float channels[at_once];
#pragma unroll
            for (int i = 0; i < at_once; i++) channels[i] = sum[at_once * h + i];
            const float merged = sum_of_eight(channels, lane) * inverse;
            const int left = at_once * h + (at_once == 8 ? bits : bits / 2);
            reinterpret_cast<float*>(own.z + first_channel + left)[warp / 4] = exists ? merged : 0.0f;
        }
    }

    // What the full rows add to dimension d of a row.
    __device__ __forceinline__ float joined(int of_row, int d) const {
        float sum = 0.0f;
        if constexpr (Joins) {
            const float* const sums =
                full.partial + static_cast<int64_t>(own.full_rows[of_row]) * 64 * full.v_blocks + d;
            const int count = own.full_counts[of_row];
#pragma unroll 4
            for (int s = 0; s < count; s++) {
                const float of = own.shares[of_row][s];
                if (of > 0.0f) sum += of * __ldcg(sums + static_cast<int64_t>(s) * all_rows * 64 * full.v_blocks);
            }
        }
        return sum;
    }

    // f(row, dimension, sum over the block's channels), of what this thread is left with. b: factors of the warp's first pairs
    template <class Use>
    __device__ __forceinline__ void multiply(Factor& b, int block, Use&& use) const {
#pragma unroll 1
        for (int pair = 4 * warp; pair < n_pairs; pair += merge_threads / 8) {
            if (pair != 4 * warp) load_factor(b, block, pair);
            float sum[2 * merged_rows] = {};  // [row][of the pair]
#pragma unroll
            for (int k = 0; k < per_lane; k++) {
                const float2 by = __half22float2(b[k]);
                const float4 rows = own.z[eighth + 8 * k];
                sum[0] += rows.x * by.x;
                sum[1] += rows.x * by.y;
                sum[2] += rows.y * by.x;
                sum[3] += rows.y * by.y;
                sum[4] += rows.z * by.x;
                sum[5] += rows.z * by.y;
                sum[6] += rows.w * by.x;
                sum[7] += rows.w * by.y;
            }
            const float result = sum_of_eight(sum, lane);
            use(bits / 2, 2 * (pair + lane % 4) + bits % 2, result);
        }
    }

    // What the full rows add to result i of the thread block's four rows, and where it goes.
    __device__ __forceinline__ float joined_to(int i) const { return joined(i / p.head_dim, i % p.head_dim); }
    __device__ __forceinline__ void put(int i, float result) const {
        const int of_row = i / p.head_dim;
        if (first_row + of_row >= n_rows) return;
        p.out[static_cast<int64_t>(row_at(first_row + of_row)) * p.head_dim + i - of_row * p.head_dim] = result;
    }

    // Product::shared: each thread block adds up its share of what all have sent, or the last one what all have left in memory.
    __device__ __forceinline__ void share_results(Factor& b, int block) const {
        float* const scratch = reinterpret_cast<float*>(reinterpret_cast<Element*>(p.partial) +
                                                        static_cast<int64_t>(p.n_split) * all_rows * all);
        float first_joined = 0.0f;  // to this thread's first result, on its way meanwhile
        if (together && thread < share && block * share + thread < n_results) {
            first_joined = joined_to(block * share + thread);
        }
        if (together) cluster_wait();  // the others' barriers are there
        multiply(b, block, [&](int of_row, int d, float result) {
            const int index = of_row * p.head_dim + d;
            if (together) {
                const int owner = index / share;
                send(in_block(own.results + block * share + index - owner * share, owner), result,
                     in_block(&own.arrived, owner));
            } else if (blocks == 1) {
                put(index, result + joined(of_row, d));
            } else if (first_row + of_row < n_rows) {
                scratch[(static_cast<int64_t>(block) * all_rows + row_at(first_row + of_row)) * p.head_dim + d] =
                    result;
            }
        });
        if (blocks == 1) return;
        if (together) {
            Arrivals(&own.arrived).wait(0);
            for (int i = thread; i < share && block * share + i < n_results; i += merge_threads) {
                float sum = i == thread ? first_joined : joined_to(block * share + i);
                for (int k = 0; k < blocks; k++) sum += own.results[k * share + i];
                put(block * share + i, sum);
            }
            return;
        }
        if (!is_last(p.done + blockIdx.z * p.n_kv + blockIdx.x, static_cast<unsigned>(blocks), own.last)) return;
        for (int i = thread; i < n_results; i += merge_threads) {
            const int of_row = i / p.head_dim;
            if (first_row + of_row >= n_rows) continue;
            const int64_t at = static_cast<int64_t>(row_at(first_row + of_row)) * p.head_dim + i - of_row * p.head_dim;
            float sum = joined_to(i);
            for (int k = 0; k < blocks; k++)
                sum += __ldcg(scratch + static_cast<int64_t>(k) * all_rows * p.head_dim + at);
            put(i, sum);
        }
    }

    // Product::whole: block after block of channels, whose results add up in shared memory.
    __device__ __forceinline__ void add_result(int block, int of_row, int d, float result) const {
        float& to = own.results[of_row * p.head_dim + d];
        to = block == 0 ? result : to + result;
    }

    // Product::none: merged channels are results.
    __device__ __forceinline__ void put_channels(int block) const {
        if (p.v_hadamard != 0) return put_times_hadamard(block);
        for (int i = thread; i < merged_rows * width; i += merge_threads) {
            const int d = width * block + i % width;
            if (d >= p.head_dim) continue;
            const float merged = reinterpret_cast<const float*>(own.z + i % width)[i / width];
            put(i / width * p.head_dim + d, merged + joined(i / width, d));
        }
    }

    // The same times the Hadamard matrix that V was stored with: a warp a row, of 64 channels two a lane.
    __device__ __forceinline__ void put_times_hadamard(int block) const {
        if (warp >= merged_rows) return;
        for (int first = 0; first < width; first += 64) {
            float of[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int d = width * block + first + 32 * i + lane;
                const float merged = reinterpret_cast<const float*>(own.z + first + 32 * i + lane)[warp];
                of[i] = d < p.head_dim ? merged + joined(warp, d) : 0.0f;
            }
            times_hadamard(of, p.v_hadamard, lane);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int d = width * block + first + 32 * i + lane;
                if (d < p.head_dim) put(warp * p.head_dim + d, of[i]);
            }
        }
    }
};

// grid: KV heads x thread blocks that share out channels, 64·Per each x groups of four query rows. Joins: with the parts of `full`.
template <class Left, int Per, Product By, bool Joins>
__global__ void __launch_bounds__(merge_threads, By == Product::whole ? 2 : 1)
    merge_kernel(const __grid_constant__ typename Left::Args p, const __grid_constant__ CutProblem full) {
    using Block = MergeBlock<Left, Per, By, Joins>;
    using Channels = typename Block::Channels;
    let_next_start();
    __shared__ MergeShared<Per, Joins> own;
    Left left(p);
    const Block of{p, full, own};
    if (of.together) {
        if (threadIdx.x == 0) {
            Arrivals(&own.arrived).init();
            const int mine = min(of.share, of.n_results - static_cast<int>(blockIdx.y) * of.share);
            Arrivals(&own.arrived).announce(static_cast<uint32_t>(max(0, mine) * of.blocks * 4));
        }
        cluster_arrive_relaxed();
    }
    const int n_blocks = By == Product::whole ? (p.v_blocks + Per - 1) / Per : 1;
    int block = static_cast<int>(blockIdx.y);
    typename Block::Factor b;
    if constexpr (By != Product::none) of.load_factor(b, block, 4 * of.warp);
    const int row = of.first_row + of.warp / 4;
    const bool exists = row < of.n_rows;
    int count = exists ? left.parts_of(p, small_quotient(row, of.rep)) : 0;
    const int at = exists ? of.row_at(row) : 0;
    const int full_count = Joins && exists ? LeftSums(full).parts_of(full, small_quotient(row, of.rep)) : 0;
    wait_for_previous();
    if (p.apart != 0 && p.late_slots != 0) count = exists ? left.parts_of(p, small_quotient(row, of.rep)) : 0;
    if constexpr (By == Product::none && !Joins && !Left::means) {
        if (p.late_slots != 0) {
            left = Left(p);
            count = exists ? left.parts_of(p, 0) : 0;
        }
        // the only part wrote the result
        if (p.apart == 0 && p.leaves == Leaves::results && left.parts_of(p, 0) == 1) return;
    }

    float2 maxima[held_parts];
    float2 beside[held_parts];
    Channels x[Block::ahead];
    load_maxima(maxima, p, at, count, of.lane);
    if constexpr (Joins) load_maxima(beside, full, at, full_count, of.lane);
    const auto fetch = [&](int block) {
        const bool has = Block::width * block + of.first_channel < of.all;
        const typename Block::Element* const from = of.channels_of(at, block);
#pragma unroll
        for (int k = 0; k < Block::ahead; k++) of.load(x[k], from, k, has ? count : 0);
    };
    fetch(block);
    const float inverse = of.weigh(maxima, beside, at, full_count);
#pragma unroll 1
    for (int end = block + n_blocks; block < end; block++) {
        if (By == Product::whole && block > 0) {
            of.load_factor(b, block, 4 * of.warp);
            fetch(block);
        }
        const bool has = Block::width * block + of.first_channel < of.all;
        of.merge(x, of.channels_of(at, block), maxima, has ? count : 0, exists, inverse);
        __syncthreads();
        if constexpr (By == Product::shared) of.share_results(b, block);
        if constexpr (By == Product::none) of.put_channels(block);
        if constexpr (By == Product::whole) {
            of.multiply(b, block, [&](int of_row, int d, float result) { of.add_result(block, of_row, d, result); });
            __syncthreads();
        }
    }
    if constexpr (By == Product::whole) {
        for (int i = of.thread; i < of.n_results; i += merge_threads) of.put(i, own.results[i] + of.joined_to(i));
    }
}

template <class Left, int Per, Product By>
cudaError_t launch_merge(const typename Left::Args& args, const CutProblem* full, unsigned blocks,
                         cudaStream_t stream) {
    const int rows = args.n_tokens * (args.n_head / args.n_kv);
    const dim3 grid(static_cast<unsigned>(args.n_kv), blocks,
                    static_cast<unsigned>((rows + merged_rows - 1) / merged_rows));
    const dim3 cluster(1, By == Product::shared && device_chains() ? blocks : 1);
    const auto kernel = full != nullptr ? merge_kernel<Left, Per, By, true> : merge_kernel<Left, Per, By, false>;
    return launch_clusters(cluster, kernel, grid, merge_threads, 0, stream, args,
                           full != nullptr ? *full : static_cast<const CutProblem&>(args));
}

// V latent, of few tokens: as many blocks of channels as a cluster has thread blocks.
template <class Left, int Per = 1>
cudaError_t merge_few(const typename Left::Args& args, const CutProblem* full, cudaStream_t stream) {
    if constexpr (Per < (Left::means ? 2 : 4)) {
        if (args.v_blocks > largest_cluster * Per) return merge_few<Left, 2 * Per>(args, full, stream);
    }
    const auto blocks = static_cast<unsigned>((args.v_blocks + Per - 1) / Per);
    return launch_merge<Left, Per, Product::shared>(args, full, blocks, stream);
}

}  // namespace lkv::cuda
