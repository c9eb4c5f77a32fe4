#include "ops/cuda/choice/choice.h"
#include "ops/cuda/rows/rows.cuh"

namespace lkv::cuda {

namespace {

// grid: steps x layers. A thread has a channel, and every row_threads-th after it.
__global__ void __launch_bounds__(row_threads, 1)
    average_kernel(const AveragedRows* layers, const int32_t* __restrict__ steps,
                   const __grid_constant__ BatchRowsAt unwritten) {
    extern __shared__ __align__(16) float x[];
    __shared__ uint64_t seq[step_slots];
    const AveragedRows& of = layers[blockIdx.y];
    const int step = steps[blockIdx.x];
    const int first = step * step_slots;
    if (threadIdx.x < step_slots) seq[threadIdx.x] = of.seq[first + static_cast<int>(threadIdx.x)];
    for (int i = static_cast<int>(threadIdx.x); i < of.width; i += row_threads) x[i] = 0.0f;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < unwritten.n_tokens; i += row_threads) {
        const int at = unwritten.slot[i] - first;
        if (unwritten.region[i] == unwritten.middle && at >= 0 && at < step_slots) seq[at] = 0;
    }
    __syncthreads();
    int n_used = 0;
    for (const uint64_t each : seq) n_used += each != 0 ? 1 : 0;
    const RowTarget& rows = of.rows;
    const float share = n_used > 0 ? 1.0f / static_cast<float>(n_used) : 0.0f;
    const uint8_t* const row = rows.k_rows + row_offset(first, rows.k_page, rows.k_row_bytes);
    for (int s = 0; s < rows.n_k_segments; s++) {
        const SegmentLayout segment = rows.k_segments[s];
        for (int i = static_cast<int>(threadIdx.x); i < segment.width; i += row_threads) {
            float sum = 0.0f;
#pragma unroll 8
            for (int k = 0; k < step_slots; k++) {
                const float value = value_at(segment, row + static_cast<int64_t>(k) * rows.k_row_bytes, i);
                sum += seq[k] != 0 ? value : 0.0f;
            }
            x[segment.column + i] = sum * share;
        }
    }
    __syncthreads();
    uint8_t* const to = of.means + static_cast<int64_t>(step) * rows.k_row_bytes;
    if (has_group_scales(rows.k_segments, rows.n_k_segments)) {
        return write_scaled_row(rows.k_segments, rows.n_k_segments, x, to);
    }
    for (int s = static_cast<int>(threadIdx.x) / 32; s < rows.n_k_segments; s += row_threads / 32) {
        const SegmentLayout segment = rows.k_segments[s];
        write_segment_shared(segment.format, x + segment.column, segment.width, to + segment.offset);
    }
}

}  // namespace

cudaError_t average_steps(const AveragedRows* layers, int n_layers, int most_width, const int32_t* steps, int n_steps,
                          const BatchRowsAt& unwritten, cudaStream_t stream) {
    const size_t bytes = static_cast<size_t>(most_width) * sizeof(float);
    const dim3 grid(static_cast<unsigned>(n_steps), static_cast<unsigned>(n_layers));
    average_kernel<<<grid, row_threads, bytes, stream>>>(layers, steps, unwritten);
    return cudaGetLastError();
}

}  // namespace lkv::cuda
