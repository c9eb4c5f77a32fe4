#include "ops/cuda/softmax/combine.h"

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/cluster.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/softmax/combine_head.cuh"
#include "ops/cuda/softmax/join.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

namespace {

// weight[s] = what part s counts for in one row, normalised. By one warp.
__device__ void part_weights(const CutProblem& p, int count, int64_t rows, int64_t row, float* weight) {
    const int lane = threadIdx.x % 32;
    const auto* const ml = reinterpret_cast<const float2*>(p.partial_ml) + row;
    float top = -INFINITY;
    for (int s = lane; s < count; s += 32) top = fmaxf(top, ml[s * rows].x);
    for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    float total = 0.0f;
    for (int s = lane; s < count; s += 32) {
        const float2 part = ml[s * rows];
        weight[s] = part.y > 0.0f ? exp2f(part.x - top) : 0.0f;
        total += part.y * weight[s];
    }
    for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (int s = lane; s < count; s += 32) weight[s] *= inverse;
}

// to[t][d]: the parts' sums of channels begin … begin + width - 1, weighted. `slices` threads share an element.
template <int T, int threads>
__device__ void merge_parts(const CutProblem& p, int count, int64_t rows, int64_t row0, int64_t row_step, int n_tokens,
                            int begin, int width, const float* weight, float* scratch, float* to) {
    const int all = 64 * p.v_blocks;
    const int n = T * width;
    const int slices = max(1, threads / n);
    for (int i0 = 0; i0 < n; i0 += threads) {
        const int i = i0 + threadIdx.x % min(n, threads);
        const int slice = threadIdx.x / min(n, threads);
        const int t = i / width;
        float sum = 0.0f;
        if (slice < slices && i < n && t < n_tokens) {
            const float* const from = p.partial + (row0 + t * row_step) * all + begin + (i - t * width);
#pragma unroll 8
            for (int s = slice; s < count; s += slices) sum += weight[t * p.n_split + s] * from[s * rows * all];
        }
        if (slices == 1) {
            if (i < n) to[i] = sum;
            continue;
        }
        scratch[threadIdx.x] = sum;
        __syncthreads();
        if (slice == 0) {
            for (int s = 1; s < slices; s++) sum += scratch[s * n + i];
            to[i] = sum;
        }
    }
    __syncthreads();
}

// out[t][d0 … d0 + 2·n_pairs - 1] = z[t] · B_v of one head. The threads left over share out the latent's channels.
template <int T, int threads>
__device__ void project(const CutProblem& p, int head, int first, int n_tokens, int d0, int n_pairs, const float* z,
                        int z_pitch, float* scratch) {
    const int row_pairs = p.head_dim / 2;
    const int rank = min(p.v_rank_max, z_pitch);
    const int slices = threads / n_pairs;
    const int slice = threadIdx.x / n_pairs;
    const int pair = threadIdx.x % n_pairs;
    float2 sum[T] = {};
    if (slice < slices) {
        const auto* const factor = reinterpret_cast<const __half2*>(p.v_b) +
                                   static_cast<int64_t>(head / (p.n_head / p.n_kv)) * p.v_rank_max * row_pairs +
                                   d0 / 2 + pair;
#pragma unroll 8
        for (int ch = slice; ch < rank; ch += slices) {
            const float2 b = __half22float2(__ldg(factor + static_cast<int64_t>(ch) * row_pairs));
#pragma unroll
            for (int t = 0; t < T; t++) {
                sum[t].x += z[t * z_pitch + ch] * b.x;
                sum[t].y += z[t * z_pitch + ch] * b.y;
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float* const to = scratch + 2 * ((slice * T + t) * n_pairs + pair);
            to[0] = sum[t].x;
            to[1] = sum[t].y;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < T * 2 * n_pairs; i += threads) {
        const int t = i / (2 * n_pairs);
        if (t >= n_tokens) continue;
        float total = 0.0f;
        for (int s = 0; s < slices; s++) total += scratch[s * T * 2 * n_pairs + i];
        const int64_t row = static_cast<int64_t>(first + t) * p.n_head + head;
        p.out[row * p.head_dim + d0 + i % (2 * n_pairs)] = total;
    }
}

// grid: heads x tokens / T. V as it is, or a latent of at most widest_merged_by_one channels.
template <int T, int threads>
__global__ void __launch_bounds__(threads) combine_kernel(const __grid_constant__ CutProblem p) {
    let_next_start();
    wait_for_previous();
    const Parts parts(p);
    if (parts.count == 1 && p.v_b == nullptr) return;  // the only part wrote the result
    extern __shared__ float shared[];
    const int width = 64 * p.v_blocks;
    const int head = blockIdx.x;
    const int first = blockIdx.y * T;
    const int n_tokens = min(T, p.n_tokens - first);
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const int64_t row0 = static_cast<int64_t>(first) * p.n_head + head;
    float* const latent = shared;              // [T, width]
    float* const weight = shared + T * width;  // [T, n_split]
    float* const scratch = weight + T * p.n_split;
    for (int t = threadIdx.x / 32; t < n_tokens; t += threads / 32) {
        part_weights(p, parts.count, rows, row0 + static_cast<int64_t>(t) * p.n_head, weight + t * p.n_split);
    }
    __syncthreads();
    merge_parts<T, threads>(p, parts.count, rows, row0, p.n_head, n_tokens, 0, width, weight, scratch, latent);
    if (p.v_b != nullptr) {
        project<T, threads>(p, head, first, n_tokens, 0, p.head_dim / 2, latent, width, scratch);
        return;
    }
    for (int i = threadIdx.x; i < n_tokens * p.head_dim; i += threads) {
        const int t = i / p.head_dim;
        const int d = i - t * p.head_dim;
        p.out[(row0 + static_cast<int64_t>(t) * p.n_head) * p.head_dim + d] = latent[t * width + d];
    }
}

constexpr int merge_threads = 512;
constexpr int merge_channels = 64;

// grid: rows x channels / 64. A wide latent, into the part after the last.
__global__ void __launch_bounds__(merge_threads) merge_kernel(const __grid_constant__ CutProblem p) {
    let_next_start();
    wait_for_previous();
    const Parts parts(p);
    __shared__ float scratch[merge_threads];
    __shared__ float merged[merge_channels];
    extern __shared__ float weight[];
    const int width = 64 * p.v_blocks;
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const int64_t row = blockIdx.x;
    const int begin = blockIdx.y * merge_channels;
    if (threadIdx.x < 32) part_weights(p, parts.count, rows, row, weight);
    __syncthreads();
    merge_parts<1, merge_threads>(p, parts.count, rows, row, 0, 1, begin, merge_channels, weight, scratch, merged);
    if (threadIdx.x < merge_channels) {
        p.partial[(p.n_split * rows + row) * width + begin + threadIdx.x] = merged[threadIdx.x];
    }
}

constexpr int project_threads = 256;
constexpr int project_pairs = 16;

// grid: heads x dimensions / 32 x tokens / T.
template <int T>
__global__ void __launch_bounds__(project_threads) project_kernel(const __grid_constant__ CutProblem p) {
    let_next_start();
    wait_for_previous();
    extern __shared__ float shared[];
    const int width = 64 * p.v_blocks;
    const int head = blockIdx.x;
    const int d0 = blockIdx.y * 2 * project_pairs;
    const int first = blockIdx.z * T;
    const int n_tokens = min(T, p.n_tokens - first);
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    // a single part was not merged: it is the first, and its sums are not normalised
    const int64_t from = p.n_split == 1 ? 0 : p.n_split * rows;
    float* const z = shared;  // [T, width]
    for (int i = threadIdx.x; i < T * width; i += project_threads) {
        const int t = i / width;
        const int64_t row = static_cast<int64_t>(first + t) * p.n_head + head;
        float value = 0.0f;
        if (t < n_tokens) {
            value = p.partial[(from + row) * width + i - t * width];
            if (p.n_split == 1) {
                const float sum = p.partial_ml[2 * row + 1];
                value = sum > 0.0f ? value / sum : 0.0f;
            }
        }
        z[i] = value;
    }
    __syncthreads();
    project<T, project_threads>(p, head, first, n_tokens, d0, min(project_pairs, (p.head_dim - d0) / 2), z, width,
                                z + T * width);
}

constexpr int wide_threads = 512;
constexpr int wide_warps = wide_threads / 32;
constexpr int wide_rows = 4;  // query rows that share one reading of B_v

// Division by multiplication: a dividend below 1024, a divisor of at most 512. Where all multiprocessors were busy before, the
// kernel's set-up is waited for: with six divisions in it a layer took 1 to 2 us more.
struct Divisor {
    uint32_t n;
    uint32_t reciprocal;  // 2^20 / n, rounded up
    explicit Divisor(int of) : n(static_cast<uint32_t>(of)), reciprocal(((1u << 20) + n - 1) / n) {}
};
struct Quotient {
    int whole, rest;
    __device__ Quotient(int of, const Divisor& by)
        : whole(static_cast<int>(static_cast<uint32_t>(of) * by.reciprocal >> 20)),
          rest(of - whole * static_cast<int>(by.n)) {}
};

// What combine_wide_kernel divides by: pairs of dimensions, query heads of a KV head, results that a thread block of a cluster adds up.
struct CombinePlan {
    Divisor pairs, rep, per_block;
    int32_t n_slices, per_slice;  // of 64 channels: slices and channels of each
    CombinePlan(const CutProblem& p, int blocks)
        : pairs(p.head_dim / 2),
          rep(p.n_head / p.n_kv),
          per_block((wide_rows * p.head_dim / 2 + blocks - 1) / blocks),
          n_slices(2 * wide_threads / p.head_dim),
          per_slice((64 + n_slices - 1) / n_slices) {}
};

// The weights of the parts in query row `row`, normalised, to weight[s]. By one warp.
__device__ void warp_weights(const float2* ml, int count, int64_t step, float* weight) {
    constexpr int held = (most_parts + 31) / 32;
    const int lane = threadIdx.x % 32;
    float2 part[held];
    float top = -INFINITY;
#pragma unroll
    for (int k = 0; k < held; k++) {
        const int s = 32 * k + lane;
        part[k] = s < count ? __ldcg(ml + s * step) : make_float2(-INFINITY, 0.0f);
    }
#pragma unroll
    for (int k = 0; k < held; k++) top = fmaxf(top, part[k].x);
#pragma unroll
    for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < held; k++) {
        if (32 * k >= count) break;
        const float share = part[k].y > 0.0f ? exp2f(part[k].x - top) : 0.0f;
        total += part[k].y * share;
        part[k].x = share;
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int k = 0; k < held; k++) {
        if (32 * k + lane < count) weight[32 * k + lane] = part[k].x * inverse;
    }
    __syncwarp();
}

// A wide latent V, few query rows: both in one launch. grid: KV heads x 64-channel blocks. Every thread block merges the parts of
// its channels and multiplies them with their rows of B_v. Where the thread blocks of a head are a cluster each adds up some of
// the results that the others have sent into its shared memory; elsewhere the last one adds up what all left in memory (3 us of a
// short cache's 9). The sums of the blocks come in their order.
__global__ void __launch_bounds__(wide_threads, 2)
    combine_wide_kernel(const __grid_constant__ CutProblem p, const __grid_constant__ CombinePlan by) {
    let_next_start();
    extern __shared__ __align__(16) float weights[];  // [wide_warps][n_split]
    __shared__ float4 z[64];                          // of a channel wide_rows rows
    __shared__ float2 sums[wide_rows][wide_threads];
    __shared__ float2 sent[wide_threads + largest_cluster];  // by every block of the cluster, `per_block` each
    __shared__ bool last;
    const bool together = cluster_blocks() > 1;
    const int blocks = cluster_blocks();
    const int rank = cluster_rank();
    const bool alone = gridDim.y == 1;
    if (together) cluster_arrive_relaxed();  // the others have started
    const int n_pairs = static_cast<int>(by.pairs.n);
    const auto [slice, pair] = Quotient(static_cast<int>(threadIdx.x), by.pairs);
    const int n_slices = by.n_slices;
    const int per_slice = by.per_slice;
    const int first_channel = 64 * blockIdx.y + slice * per_slice;
    const int channels =
        slice < n_slices ? max(0, min(min(per_slice, 64 - slice * per_slice), p.v_rank_max - first_channel)) : 0;
    const auto* const factor = reinterpret_cast<const __half2*>(p.v_b) +
                               (static_cast<int64_t>(blockIdx.x) * p.v_rank_max + first_channel) * n_pairs + pair;
    // weights, which no earlier kernel writes: they come while the parts are still at work
    constexpr int held = 8;
    __half2 b[held];
#pragma unroll
    for (int ch = 0; ch < held; ch++) {
        b[ch] = ch < channels ? __ldg(factor + static_cast<int64_t>(ch) * n_pairs) : __half2{};
    }
#pragma unroll 1
    for (int ch = held; ch < channels; ch++) prefetch(factor + static_cast<int64_t>(ch) * n_pairs);
    const Parts parts(p);
    const int rep = static_cast<int>(by.rep.n);
    const int n_rows = p.n_tokens * rep;  // of this KV head
    const int width = 64 * p.v_blocks;
    const int all_rows = p.n_tokens * p.n_head;
    const auto row_at = [&](int row) {
        const Quotient of(row, by.rep);
        return of.whole * p.n_head + static_cast<int>(blockIdx.x) * rep + of.rest;
    };
    float* const scratch =
        p.partial + static_cast<int64_t>(p.n_split) * all_rows * width;  // [v_blocks][all_rows][head_dim]

    // A warp has 16 channels of a row: four quads, whose parts eight lanes share.
    constexpr int turns = 8;
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 / (wide_warps / wide_rows);
    const int quad = threadIdx.x / 32 % (wide_warps / wide_rows) * 4 + lane % 4;
    const int turn = lane / 4;
    float* const weight = weights + threadIdx.x / 32 * p.n_split;
    const int64_t step = static_cast<int64_t>(all_rows) * width / 4;
    int at = row_at(row);  // of row0 + row, below; divisions take their time before the parts are there
    // results of a step, pairs of dimensions: this thread's sum over the slices of `slice`'s row, and who adds up the blocks' sums
    const int per_block = static_cast<int>(by.per_block.n);
    const Quotient owner(static_cast<int>(threadIdx.x), by.per_block);
    const uint32_t there = owner.whole < blocks ? in_block(sent + rank * per_block + owner.rest, owner.whole) : 0;
    const int own = rank * per_block + static_cast<int>(threadIdx.x);
    const auto [own_row, own_pair] = Quotient(own, by.pairs);
    int own_at = row_at(own_row);
    wait_for_previous();
#pragma unroll 1
    for (int row0 = 0; row0 < n_rows; row0 += wide_rows) {
        const int rows = min(wide_rows, n_rows - row0);
        float4 sum_z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < rows) {
            if (row0 > 0) at = row_at(row0 + row);
            const auto* const from =
                reinterpret_cast<const float4*>(p.partial + static_cast<int64_t>(at) * width + 64 * blockIdx.y) + quad;
            // on their way before their weights are known
            constexpr int ahead = 2;
            float4 first[ahead];
#pragma unroll
            for (int k = 0; k < ahead; k++) {
                const int s = turn + k * turns;
                first[k] = s < parts.count ? __ldcg(from + s * step) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
            warp_weights(reinterpret_cast<const float2*>(p.partial_ml) + at, parts.count, all_rows, weight);
#pragma unroll
            for (int k = 0; k < ahead; k++) {
                if (turn + k * turns < parts.count) add_share(sum_z, weight[turn + k * turns], first[k]);
            }
#pragma unroll 8
            for (int s = turn + ahead * turns; s < parts.count; s += turns) {
                add_share(sum_z, weight[s], __ldcg(from + s * step));
            }
#pragma unroll
            for (int o = 4; o < 32; o *= 2) {
                sum_z.x += __shfl_xor_sync(0xffffffffu, sum_z.x, o);
                sum_z.y += __shfl_xor_sync(0xffffffffu, sum_z.y, o);
                sum_z.z += __shfl_xor_sync(0xffffffffu, sum_z.z, o);
                sum_z.w += __shfl_xor_sync(0xffffffffu, sum_z.w, o);
            }
        }
        if (turn == 0) {
            float* const to = reinterpret_cast<float*>(z + 4 * quad) + row;
            to[0] = sum_z.x;
            to[wide_rows] = sum_z.y;
            to[2 * wide_rows] = sum_z.z;
            to[3 * wide_rows] = sum_z.w;
        }
        __syncthreads();
        float2 sum[wide_rows] = {};
        const auto add_channel = [&](int ch, __half2 factors) {
            const float2 by = __half22float2(factors);
            const float4 x = z[slice * per_slice + ch];
            sum[0].x += x.x * by.x;
            sum[0].y += x.x * by.y;
            sum[1].x += x.y * by.x;
            sum[1].y += x.y * by.y;
            sum[2].x += x.z * by.x;
            sum[2].y += x.z * by.y;
            sum[3].x += x.w * by.x;
            sum[3].y += x.w * by.y;
        };
#pragma unroll
        for (int ch = 0; ch < held; ch++) {
            if (ch < channels) add_channel(ch, b[ch]);
        }
#pragma unroll 8
        for (int ch = held; ch < channels; ch++) add_channel(ch, __ldg(factor + static_cast<int64_t>(ch) * n_pairs));
#pragma unroll
        for (int k = 0; k < wide_rows; k++) sums[k][threadIdx.x] = sum[k];
        __syncthreads();
        if (together && row0 == 0) cluster_wait();
        if (slice < rows) {  // at most one result a thread: head_dim <= 256
            float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 8
            for (int k = 0; k < n_slices; k++) {
                total.x += sums[slice][k * n_pairs + pair].x;
                total.y += sums[slice][k * n_pairs + pair].y;
            }
            if (together) {
                store_there(there, total);
            } else {
                const int64_t to = static_cast<int64_t>(blockIdx.y) * all_rows + row_at(row0 + slice);
                reinterpret_cast<float2*>((alone ? p.out : scratch) + to * p.head_dim)[pair] = total;
            }
        }
        if (!together) {
            __syncthreads();
            continue;
        }
        cluster_arrive();
        cluster_wait();
        if (static_cast<int>(threadIdx.x) < per_block && own_row < rows) {
            float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < largest_cluster; k++) {
                if (k >= blocks) break;
                total.x += sent[k * per_block + threadIdx.x].x;
                total.y += sent[k * per_block + threadIdx.x].y;
            }
            if (row0 > 0) own_at = row_at(row0 + own_row);
            reinterpret_cast<float2*>(p.out + static_cast<int64_t>(own_at) * p.head_dim)[own_pair] = total;
        }
        if (row0 + wide_rows < n_rows) {  // `sent` is read
            cluster_arrive();
            cluster_wait();
        }
    }
    if (together || alone) return;
    if (!is_last(p.done + blockIdx.x, gridDim.y, last)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < n_rows * n_pairs; i += wide_threads) {
        const int to_row = i / n_pairs;
        const int64_t to = static_cast<int64_t>(row_at(to_row)) * n_pairs + i - to_row * n_pairs;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int k = 0; k < static_cast<int>(gridDim.y); k++) {
            const float2 x =
                __ldcg(reinterpret_cast<const float2*>(scratch) + static_cast<int64_t>(k) * all_rows * n_pairs + to);
            total.x += x.x;
            total.y += x.y;
        }
        reinterpret_cast<float2*>(p.out)[to] = total;
    }
}

// Whether combine_head_kernel takes the shape.
bool combines_heads(const CutProblem& args) {
    const int rows = args.n_tokens * (args.n_head / args.n_kv);
    const int blocks = args.v_blocks;
    return device_chains() && args.head_dim == combined_dims && rows <= combined_rows && blocks <= largest_cluster &&
           (blocks & (blocks - 1)) == 0;
}

cudaError_t combine_wide(const CutProblem& args, cudaStream_t stream) {
    const int blocks = args.v_blocks;
    const dim3 grid(static_cast<unsigned>(args.n_kv), static_cast<unsigned>(blocks));
    if (combines_heads(args)) {
        const auto kernel = args.n_split > few_parts ? combine_head_kernel<true> : combine_head_kernel<false>;
        return launch_clusters(dim3(1, grid.y), kernel, grid, combine_head_threads, 0, stream, args);
    }
    const bool together = device_chains() && blocks > 1 && blocks <= largest_cluster;
    const CombinePlan plan(args, together ? blocks : 1);
    return launch_clusters(dim3(1, together ? grid.y : 1), combine_wide_kernel, grid, wide_threads,
                           sizeof(float) * wide_warps * static_cast<size_t>(args.n_split), stream, args, plan);
}

template <int T, int threads>
cudaError_t combine_rows(const CutProblem& args, cudaStream_t stream) {
    const auto width = static_cast<size_t>(64 * args.v_blocks);
    const auto n_split = static_cast<size_t>(args.n_split);
    const auto heads = static_cast<unsigned>(args.n_head);
    const auto tokens = static_cast<unsigned>(args.n_tokens);
    const unsigned groups = (tokens + T - 1) / T;
    if (args.v_b == nullptr || width <= widest_merged_by_one) {
        return launch_next(combine_kernel<T, threads>, dim3(heads, groups), threads,
                           sizeof(float) * (T * (width + n_split) + 2 * T * static_cast<size_t>(threads)), stream,
                           args);
    }
    if (args.n_split > 1) {
        const cudaError_t error = launch_next(merge_kernel, dim3(heads * tokens, static_cast<unsigned>(args.v_blocks)),
                                              merge_threads, sizeof(float) * n_split, stream, args);
        if (error != cudaSuccess) return error;
    }
    const auto slices = static_cast<unsigned>((args.head_dim + 2 * project_pairs - 1) / (2 * project_pairs));
    return launch_next(project_kernel<T>, dim3(heads, slices, groups), project_threads,
                       sizeof(float) * (T * width + 2 * T * static_cast<size_t>(project_threads)), stream, args);
}

}  // namespace

cudaError_t merge_parts(const CutProblem& args, Merge how, cudaStream_t stream) {
    if (how == Merge::heads) return combine_wide(args, stream);
    // tokens that share one reading of B_v; their sums lie in shared memory
    if (args.n_tokens >= 64 && args.v_blocks <= 16) return combine_rows<16, 256>(args, stream);
    return args.n_tokens >= 4 ? combine_rows<4, 256>(args, stream) : combine_rows<1, 1024>(args, stream);
}

size_t parts_floats(const CutProblem& a, Merge how) {
    const size_t rows =
        static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * static_cast<size_t>(a.v_blocks);
    return rows * (static_cast<size_t>(a.n_split) * 64 + static_cast<size_t>(how == Merge::heads ? a.head_dim : 64));
}

cudaError_t join_parts(const CutProblem& full, const CutProblem& latents, cudaStream_t stream) {
    const auto rows = static_cast<unsigned>(latents.n_tokens * latents.n_head);
    return launch_next(join_kernel, dim3((rows + join_threads / 32 - 1) / (join_threads / 32)), join_threads, 0, stream,
                       full, latents);
}

}  // namespace lkv::cuda
