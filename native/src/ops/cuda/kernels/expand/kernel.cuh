// Attention on expanded rows: a chunk of the context becomes full rows of f16 once for all query rows, is attended to as any full cache is,
// and the next chunk takes its place. What a chunk leaves is merged into the sums of those before: nothing grows with the context.
//
// Expanding is a product of latents, decoded on the way, with B of the heads that share them. A thread block makes 128 slots x up to 128
// dimensions of whole heads, 32 channels a step:
//
//   latents   decoded in registers where they come in the MLA kernel's units, each warp its own 32 slots; else in shared memory
//   B         copied three steps deep
//   product   a warp has 32 x 128; the result waits in shared memory for bias, norm and RoPE, and leaves in whole rows
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/expand/keys.cuh"
#include "ops/cuda/kernels/expand/product.cuh"
#include "ops/cuda/softmax/own_steps.cuh"

namespace lkv::cuda {

// grid: 128 slots of a chunk x heads of a thread block x {K, V}
template <ExpandBy BY>
__global__ void __launch_bounds__(expand_threads, 2)
    expand_kernel(const __grid_constant__ ExpandArgs p, const __grid_constant__ ExpandSide of_k,
                  const __grid_constant__ ExpandSide of_v, const __grid_constant__ ExpandTo to, int first_tile) {
    let_next_start();
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ int positions[expand_slots];
    __shared__ const uint8_t* rows_of[expand_slots];
    __shared__ MlaUnit own_units[expand_threads / 32][most_units];
    uint8_t* const latents = shared;
    uint8_t* const factors = shared + 2 * expand_slots * latent_pitch;
    const bool is_k = blockIdx.z == 0;
    const ExpandSide& side = is_k ? of_k : of_v;
    // of heads wider than a thread block makes, halves
    const int halves = p.head_dim / side.columns;
    const int head0 = static_cast<int>(blockIdx.y) / halves * side.heads;
    const int column0 = static_cast<int>(blockIdx.y) % halves * side.columns;
    if (head0 >= p.n_kv || (side.factor == nullptr && column0 > 0)) return;
    wait_for_previous();
    const Parts parts(p);
    const int thread = static_cast<int>(threadIdx.x);
    const int left = (parts.n_tiles - first_tile) * expand_tile;
    const bool notes = is_k && to.seq != nullptr && blockIdx.y == 0;
    if (notes && blockIdx.x == 0 && thread == 0) *to.n_slots = max(0, min(p.chunk, left));
    const int slot0 = static_cast<int>(blockIdx.x) * expand_slots;
    if (slot0 >= left) return;
    const ExpandSlot slot = slot_of(p, parts, is_k, small_quotient(head0, side.group), first_tile);
    positions[thread] = slot.pos;
    if (notes) {
        to.seq[slot0 + thread] = slot.seq;
        to.pos[slot0 + thread] = slot.pos;
    }
    if (side.factor == nullptr) {                    // one head
        for (int j = 0; 16 * j < p.head_dim; j++) {  // neighbouring threads write neighbouring slots
            __align__(16) uint8_t x[32];
            put_chunk(slot, j, x);
            for (int i = 0; i < 2 && 16 * j + 8 * i < p.head_dim; i++) {
                *reinterpret_cast<uint4*>(to.at(p, is_k, slot0 + thread, head0, 2 * j + i)) =
                    *reinterpret_cast<uint4*>(x + 16 * i);
            }
        }
        return;
    }

    const int n_steps = steps_of(slot, 4 * side.blocks);
    const int warp = thread / 32;
    const int lane = thread % 32;
    FactorStages stages(side, head0, column0, p.head_dim, factors, n_steps);
    ExpandSums acc = {};
    if constexpr (BY == ExpandBy::chunks) {
        expand_by_chunks(acc, slot, latents, stages, lane);
    } else {
        UnitRows of;
        of.units = own_units[warp];
        of.n_units = note_units(slot.chunks, slot.row != nullptr ? 4 * side.blocks : 0, 0, own_units[warp]);
        rows_of[thread] = slot.row;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) of.rows[i] = rows_of[32 * warp + lane / 4 + 8 * i];
        expand_by_units(acc, of, stages, lane);
    }
    copies_wait(0);
    const bool turned = turn_whole_keys(p, side, acc, positions + 32 * warp, lane);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint8_t* const at =
                    shared + (32 * warp + 16 * m + lane / 4 + 8 * i) * factor_pitch + 16 * n + lane % 4 * 4;
                *reinterpret_cast<uint32_t*>(at) =
                    bits(__floats2half2_rn(acc[m][4 * n + 2 * i], acc[m][4 * n + 2 * i + 1]));
            }
        }
    }
    __syncthreads();
    if (!turned && (side.n_rot > 0 || side.bias != nullptr || side.norm != nullptr)) {
        for (int i = warp; i < expand_slots * side.heads; i += expand_threads / 32) {
            const int s = i % expand_slots;
            const int h = i / expand_slots;
            auto* const key = reinterpret_cast<__half*>(shared + s * factor_pitch) + h * p.head_dim;
            finish_key<most_expanded_head>(p, head0 + h, positions[s], key, key, lane);
        }
        __syncthreads();
    }
    // neighbouring threads write what lies side by side
    const int pieces = side.columns / 8;
    for (int i = thread; i < expand_slots * side.heads * pieces; i += expand_threads) {
        const int s = to.in_tiles != 0 ? i % expand_slots : small_quotient(i, side.heads * pieces);
        const int piece = to.in_tiles != 0 ? i / expand_slots : i - s * side.heads * pieces;
        const int head = small_quotient(piece, pieces);
        *reinterpret_cast<uint4*>(to.at(p, is_k, slot0 + s, head0 + head, column0 / 8 + piece - head * pieces)) =
            *reinterpret_cast<const uint4*>(shared + s * factor_pitch + 16 * piece);
    }
}

// The parts of a chunk and the chunks before it, whose sums are in p.out and their maxima and sums of weights in ml. By one warp a
// query row. p: of the attention on the chunk's rows, or of full rows beside them, whose tokens may be cut apart. first, last: of the chunks
__global__ void __launch_bounds__(expand_threads)
    add_chunk_kernel(const __grid_constant__ CutProblem p, float2* ml, bool first, bool last) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % 32;
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (expand_threads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const int n_parts = parts_of_token(p, SlotCounts(p), static_cast<int>(row) / p.n_head);
    const auto* const of = reinterpret_cast<const float2*>(p.partial_ml) + row;
    const float2 before = first ? make_float2(-INFINITY, 0.0f) : ml[row];
    __syncwarp();  // all lanes have read it
    float top = before.x;
    for (int s = 0; s < n_parts; s++) top = fmaxf(top, of[s * rows].x);
    const auto share = [&](const float2& x) { return x.y > 0.0f ? exp2f(x.x - top) : 0.0f; };
    float total = before.y * share(before);
    for (int s = 0; s < n_parts; s++) {
        const float2 part = of[s * rows];
        if (part.y > 0.0f) total += part.y * share(part);
    }
    const float by = !last ? 1.0f : total > 0.0f ? 1.0f / total : 0.0f;
    auto* const out = reinterpret_cast<float4*>(p.out + row * p.head_dim);
    for (int at = lane; 4 * at < p.head_dim; at += 32) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!first && before.y > 0.0f) add_share(sum, share(before), out[at]);
        for (int s = 0; s < n_parts; s++) {
            const float2 part = of[s * rows];
            if (part.y <= 0.0f) continue;
            add_share(sum, share(part),
                      reinterpret_cast<const float4*>(p.partial + (s * rows + row) * 64 * p.v_blocks)[at]);
        }
        out[at] = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
    }
    if (!last && lane == 0) ml[row] = make_float2(top, total);
}

}  // namespace lkv::cuda
