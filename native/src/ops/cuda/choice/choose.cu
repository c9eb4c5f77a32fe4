// The steps with the largest estimates. Thread blocks of a token share out its steps, and find the largest estimate of each, relative to the
// heads' sums; the last one to end finds the n_keep largest of these.
#include "ops/cuda/choice/choice.h"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/softmax/own_steps.cuh"

namespace lkv::cuda {

namespace {

constexpr int choose_warps = 16;
constexpr int choose_threads = 32 * choose_warps;
constexpr int most_heads = 256;

// Weights as integers: logarithms from -32 on in 2^16 parts of one; below that all are alike. 0: nothing is seen.
constexpr int key_bits = 22;
constexpr int bin_bits = 11;
constexpr int n_bins = 1 << bin_bits;

__device__ int key_of(float weight) {
    if (weight == -INFINITY) return 0;
    constexpr float most = static_cast<float>((1 << key_bits) - 2);
    return 1 + static_cast<int>(fminf(fmaxf((weight + 32.0f) * 65536.0f, 0.0f), most));
}

struct ChooseShared {
    float2 parts[choose_warps][32];
    float of_head[most_heads];  // logarithm of a head's sum
    uint32_t bins[n_bins];
    int counts[choose_warps];
    int bin, before;  // the bin in which the last chosen ones are, and how many are above it
    bool last;
};

__device__ float2 added(float2 a, float2 b) {
    const float top = fmaxf(a.x, b.x);
    if (top == -INFINITY) return a;
    return make_float2(top, a.y * power_of_two(a.x - top) + b.y * power_of_two(b.x - top));
}

// Logarithms of the heads' sums: of estimates, and of the weights in the windows.
__device__ void add_up_heads(const ChoiceArgs& p, const CutProblem& windows, int token, ChooseShared& own) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int n_windows = windows.n_split > 0 ? parts_of_token(windows, SlotCounts(windows), token) : 0;
    for (int first = 0; first < p.n_head; first += 32) {
        const int head = first + lane;
        float2 of = make_float2(-INFINITY, 0.0f);
        for (int part = warp; head < p.n_head && part < p.n_parts + n_windows; part += choose_warps) {
            const int64_t row = static_cast<int64_t>(token) * p.n_head + head;
            const auto* const maxima = reinterpret_cast<const float2*>(windows.partial_ml);
            const int64_t all_rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
            const float2 more = part < p.n_parts
                                    ? __ldcg(p.sums + (static_cast<int64_t>(token) * p.n_parts + part) * p.n_head + head)
                                    : __ldcg(maxima + (part - p.n_parts) * all_rows + row);
            if (more.y > 0.0f) of = added(of, more);
        }
        own.parts[warp][lane] = of;
        __syncthreads();
        if (warp == 0 && head < p.n_head) {
            for (int w = 1; w < choose_warps; w++) of = added(of, own.parts[w][lane]);
            own.of_head[head] = of.y > 0.0f ? of.x + log2f(of.y) : 0.0f;
        }
        __syncthreads();
    }
}

// The sum of x over the threads before this one; all: of all threads. By all threads.
__device__ int sum_before(int x, int* counts, int& all) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int until = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int before = __shfl_sync(0xffffffffu, until, max(lane - o, 0));
        if (lane >= o) until += before;
    }
    __syncthreads();  // the counts of the call before have been read
    if (lane == 31) counts[warp] = until;
    __syncthreads();
    int before = 0;
    all = 0;
    for (int w = 0; w < choose_warps; w++) {
        before += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    return before + until - x;
}

// Of the keys whose bits above `shift` + bin_bits are `above`, the bin in which the n-th largest is, and how many are in higher ones.
__device__ void find_bin(const float* weights, int n_steps, int above, int shift, int n, ChooseShared& own) {
    for (int i = static_cast<int>(threadIdx.x); i < n_bins; i += choose_threads) own.bins[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < n_steps; i += choose_threads) {
        const int key = key_of(__ldcg(weights + i));
        if (key > 0 && key >> (shift + bin_bits) == above) atomicAdd(&own.bins[key >> shift & (n_bins - 1)], 1u);
    }
    __syncthreads();
    constexpr int per_thread = n_bins / choose_threads;
    const int first = n_bins - 1 - per_thread * static_cast<int>(threadIdx.x);  // downwards
    int count = 0;
    for (int k = 0; k < per_thread; k++) count += static_cast<int>(own.bins[first - k]);
    int all = 0;
    int before = sum_before(count, own.counts, all);
    if (before < n && before + count >= n) {
        for (int k = 0; k < per_thread; k++) {
            const auto in_bin = static_cast<int>(own.bins[first - k]);
            if (before + in_bin >= n) {
                own.bin = first - k;
                own.before = before;
                break;
            }
            before += in_bin;
        }
    }
    __syncthreads();
}

// grid: thread blocks of a token x tokens
__global__ void __launch_bounds__(choose_threads)
    choose_kernel(const __grid_constant__ ChoiceArgs p, const __grid_constant__ CutProblem windows) {
    __shared__ ChooseShared own;
    let_next_start();
    wait_for_previous();
    const int token = static_cast<int>(blockIdx.y);
    const auto thread = static_cast<int>(threadIdx.x);
    const bool apart = p.own.ends != nullptr;
    const int list_begin = apart && p.own.begins != nullptr ? p.own.begins[token] : 0;
    const int n_steps = apart ? p.own.ends[token] - list_begin : (p.n_slots[0] + step_slots - 1) / step_slots;
    const int32_t* const list = apart ? p.own.steps + static_cast<int64_t>(token) * p.own.capacity + list_begin : nullptr;
    float* const weights = p.weights + static_cast<int64_t>(token) * p.capacity;
    add_up_heads(p, windows, token, own);
    for (int i = static_cast<int>(blockIdx.x) * choose_threads + thread; i < n_steps; i += static_cast<int>(gridDim.x) * choose_threads) {
        const float* const of = p.estimates + (static_cast<int64_t>(token) * p.capacity + i) * p.n_head;
        float most = -INFINITY;
        for (int h = 0; h < p.n_head; h++) most = fmaxf(most, __ldcg(of + h) - own.of_head[h]);
        weights[i] = most;
    }
    if (!is_last(p.done + token, gridDim.x, own.last)) return;

    int n_seen = 0;
    {
        int mine = 0;
        for (int i = thread; i < n_steps; i += choose_threads) mine += key_of(__ldcg(weights + i)) > 0 ? 1 : 0;
        sum_before(mine, own.counts, n_seen);
    }
    int least = 1;  // keys above it are chosen, and of those equal to it the first n_equal
    int n_equal = n_seen;
    if (n_seen > p.n_keep) {
        find_bin(weights, n_steps, 0, bin_bits, p.n_keep, own);
        const int bin = own.bin;
        const int above = own.before;
        __syncthreads();
        find_bin(weights, n_steps, bin, 0, p.n_keep - above, own);
        least = bin << bin_bits | own.bin;
        n_equal = p.n_keep - above - own.before;
    }
    // runs of neighbours, so that the list ascends
    const int run = (n_steps + choose_threads - 1) / choose_threads;
    const int begin = min(n_steps, thread * run);
    const int end = min(n_steps, begin + run);
    int higher = 0;
    int equal = 0;
    for (int i = begin; i < end; i++) {
        const int key = key_of(__ldcg(weights + i));
        higher += key > least ? 1 : 0;
        equal += key == least ? 1 : 0;
    }
    int all_higher = 0;
    int all_equal = 0;
    const int higher_before = sum_before(higher, own.counts, all_higher);
    int equal_before = sum_before(equal, own.counts, all_equal);
    int32_t* to = p.steps + static_cast<int64_t>(token) * p.capacity + higher_before + min(equal_before, n_equal);
    for (int i = begin; i < end; i++) {
        const int key = key_of(__ldcg(weights + i));
        const bool chosen = key > least || (key == least && equal_before < n_equal);
        equal_before += key == least ? 1 : 0;
        if (chosen) *to++ = list != nullptr ? list[i] : i;
    }
    if (thread != 0) return;
    const int n = all_higher + min(all_equal, n_equal);
    p.ends[token] = n;
    atomicAdd(reinterpret_cast<unsigned long long*>(p.n_read), static_cast<unsigned long long>(n) * step_slots);
}

}  // namespace

cudaError_t choose_steps(const ChoiceArgs& args, const CutProblem* windows, cudaStream_t stream) {
    CutProblem beside{};
    if (windows != nullptr) beside = *windows;
    const int blocks = (args.capacity + choose_threads - 1) / choose_threads;
    return launch_next(choose_kernel, dim3(static_cast<unsigned>(blocks < 32 ? blocks : 32), static_cast<unsigned>(args.n_tokens)),
                       choose_threads, 0, stream, args, beside);
}

}  // namespace lkv::cuda
