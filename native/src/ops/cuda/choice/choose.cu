// The steps with the largest estimates. Thread blocks of a token share out its steps, and find the largest estimate of each, relative to the
// heads' sums; the last one to end finds the n_keep largest of these, whose keys its threads hold.
#include "ops/cuda/choice/step_list.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/softmax/own_steps.cuh"

namespace lkv::cuda {

namespace {

constexpr int choose_warps = 32;
constexpr int choose_threads = 32 * choose_warps;

// Weights as integers: logarithms from -32 on in 2048 parts of one; below that all are alike. 0: nothing is seen.
constexpr int key_bits = 16;
__device__ __forceinline__ int key_of(float weight) {
    if (weight == -INFINITY) return 0;
    constexpr float most = static_cast<float>((1 << key_bits) - 2);
    return 1 + static_cast<int>(fminf(fmaxf((weight + 32.0f) * 2048.0f, 0.0f), most));
}

struct ChooseShared {
    float2 parts[choose_warps][32];
    float of_head[most_choosing_heads];  // logarithm of a head's sum
    uint32_t counts[2][choose_warps];
    bool last;
};

__device__ __forceinline__ float2 added(float2 a, float2 b) {
    const float top = fmaxf(a.x, b.x);
    const float base = top == -INFINITY ? 0.0f : top;
    return make_float2(top, a.y * power_of_two(a.x - base) + b.y * power_of_two(b.x - base));
}

// Logarithms of the heads' sums: of estimates, and of the weights in the windows.
__device__ void add_up_heads(const ChoiceArgs& p, const CutProblem& windows, int token, ChooseShared& own) {
    constexpr int at_once = 5;  // of a thread: the parts of 132 multiprocessors
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int n_windows = windows.n_split > 0 ? parts_of_token(windows, SlotCounts(windows), token) : 0;
    const float2 none = make_float2(-INFINITY, 0.0f);
    for (int first = 0; first < p.n_head; first += 32) {
        const int head = min(first + lane, p.n_head - 1);
        const float2* const estimates = p.sums + static_cast<int64_t>(token) * p.n_parts * p.n_head + head;
        const auto* const beside =
            reinterpret_cast<const float2*>(windows.partial_ml) + static_cast<int64_t>(token) * p.n_head + head;
        const int64_t all_rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
        float2 of = none;
        for (int part0 = warp; part0 < p.n_parts + n_windows; part0 += at_once * choose_warps) {
            float2 x[at_once];
#pragma unroll
            for (int k = 0; k < at_once; k++) {
                const int part = part0 + k * choose_warps;
                x[k] = part < p.n_parts               ? __ldcg(estimates + static_cast<int64_t>(part) * p.n_head)
                       : part < p.n_parts + n_windows ? __ldcg(beside + (part - p.n_parts) * all_rows)
                                                      : none;
            }
#pragma unroll
            for (int k = 0; k < at_once; k++) of = added(of, x[k].y > 0.0f ? x[k] : none);
        }
        own.parts[warp][lane] = of;
        __syncthreads();
        for (int n = choose_warps / 2; n > 0; n /= 2) {
            if (warp < n) own.parts[warp][lane] = added(own.parts[warp][lane], own.parts[warp + n][lane]);
            __syncthreads();
        }
        const float2 all = own.parts[0][lane];
        if (warp == 0 && first + lane < p.n_head) own.of_head[head] = all.y > 0.0f ? all.x + log2f(all.y) : 0.0f;
        __syncthreads();
    }
}

// The largest estimate of a step, relative to the heads' sums. of: [n_head]
__device__ __forceinline__ float largest(const ChoiceArgs& p, const float* of, const float* of_head) {
    float most = -INFINITY;
    int h = 0;
    if (p.n_head % 4 == 0) {
#pragma unroll 8
        for (; h < p.n_head; h += 4) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(of + h));
            most = fmaxf(most, fmaxf(fmaxf(x.x - of_head[h], x.y - of_head[h + 1]),
                                     fmaxf(x.z - of_head[h + 2], x.w - of_head[h + 3])));
        }
    }
    for (; h < p.n_head; h++) most = fmaxf(most, __ldcg(of + h) - of_head[h]);
    return most;
}

// The sum of x over all threads. turn: another of 0 and 1 than in the call before
__device__ __forceinline__ uint32_t sum_up(uint32_t x, int turn, ChooseShared& own) {
    const uint32_t of_warp = __reduce_add_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) own.counts[turn][threadIdx.x / 32] = of_warp;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, own.counts[turn][threadIdx.x % 32]);
}
// The same, and over the threads before this one.
__device__ __forceinline__ uint32_t sum_up(uint32_t x, int turn, ChooseShared& own, uint32_t& before) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const uint32_t all = sum_up(x, turn, own);
    before = warp_prefix(x, lane) - x + __reduce_add_sync(0xffffffffu, lane < warp ? own.counts[turn][lane] : 0u);
    return all;
}
static_assert(choose_warps == 32);

// Per: steps of a thread of the last block, one behind the other. grid: thread blocks of a token x tokens
template <int Per>
__global__ void __launch_bounds__(choose_threads)
    choose_kernel(const __grid_constant__ ChoiceArgs p, const __grid_constant__ CutProblem windows) {
    __shared__ ChooseShared own;
    let_next_start();
    wait_for_previous();
    const int token = static_cast<int>(blockIdx.y);
    const auto thread = static_cast<int>(threadIdx.x);
    const StepList list(p, token);
    float* const weights = p.weights + static_cast<int64_t>(token) * p.capacity;
    add_up_heads(p, windows, token, own);
    for (int i = static_cast<int>(blockIdx.x) * choose_threads + thread; i < list.n;
         i += static_cast<int>(gridDim.x) * choose_threads) {
        weights[i] = largest(p, p.estimates + (static_cast<int64_t>(token) * p.capacity + i) * p.n_head, own.of_head);
    }
    if (!is_last(p.done + token, gridDim.x, own.last)) return;

    // runs of neighbours, so that the list ascends
    int keys[Per];
#pragma unroll
    for (int k = 0; k < Per; k++) {
        const int i = Per * thread + k;
        keys[k] = i < list.n ? key_of(__ldcg(weights + i)) : 0;
    }
    const auto count = [&](int least) {
        uint32_t n = 0;
#pragma unroll
        for (int k = 0; k < Per; k++) n += keys[k] >= least ? 1 : 0;
        return n;
    };
    // The highest key that n_keep steps reach at least, or 1. Two bits at a time; counts of 16 bits
    const auto n_keep = static_cast<uint32_t>(p.n_keep);
    int least = 0;
    for (int bit = 1 << (key_bits - 2); bit > 0; bit /= 4) {
        const uint32_t third = count(least + 3 * bit);
        const uint32_t both = sum_up(count(least + 2 * bit) << 16 | third, 0, own);
        const uint32_t first = sum_up(count(least + bit), 1, own);
        least +=
            bit * ((first >= n_keep ? 1 : 0) + (both >> 16 >= n_keep ? 1 : 0) + ((both & 0xffff) >= n_keep ? 1 : 0));
    }
    least = max(least, 1);
    const uint32_t mine = count(least + 1);
    const uint32_t equal = count(least) - mine;
    uint32_t before = 0;
    uint32_t equal_before = 0;
    const uint32_t higher = sum_up(mine, 0, own, before);
    const uint32_t all_equal = sum_up(equal, 1, own, equal_before);
    const uint32_t n_equal = min(all_equal, higher < n_keep ? n_keep - higher : 0u);  // the first ones
    int32_t* to = p.steps + static_cast<int64_t>(token) * p.capacity + before + min(equal_before, n_equal);
#pragma unroll
    for (int k = 0; k < Per; k++) {
        const bool chosen = keys[k] > least || (keys[k] == least && equal_before < n_equal);
        equal_before += keys[k] == least ? 1 : 0;
        if (chosen) *to++ = list.at(Per * thread + k);
    }
    if (thread != 0) return;
    p.ends[token] = static_cast<int32_t>(higher + n_equal);
    atomicAdd(reinterpret_cast<unsigned long long*>(p.rows_read),
              static_cast<unsigned long long>(higher + n_equal) * step_slots);
}

template <int Per>
cudaError_t launch_choose(const ChoiceArgs& args, const CutProblem& windows, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>((args.capacity + choose_threads - 1) / choose_threads);
    return launch_next(choose_kernel<Per>, dim3(blocks < 32 ? blocks : 32, static_cast<unsigned>(args.n_tokens)),
                       choose_threads, 0, stream, args, windows);
}

}  // namespace

cudaError_t choose_steps(const ChoiceArgs& args, const CutProblem* windows, cudaStream_t stream) {
    CutProblem beside{};
    if (windows != nullptr) beside = *windows;
    if (args.capacity <= 4 * choose_threads) return launch_choose<4>(args, beside, stream);
    if (args.capacity <= 16 * choose_threads) return launch_choose<16>(args, beside, stream);
    static_assert(most_choosable_steps < 64 * choose_threads);
    return launch_choose<64>(args, beside, stream);
}

}  // namespace lkv::cuda
