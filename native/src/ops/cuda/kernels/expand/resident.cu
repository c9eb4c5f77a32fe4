#include "ops/cuda/kernels/expand/resident.cuh"

#include <algorithm>

namespace lkv::cuda {

namespace {

// x of lane 4g + t: word i, which becomes word t of lane 4g + i.
__device__ __forceinline__ void swap_in_fours(uint32_t (&x)[4], int lane) {
    const auto swap = [&](uint32_t& a, uint32_t& b, int distance) {  // b of the lower lane and a of the upper
        const bool upper = (lane & distance) != 0;
        const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? a : b, distance);
        a = upper ? got : a;
        b = upper ? b : got;
    };
    swap(x[0], x[1], 1);
    swap(x[2], x[3], 1);
    swap(x[0], x[2], 2);
    swap(x[1], x[3], 2);
}

// grid: thread blocks a head x heads of a thread block x {K, V}. FINISHES: keys have RoPE, a bias or a norm
template <bool FINISHES>
__global__ void __launch_bounds__(resident_threads, 1)
    resident_kernel(const __grid_constant__ ExpandArgs p, const __grid_constant__ ExpandSide of_k,
                    const __grid_constant__ ExpandSide of_v, const __grid_constant__ ExpandTo to, int first_tile) {
    let_next_start();
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ResidentUnits units;
    __shared__ float2 eight[expand_columns / 2];
    const bool is_k = blockIdx.z == 0;
    const ExpandSide& side = is_k ? of_k : of_v;
    // of heads wider than a thread block makes, halves
    const int halves = FINISHES ? 1 : p.head_dim / side.columns;
    const int head0 = static_cast<int>(blockIdx.y) / halves * side.heads;
    const int column0 = static_cast<int>(blockIdx.y) % halves * side.columns;
    if (head0 >= p.n_kv) return;
    const ResidentFactor layout(side.rank);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = small_quotient(head0, side.group);
    // weights, which no earlier kernel writes
    copy_factor(side, head0, column0, p.head_dim, layout, shared);
    copies_commit();
    units.note(p, side, is_k, group);
    if (static_cast<int>(threadIdx.x) < side.n_rot / 2) eight[threadIdx.x] = angle_of(p.phases[threadIdx.x], 8);
    wait_for_previous();
    copies_wait(0);
    before_async_access();
    __syncthreads();

    const Parts parts(p);
    const bool notes = is_k && to.seq != nullptr && blockIdx.y == 0;
    if (notes && blockIdx.x == 0 && threadIdx.x == 0) {
        *to.n_slots = max(0, min(p.chunk, (parts.n_tiles - first_tile) * expand_tile));
    }
    const int end = min(parts.n_tiles, first_tile + p.chunk / expand_tile);
    const int step = resident_groups * static_cast<int>(gridDim.x);
    const Operand factor(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), static_cast<uint32_t>(layout.pitch));
    const int pieces = side.columns / 8;
#pragma unroll 1
    for (int t = first_tile + static_cast<int>(blockIdx.x) * resident_groups + warp / 4; t < end; t += step) {
        const LatentTile tile(p, parts, is_k, group, t, warp);
        const uint8_t* const rows[2] = {tile.row(lane / 4), tile.row(lane / 4 + 8)};
        if (t + step < end) {
            prefetch(LatentTile(p, parts, is_k, group, t + step, warp).row(lane / 2) + lane % 2 * 128);
        }
        float acc[64] = {};
        multiply_latents(acc, rows, units.of[tile.r], units.n[tile.r], factor, lane);
        // what belongs to dimensions is read again for every tile: kept, it takes the registers that products need
        const int again = forgotten(lane);
        if constexpr (FINISHES) {
            if (is_k && p.k_extras != 0) finish_heads(p, side, acc, head0, again);
            if (is_k && p.n_rot != 0) turn_slots(p, acc, tile, eight, again);
        }
        const int index = (t - first_tile) * expand_tile + resident_slots * (warp % 4);
        if (notes && lane < resident_slots) {
            const int slot = tile.slot + lane;
            const RegionArgs& region = p.regions[tile.r];
            to.seq[index + lane] = slot <= tile.last ? region.seq[slot] : 0;
            to.pos[index + lane] = slot <= tile.last ? region.pos[slot] : 0;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t x[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int at = 4 * (4 * j + n) + 2 * i;
                    x[n] = bits(__floats2half2_rn(acc[at], acc[at + 1]));
                }
                swap_in_fours(x, again);
                const int piece = 4 * j + again % 4;
                const int head = small_quotient(piece, pieces);
                if (head >= side.heads) continue;
                uint8_t* const at =
                    to.at(p, is_k, index + again / 4 + 8 * i, head0 + head, column0 / 8 + piece - head * pieces);
                *reinterpret_cast<uint4*>(at) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}

}  // namespace

bool plan_resident(const Device& device, const Problem& p, bool has_norm, bool with_values) {
    const auto fits = [&](int rank) {
        return rank > 0 && ResidentFactor(rank).total <= device.shared_bytes - resident_own_bytes;
    };
    const bool planes_lie_apart = p.n_rot > 0 && p.rope_neox != 0;
    const bool half_or_whole = p.head_dim == 64 || p.head_dim == 128;
    return device.warpgroups && fits(p.k_rank_max) && (!with_values || fits(p.v_rank_max)) &&
           (p.n_rot == 0 || p.n_rot == p.head_dim) && (half_or_whole || (!planes_lie_apart && !has_norm));
}

cudaError_t launch_resident(const ExpandArgs& args, const ExpandTo& to, int slots, unsigned sides, int first_tile,
                            cudaStream_t stream) {
    const ExpandSide k(args, true);
    const ExpandSide v = sides > 1 ? ExpandSide(args, false) : k;
    const int heads = args.n_kv / std::min(k.heads, v.heads) * (args.head_dim / k.columns);
    const int tiles = (slots + expand_tile - 1) / expand_tile;
    const int blocks = std::clamp(args.multiprocessors / (heads * static_cast<int>(sides)), 1,
                                  (tiles + resident_groups - 1) / resident_groups);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads), sides);
    const auto shared = static_cast<size_t>(std::max(ResidentFactor(k.rank).total, ResidentFactor(v.rank).total));
    const auto kernel = args.k_extras != 0 || args.n_rot != 0 ? resident_kernel<true> : resident_kernel<false>;
    return launch_next(kernel, grid, resident_threads, shared, stream, args, k, v, to, first_tile);
}

}  // namespace lkv::cuda
