#include "ops/cuda/rows/rows.cuh"

#include <algorithm>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/rows.h"
#include "ops/cuda/softmax/hadamard.cuh"

namespace lkv::cuda {

namespace {

// Floats of a row that is staged in shared memory: what every kernel may use.
constexpr int64_t staged_floats = most_rotated;

struct RowSide {
    uint8_t* rows;
    const SegmentLayout* segments;
    int64_t page;
    int row_bytes, n_segments;

    __device__ RowSide(const RowTarget& of, bool is_k)
        : rows(is_k ? of.k_rows : of.v_rows),
          segments(is_k ? of.k_segments : of.v_segments),
          page(is_k ? of.k_page : of.v_page),
          row_bytes(is_k ? of.k_row_bytes : of.v_row_bytes),
          n_segments(is_k ? of.n_k_segments : of.n_v_segments) {}
    __device__ uint8_t* row(int64_t slot) const { return rows + row_offset(slot, page, row_bytes); }
};

// What describes rows depends on no earlier kernel, and a layer's weights have displaced it from the L2 cache.
__device__ void prefetch_segments(const RowSide& side) {
    const int at = threadIdx.x * 32;
    if (at < side.n_segments * static_cast<int>(sizeof(SegmentLayout))) {
        prefetch(reinterpret_cast<const char*>(side.segments) + at);
    }
}

// A row times the Hadamard matrix of n channels, 64 of them a warp.
__device__ void stage_rotated(const float* x, int width, int n, float* staged) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = static_cast<int>(threadIdx.x) / 32 * 64 + lane; i - lane < width; i += 2 * row_threads) {
        float of[2] = {i < width ? x[i] : 0.0f, i + 32 < width ? x[i + 32] : 0.0f};
        times_hadamard(of, n, lane);
        if (i < width) staged[i] = of[0];
        if (i + 32 < width) staged[i + 32] = of[1];
    }
}

// grid: tokens x {K, V}, or tokens x the one that is stored
__global__ void __launch_bounds__(row_threads, 1) store_kernel(const __grid_constant__ StoreArgs p) {
    extern __shared__ __align__(16) float staged[];
    let_next_start();
    const bool is_k = blockIdx.y == 0 && p.with_k != 0;
    for (const RowTarget& target : p.targets) prefetch_segments(RowSide(target, is_k));
    const int token = blockIdx.x;
    wait_for_previous();
    const RowTarget& to = p.targets[p.region[token]];
    const int64_t slot = p.slot[token];
    if (slot < 0) return;  // no query of the layer sees the token
    const StoreSource& source = to.full != 0 ? p.full : p.latents;
    const int64_t stride = is_k ? source.k_stride : source.v_stride;
    const float* x = (is_k ? source.k : source.v) + token * stride;
    const RowSide side(to, is_k);
    const SegmentLayout* const segments = side.segments;
    const int n_segments = side.n_segments;
    uint8_t* const row = side.row(slot);
    const int warp = threadIdx.x / 32;
    // comes with the values
    SegmentLayout segment = warp < n_segments ? segments[warp] : SegmentLayout{};
    if (stride <= staged_floats) {
        // every value is read several times
        if (!is_k && source.v_hadamard != 0) {
            stage_rotated(x, static_cast<int>(stride), source.v_hadamard, staged);
        } else {
            for (int i = threadIdx.x; i < stride; i += row_threads) staged[i] = x[i];
        }
        __syncthreads();
        x = staged;
    }
    if (has_group_scales(segments, n_segments)) return write_scaled_row(segments, n_segments, x, row);
    for (int s = warp; s < n_segments; s += row_threads / 32) {
        if (s != warp) segment = segments[s];
        write_segment_shared(segment.format, x + segment.column, segment.width, row + segment.offset);
    }
}

__device__ bool same_segments(const RowSide& a, const RowSide& b) {
    bool same = a.n_segments == b.n_segments;
    for (int s = 0; same && s < a.n_segments; s++) {
        const SegmentLayout& of = a.segments[s];
        const SegmentLayout& other = b.segments[s];
        same = of.format == other.format && of.width == other.width && of.offset == other.offset &&
               of.scales == other.scales;
    }
    return same;
}

__device__ bool lies_in_token_blocks(const RowSide& side) {
    bool all = side.n_segments > 0;
    for (int s = 0; all && s < side.n_segments; s++) {
        all = format_in_token_blocks(static_cast<Format>(side.segments[s].format));
    }
    return all;
}

// grid: rows x {K, V}
__global__ void __launch_bounds__(row_threads, 1) move_kernel(const __grid_constant__ MoveArgs p) {
    extern __shared__ float x[];
    const bool is_k = blockIdx.y == 0;
    const RowSide from(p.from, is_k);
    const RowSide to(p.to, is_k);
    if (lies_in_token_blocks(to)) return;  // store_blocks writes these
    const uint8_t* const src = from.row(p.from_slot[blockIdx.x]);
    uint8_t* const dst = to.row(p.to_slot[blockIdx.x]);
    for (int i = threadIdx.x; i < (is_k ? p.k_width : p.v_width); i += row_threads) x[i] = 0.0f;
    __syncthreads();
    read_row(from.segments, from.n_segments, src, x);
    __syncthreads();
    // Quantizing what was just dequantized may move a code: segments that both rows store alike keep their bytes. Where groups have the
    // scales, that is all of a row or nothing.
    if (has_group_scales(to.segments, to.n_segments)) {
        if (!same_segments(from, to)) return write_scaled_row(to.segments, to.n_segments, x, dst);
        for (int i = static_cast<int>(threadIdx.x); i < to.row_bytes; i += row_threads) dst[i] = src[i];
        return;
    }
    for (int s = threadIdx.x / 32; s < to.n_segments; s += row_threads / 32) {
        const SegmentLayout segment = to.segments[s];
        const uint8_t* same = nullptr;
        for (int i = 0; i < from.n_segments; i++) {
            const SegmentLayout other = from.segments[i];
            if (other.column == segment.column && other.width == segment.width && other.format == segment.format) {
                same = src + other.offset;
            }
        }
        if (same == nullptr) {
            write_segment_shared(segment.format, x + segment.column, segment.width, dst + segment.offset);
            continue;
        }
        const int end = s + 1 < to.n_segments ? to.segments[s + 1].offset : to.row_bytes;
        for (int i = threadIdx.x % 32; i < end - segment.offset; i += 32) dst[segment.offset + i] = same[i];
    }
}

__device__ float channel_of(const BlockArgs& p, const uint8_t* row, int column) {
    if (p.segments == nullptr) return reinterpret_cast<const float*>(row)[column];
    for (int s = 0; s < p.n_segments; s++) {
        const SegmentLayout segment = p.segments[s];
        const int i = column - segment.column;
        if (i >= 0 && i < segment.width) return value_at(segment, row, i);
    }
    return 0.0f;
}

constexpr int block_threads = chunk_width * token_block_slots;  // a warp a channel, a lane a token
constexpr int most_chunks_at_once = 64;  // of all heads: a layer waits for one chunk after another

// block: the segment in the row of the block's first slot
template <class F>
__device__ void store_chunk(const float* tokens, int32_t (*code)[chunk_width + 1], int chunk, int width, uint8_t* block,
                            int64_t stride) {
    const int token = threadIdx.x % token_block_slots;
    const int j = threadIdx.x / token_block_slots;
    const auto [scale, minimum] = F::put_affine(tokens, chunk * chunk_width + j, width, block, stride);
    code[token][j] = F::level(tokens[token], scale > 0.0f ? 1.0f / scale : 0.0f, minimum);
    __syncthreads();
    if (j > 0) return;
    int32_t of_slot[chunk_width];
    for (int i = 0; i < chunk_width; i++) of_slot[i] = code[token][i];
    uint8_t* const slot = block + token * stride;
    F::Codes::pack(of_slot, slot + chunk * F::Codes::chunk_bytes);
    if (chunk == 0) F::pad(slot, width);
}

// grid: blocks x chunks that are stored at once
__global__ void __launch_bounds__(block_threads) block_kernel(const __grid_constant__ BlockArgs p) {
    __shared__ float x[chunk_width][token_block_slots];
    __shared__ int32_t code[token_block_slots][chunk_width + 1];
    const int j = threadIdx.x / token_block_slots;
    const int token = threadIdx.x % token_block_slots;
    const int first = static_cast<int>(blockIdx.x) * token_block_slots;
    const int64_t slot = p.from_slot != nullptr ? p.from_slot[first + token] : first + token;
    const uint8_t* const row = p.rows + row_offset(slot, p.page, p.row_bytes);
    uint8_t* const block = RowSide(p.to, true).row(p.to_slot[first]);
    unsigned turn = 0;
    for (int s = 0; s < p.to.n_k_segments; s++) {
        const SegmentLayout segment = p.to.k_segments[s];
        if (!format_in_token_blocks(static_cast<Format>(segment.format))) continue;
        for (int chunk = 0; chunk < segment.width / chunk_width; chunk++) {
            if (turn++ % gridDim.y != blockIdx.y) continue;
            __syncthreads();  // the codes of the chunk before are packed
            x[j][token] = channel_of(p, row, segment.column + chunk * chunk_width + j);
            __syncwarp();
            switch (static_cast<Format>(segment.format)) {
#define X(name, type)                                                                                  \
    case Format::name:                                                                                 \
        store_chunk<type>(x[j], code, chunk, segment.width, block + segment.offset, p.to.k_row_bytes); \
        break;
                LKV_TOKEN_BLOCK_FORMATS(X)
#undef X
                default:
                    break;
            }
        }
    }
}

__global__ void claim_kernel(const __grid_constant__ ClaimArgs p, int n_tokens) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n_tokens || p.slot[i] < 0) return;
    p.pos[p.region[i]][p.slot[i]] = p.q_pos[i];
    p.seq[p.region[i]][p.slot[i]] = p.seen != 0 ? uint64_t{1} << p.q_seq[i] : 0;
}

constexpr int find_warps = 32;
constexpr int find_threads = 32 * find_warps;
constexpr int steps_of_warp = 16;

// grid: tokens. A warp looks at sixteen steps at a time; what it finds goes behind what the warps before it have.
__global__ void __launch_bounds__(find_threads) find_steps_kernel(const __grid_constant__ FindStepsArgs p) {
    __shared__ int found[find_warps];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const uint64_t own = uint64_t{1} << p.q_seq[blockIdx.x];
    int32_t* const to = p.steps + static_cast<int64_t>(blockIdx.x) * p.capacity;
    int count = 0;
    for (int r = 0; r < p.n_regions; r++) {
        if (threadIdx.x == 0 && r == p.n_regions - 1) p.begins[blockIdx.x] = count;
        const int n_slots = p.n_slots[r];
        for (int first = 0; first * step_slots < n_slots; first += find_warps * steps_of_warp) {
            uint64_t seq[steps_of_warp];
#pragma unroll
            for (int k = 0; k < steps_of_warp; k++) {
                const int slot = (first + warp * steps_of_warp + k) * step_slots + lane;
                seq[k] = slot < n_slots ? p.seq[r][slot] : 0;
            }
            uint32_t holds = 0;
#pragma unroll
            for (int k = 0; k < steps_of_warp; k++) holds |= __any_sync(0xffffffffu, (seq[k] & own) != 0) ? 1u << k : 0;
            if (lane == 0) found[warp] = __popc(holds);
            __syncthreads();
            const int of_lane = found[lane];
            int before = lane < warp ? of_lane : 0;
            int all = of_lane;
#pragma unroll
            for (int o = 16; o > 0; o /= 2) {
                before += __shfl_xor_sync(0xffffffffu, before, o);
                all += __shfl_xor_sync(0xffffffffu, all, o);
            }
            if (lane < steps_of_warp && (holds >> lane & 1) != 0) {
                to[count + before + __popc(holds & ((1u << lane) - 1))] =
                    r << step_bits | (first + warp * steps_of_warp + lane);
            }
            count += all;
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) p.ends[blockIdx.x] = count;
}

}  // namespace

cudaError_t claim_slots(const ClaimArgs& args, int n_tokens, cudaStream_t stream) {
    claim_kernel<<<(n_tokens + 127) / 128, 128, 0, stream>>>(args, n_tokens);
    return cudaGetLastError();
}

cudaError_t find_own_steps(const FindStepsArgs& args, int n_tokens, cudaStream_t stream) {
    find_steps_kernel<<<n_tokens, find_threads, 0, stream>>>(args);
    return cudaGetLastError();
}

cudaError_t store_rows(const StoreArgs& args, int n_tokens, cudaStream_t stream) {
    const auto sides = static_cast<unsigned>(args.with_k + args.with_v);
    int64_t staged = 0;
    for (const StoreSource& source : {args.full, args.latents}) {
        for (const int64_t floats : {args.with_k != 0 ? source.k_stride : 0, args.with_v != 0 ? source.v_stride : 0}) {
            if (floats <= staged_floats) staged = std::max(staged, floats);
        }
    }
    return launch_next(store_kernel, dim3(static_cast<unsigned>(n_tokens), sides), row_threads,
                       sizeof(float) * static_cast<size_t>(staged), stream, args);
}

cudaError_t store_blocks(const BlockArgs& args, int n_rows, cudaStream_t stream) {
    const auto n_blocks = static_cast<unsigned>(n_rows / token_block_slots);
    block_kernel<<<dim3(n_blocks, most_chunks_at_once), block_threads, 0, stream>>>(args);
    return cudaGetLastError();
}

cudaError_t move_rows(const MoveArgs& args, int n_rows, cudaStream_t stream) {
    const int width = args.k_width > args.v_width ? args.k_width : args.v_width;
    const size_t bytes = static_cast<size_t>(width) * sizeof(float);
    if (bytes > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(move_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
        if (error != cudaSuccess) return error;
    }
    move_kernel<<<dim3(n_rows, 2), row_threads, bytes, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace lkv::cuda
