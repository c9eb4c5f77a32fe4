#include "ops/cuda/recurrent/delta_net.h"

#include "ops/cuda/gpu/chain.cuh"

namespace lkv::cuda {

namespace {

constexpr int threads = 1024;
constexpr int n_warps = threads / 32;

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

template <int N>
__device__ inline void sum_over_warp(float (&of)[N]) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
#pragma unroll
        for (int i = 0; i < N; i++) of[i] += __shfl_xor_sync(0xffffffffu, of[i], o);
    }
}

// A lane's numbers of a column, loaded and stored at once.
template <int rows>
struct alignas(4 * rows) Row {
    float of[rows];
};

// A thread's channel of the convolution: Q, K or V of the block's heads.
struct Channel {
    bool used;
    bool writes;  // its inputs into the states: K heads are read by several blocks
    int index;
};

template <int head_dim>
__device__ inline Channel channel_of(const DeltaNetArgs& p, int v_head, int k_head) {
    const int part = static_cast<int>(threadIdx.x) / head_dim;  // 0: Q, 1: K, 2: V
    const int i = static_cast<int>(threadIdx.x) % head_dim;
    const int first_v_head = p.grouped != 0 ? k_head * (p.n_v / p.n_k) : k_head;
    if (part > 2) return {false, false, 0};
    if (part == 2) return {true, true, (2 * p.n_k + v_head) * head_dim + i};
    return {true, v_head == first_v_head, (part * p.n_k + k_head) * head_dim + i};
}

// grid: V heads, sequences. A warp has `columns` columns of the head's matrix, a lane `rows` neighbouring numbers of each.
template <int head_dim>
__global__ void __launch_bounds__(threads) delta_net_kernel(const __grid_constant__ DeltaNetArgs p) {
    let_next_start();
    constexpr int rows = head_dim / 32;
    constexpr int columns = head_dim / n_warps;
    __shared__ float qkv[3][head_dim];
    __shared__ float result[head_dim];
    const int v_head = static_cast<int>(blockIdx.x);
    const int seq = static_cast<int>(blockIdx.y);
    const int of_k = p.n_v / p.n_k;
    const int k_head = p.grouped != 0 ? v_head / of_k : v_head % p.n_k;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int channels = (2 * p.n_k + p.n_v) * head_dim;
    const int n_before = p.d_conv - 1;

    // states and weights depend on no kernel of this step
    const auto column_of = [&](int64_t slot, int c) {
        float* const head = p.matrices + (slot * p.n_v + v_head) * (int64_t{head_dim} * head_dim);
        return reinterpret_cast<Row<rows>*>(head + (warp * columns + c) * head_dim) + lane;
    };
    const int64_t from = p.from[seq];
    Row<rows> state[columns];
#pragma unroll
    for (int c = 0; c < columns; c++) state[c] = *column_of(from, c);
    const Channel channel = channel_of<head_dim>(p, v_head, k_head);
    float window[delta_net_conv - 1] = {};  // the latest inputs, the last one at n_before - 1
    float kernel[delta_net_conv] = {};
    if (channel.used) {
        const float* const before = p.conv_states + (from * channels + channel.index) * n_before;
#pragma unroll
        for (int i = 0; i < delta_net_conv; i++) {
            if (i < n_before) window[i] = before[i];
            if (i < p.d_conv) kernel[i] = p.kernels[channel.index * p.d_conv + i];
        }
    }
    const float decay = p.decay[v_head];
    const float decay_bias = p.decay_bias[v_head];
    const float scale = rsqrtf(static_cast<float>(head_dim));
    wait_for_previous();

    for (int t = 0; t < p.n_each; t++) {
        const int64_t token = int64_t{seq} * p.n_each + t;
        if (channel.used) {
            const float now = p.qkv[token * p.qkv_row + channel.index];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < delta_net_conv - 1; i++) {
                if (i < n_before) sum += window[i] * kernel[i];
            }
#pragma unroll
            for (int i = 0; i < delta_net_conv; i++) {
                if (i == n_before) sum += now * kernel[i];
            }
            qkv[threadIdx.x / head_dim][threadIdx.x % head_dim] = silu(sum);
#pragma unroll
            for (int i = 0; i < delta_net_conv - 1; i++) {
                const float next = i + 2 < delta_net_conv ? window[i + 1] : now;
                if (i < n_before) window[i] = i + 1 < n_before ? next : now;
            }
        }
        const int j = v_head % of_k;  // with `grouped`
        const int at_beta = p.grouped != 0 ? k_head * 2 * of_k + j : v_head;
        const int at_alpha = p.grouped != 0 ? at_beta + of_k : v_head;
        const float beta = 1.0f / (1.0f + expf(-p.beta[token * p.beta_row + at_beta]));
        const float alpha = p.alpha[token * p.alpha_row + at_alpha] + decay_bias;
        const float step = alpha > 20.0f ? alpha : log1pf(expf(alpha));
        const float kept = expf(step * decay);
        __syncthreads();

        float q[rows];
        float k[rows];
        float squares[2] = {};
#pragma unroll
        for (int r = 0; r < rows; r++) {
            q[r] = qkv[0][lane * rows + r];
            k[r] = qkv[1][lane * rows + r];
            squares[0] += q[r] * q[r];
            squares[1] += k[r] * k[r];
        }
        float learned[columns] = {};
        sum_over_warp(squares);
        const float q_scale = scale * rsqrtf(squares[0] + delta_net_length_eps);
        const float k_scale = rsqrtf(squares[1] + delta_net_length_eps);
#pragma unroll
        for (int r = 0; r < rows; r++) {
            q[r] *= q_scale;
            k[r] *= k_scale;
        }
#pragma unroll
        for (int c = 0; c < columns; c++) {
#pragma unroll
            for (int r = 0; r < rows; r++) learned[c] += state[c].of[r] * k[r];
        }
        sum_over_warp(learned);
        float read[columns] = {};
#pragma unroll
        for (int c = 0; c < columns; c++) {
            const float delta = (qkv[2][warp * columns + c] - kept * learned[c]) * beta;
#pragma unroll
            for (int r = 0; r < rows; r++) {
                state[c].of[r] = kept * state[c].of[r] + k[r] * delta;
                read[c] += state[c].of[r] * q[r];
            }
        }
        sum_over_warp(read);
#pragma unroll
        for (int c = 0; c < columns; c++) {
            if (lane == c) result[warp * columns + c] = read[c];
        }
        __syncthreads();

        if (static_cast<int>(threadIdx.x) < head_dim) {
            float power[1] = {};
#pragma unroll
            for (int r = 0; r < rows; r++) power[0] += result[lane * rows + r] * result[lane * rows + r];
            sum_over_warp(power);
            const float inverse = rsqrtf(power[0] / static_cast<float>(head_dim) + p.norm_eps);
            const int at = v_head * head_dim + static_cast<int>(threadIdx.x);
            const float gate = silu(p.gate[token * p.gate_row + at]);
            p.out[token * p.n_v * head_dim + at] = result[threadIdx.x] * inverse * p.norm[threadIdx.x] * gate;
        }
        const int back = p.n_each - 1 - t;
        if (back >= p.n_states) continue;
        const int64_t to = p.to[back * p.n_seqs + seq];
#pragma unroll
        for (int c = 0; c < columns; c++) *column_of(to, c) = state[c];
        if (!channel.writes) continue;
        float* const inputs = p.conv_states + (to * channels + channel.index) * n_before;
#pragma unroll
        for (int i = 0; i < delta_net_conv - 1; i++) {
            if (i < n_before) inputs[i] = window[i];
        }
    }
}

template <int head_dim>
cudaError_t launch(const DeltaNetArgs& args, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(args.n_v), static_cast<unsigned>(args.n_seqs));
    return launch_next(delta_net_kernel<head_dim>, grid, threads, 0, stream, args);
}

}  // namespace

cudaError_t delta_net(const DeltaNetArgs& args, cudaStream_t stream) {
    if (!delta_net_takes(args.head_dim, args.d_conv, args.n_each)) return cudaErrorInvalidValue;
    if (args.head_dim == 128) return launch<128>(args, stream);
    return args.head_dim == 64 ? launch<64>(args, stream) : launch<32>(args, stream);
}

}  // namespace lkv::cuda
