// Two passes over the slots, no scores kept: the first leaves maxima and sums of the softmax, the second adds up weights. A thread block has
// a tile of keys in f32 and meets all query rows with it. In the first pass it is one of a KV head's parts; in the second it has all heads,
// so that a slot's mass is a sum in one order.
#include "ops/cuda/mass/mass.h"

#include <algorithm>

#include "cache/evict/gumbel.h"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

namespace {

constexpr int mass_threads = 128;
constexpr int mass_warps = mass_threads / 32;
constexpr int rows_of_lane = 4;
constexpr int most_parts = 32;
constexpr int least_of_part = 4;          // tiles
constexpr int wide_tile = 16;             // slots
constexpr int narrow_tile = 8;            // where keys are wide
constexpr int shared_floats = 16 * 1024;  // of a tile's latents or direct keys, at most

__host__ __device__ constexpr int stored_width(const Problem& p) { return 64 * p.k_blocks; }
__host__ __device__ constexpr int key_width(const Problem& p) {
    return p.rebuild != 0 ? p.head_dim : (p.q_width < stored_width(p) ? p.q_width : stored_width(p));
}
// Floats from one key in shared memory to the next, chosen so that lanes of neighbouring slots meet no bank twice.
__host__ __device__ constexpr int key_pitch(const Problem& p) {
    return ((p.rebuild != 0 ? p.head_dim : stored_width(p)) + 3) / 4 * 4 + 4;
}

struct Tile {
    int problem;
    int region;
    int first;  // slot
    int end;    // of the region's slots in use
};

// Whether there is a tile t.
__device__ inline bool find_tile(const MassArgs& a, int t, Tile& tile) {
    for (int i = 0; i < a.n_problems; i++) {
        const Problem& p = a.problems[i];
        for (int r = 0; r < p.n_regions; r++) {
            const int end = p.n_slots[r];
            const int n = (end + a.tile - 1) / a.tile;
            if (t < n) {
                tile = {i, r, t * a.tile, end};
                return true;
            }
            t -= n;
        }
    }
    return false;
}

// A tile's keys. By all threads of the block
class Keys {
public:
    __device__ Keys(const MassArgs& a, float* keys, float* latents) : a_(a), keys_(keys), latents_(latents) {}

    __device__ const float* of(int s, int pitch) const { return keys_ + s * pitch; }

    // has_rows: those of the head's group are there from the load before
    __device__ void load(const Tile& tile, int head, bool has_rows) const {
        const Problem& p = a_.problems[tile.problem];
        if (has_rows && p.rebuild == 0) return;
        __syncthreads();  // nobody reads the last ones
        if (!has_rows) read(p, tile, head);
        __syncthreads();
        if (p.rebuild == 0) return;
        rebuild(p, head);
        __syncthreads();
        finish(p, tile, head);
        __syncthreads();
    }

private:
    // Stored channels: keys as they lie, or latents by channel.
    __device__ void read(const Problem& p, const Tile& tile, int head) const {
        const RegionArgs& region = p.regions[tile.region];
        const GroupTable& group = region.k_groups[head / p.k_group];
        const int pitch = key_pitch(p);
        for (int i = static_cast<int>(threadIdx.x); i < 4 * p.k_blocks * a_.tile; i += mass_threads) {
            const int s = i % a_.tile;
            const int chunk = i / a_.tile;
            const int slot = tile.first + s;
            uint32_t x[8] = {};
            // free slots hold anything
            if (slot < tile.end && region.seq[slot] != 0) {
                pairs_of_chunk(region.k_row(slot) + group.first, region.chunks[group.chunks + chunk], x);
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float2 pair = __half22float2(half2_of(x[k]));
                const int channel = 16 * chunk + pair_channel(k);
                if (p.rebuild != 0) {
                    latents_[channel * a_.tile + s] = pair.x;
                    latents_[(channel + 2) * a_.tile + s] = pair.y;
                } else {
                    keys_[s * pitch + channel] = pair.x;
                    keys_[s * pitch + channel + 2] = pair.y;
                }
            }
        }
    }

    // Eight slots of a dimension a thread.
    __device__ void rebuild(const Problem& p, int head) const {
        const int pitch = key_pitch(p);
        const int n_channels = min(p.k_rank_max, stored_width(p));
        const auto* const factor =
            reinterpret_cast<const __half*>(p.k_b) + static_cast<int64_t>(head) * p.k_rank_max * p.head_dim;
        for (int i = static_cast<int>(threadIdx.x); i < p.head_dim * (a_.tile / 8); i += mass_threads) {
            const int d = i % p.head_dim;
            const int s0 = i / p.head_dim * 8;
            float sum[8] = {};
            for (int c = 0; c < n_channels; c++) {
                const float b = __half2float(factor[static_cast<int64_t>(c) * p.head_dim + d]);
                const float* const z = latents_ + c * a_.tile + s0;
#pragma unroll
                for (int j = 0; j < 8; j++) sum[j] += b * z[j];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) keys_[(s0 + j) * pitch + d] = sum[j];
        }
    }

    // Bias, norm and RoPE. A warp a slot
    __device__ void finish(const Problem& p, const Tile& tile, int head) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int32_t* const pos = p.regions[tile.region].pos;
        for (int s = static_cast<int>(threadIdx.x) / 32; s < a_.tile; s += mass_warps) {
            float* const k = keys_ + s * key_pitch(p);
            finish_key<most_head_dim>(p, head, tile.first + s < tile.end ? pos[tile.first + s] : 0, k, k, lane);
        }
    }

    const MassArgs& a_;
    float* keys_;
    float* latents_;
};

// The lanes of a warp have a slot of the tile each, and so many rows side by side.
struct Lane {
    int slot;
    int row;
    int step;  // rows of the warp from one of a lane's to its next

    __device__ explicit Lane(const MassArgs& a)
        : slot(static_cast<int>(threadIdx.x) % a.tile),
          row(static_cast<int>(threadIdx.x) % 32 / a.tile),
          step(32 / a.tile) {}
};

// A query row of a KV head, tokens times the query heads that read it.
struct Row {
    int token;
    int head;
    bool counts;

    __device__ Row(const MassArgs& a, int head_kv, int i) {
        const Problem& p = a.problems[0];
        const int rep = p.n_head / p.n_kv;
        token = min(i / rep, p.n_tokens - 1);
        head = head_kv * rep + i % rep;
        counts = i < p.n_tokens * rep && a.weights[token].weight > 0.0f;
    }
    __device__ int64_t index(const MassArgs& a) const {
        return static_cast<int64_t>(token) * a.problems[0].n_head + head;
    }
};

// Whether one of a warp's rows counts: of a prompt a policy may ask the last queries alone.
__device__ inline bool some_count(const MassArgs& a, int head_kv, int row0, int step) {
    bool some = false;
#pragma unroll
    for (int k = 0; k < rows_of_lane; k++) some = some || Row(a, head_kv, row0 + k * step).counts;
    return __any_sync(0xffffffffu, some) != 0;
}

// q · k of a slot and the rows at row0 + k · step.
__device__ inline void multiply(const MassArgs& a, const Problem& p, int head_kv, int row0, int step, const float* key,
                                float (&sum)[rows_of_lane]) {
    const float* q[rows_of_lane];
#pragma unroll
    for (int k = 0; k < rows_of_lane; k++) {
        sum[k] = 0.0f;
        q[k] = p.q + Row(a, head_kv, row0 + k * step).index(a) * p.q_width;
    }
    const int width = key_width(p);
    int d = 0;
    for (; p.q_width % 4 == 0 && d + 4 <= width; d += 4) {
        const float4 y = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
        for (int k = 0; k < rows_of_lane; k++) {
            const float4 x = *reinterpret_cast<const float4*>(q[k] + d);
            sum[k] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
    }
    for (; d < width; d++) {
#pragma unroll
        for (int k = 0; k < rows_of_lane; k++) sum[k] += q[k][d] * key[d];
    }
}

// What the masses' softmax is of; −∞: the row does not count, or does not see the slot.
__device__ inline float logit(const MassArgs& a, const Problem& p, const Tile& tile, const Row& row, int s,
                              float product) {
    const RegionArgs& region = p.regions[tile.region];
    const int slot = tile.first + s;
    if (!row.counts || slot >= tile.end || (region.seq[slot] >> p.q_seq[row.token] & 1) == 0) return -INFINITY;
    const int pos = region.pos[slot];
    const int distance = p.q_pos[row.token] - pos;
    if (distance < 0 || (p.window != 0 && distance >= p.window)) return -INFINITY;
    float x = product * p.scale;
    if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
    if (p.alibi_slopes != nullptr) x -= p.alibi_slopes[row.head] * static_cast<float>(distance);
    if (a.has_noise != 0) x += gumbel(noise_seed(a.layer, row.head, p.q_pos[row.token]), pos);
    return x * a.weights[row.token].cold;
}

// f(row number, row, logit) of the lane's slot and every row that counts. By all threads, after the head's keys were loaded.
template <class Use>
__device__ inline void with_logits(const MassArgs& a, const Tile& tile, int head_kv, const Lane& lane, const float* key,
                                   Use&& use) {
    const Problem& p = a.problems[tile.problem];
    const int n_rows = p.n_tokens * (p.n_head / p.n_kv);
    const int at_once = rows_of_lane * lane.step;
    for (int first = static_cast<int>(threadIdx.x) / 32 * at_once; first < n_rows; first += mass_warps * at_once) {
        if (!some_count(a, head_kv, first + lane.row, lane.step)) continue;
        float product[rows_of_lane];
        multiply(a, p, head_kv, first + lane.row, lane.step, key, product);
#pragma unroll
        for (int k = 0; k < rows_of_lane; k++) {
            const int i = first + lane.row + k * lane.step;
            const Row row(a, head_kv, i);
            use(i, row, logit(a, p, tile, row, lane.slot, product[k]));
        }
    }
}

struct Shared {
    float* keys;
    float* latents;

    __device__ Shared(const MassArgs& a, float* memory) : keys(memory) {
        int pitch = 0;
        for (int i = 0; i < a.n_problems; i++) pitch = max(pitch, key_pitch(a.problems[i]));
        latents = memory + a.tile * pitch;
    }
};

// grid: parts x KV heads. Of each row its maximum and sum over the part's slots.
__global__ void __launch_bounds__(mass_threads) sums_kernel(const __grid_constant__ MassArgs a) {
    extern __shared__ __align__(16) float memory[];
    wait_for_previous();
    const Shared shared(a, memory);
    const Keys keys(a, shared.keys, shared.latents);
    const Lane lane(a);
    const int head_kv = static_cast<int>(blockIdx.y);
    const Problem& any = a.problems[0];
    const int n_rows = any.n_tokens * (any.n_head / any.n_kv);
    float2* const parts = a.parts + static_cast<int64_t>(blockIdx.x) * any.n_tokens * any.n_head;
    for (int i = static_cast<int>(threadIdx.x); i < n_rows; i += mass_threads) {
        parts[Row(a, head_kv, i).index(a)] = make_float2(-INFINITY, 0.0f);
    }
    Tile tile{};
    for (int t = static_cast<int>(blockIdx.x); find_tile(a, t, tile); t += static_cast<int>(gridDim.x)) {
        const Problem& p = a.problems[tile.problem];
        keys.load(tile, head_kv, false);
        with_logits(a, tile, head_kv, lane, keys.of(lane.slot, key_pitch(p)), [&](int i, const Row& row, float x) {
            float top = x;
            for (int o = a.tile / 2; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
            float sum = x == -INFINITY ? 0.0f : expf(x - top);
            for (int o = a.tile / 2; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
            if (lane.slot != 0 || i >= n_rows || sum == 0.0f) return;
            float2& state = parts[row.index(a)];
            const float most = fmaxf(state.x, top);
            state = make_float2(most, state.y * expf(state.x - most) + sum * expf(top - most));
        });
    }
}

// Computes for each row, from its parts and the sink, its maximum and what a weight e^(x − maximum) counts.
__global__ void __launch_bounds__(mass_threads) factors_kernel(const __grid_constant__ MassArgs a) {
    wait_for_previous();
    const Problem& p = a.problems[0];
    const int n = p.n_tokens * p.n_head;
    const int row = static_cast<int>(blockIdx.x) * mass_threads + static_cast<int>(threadIdx.x);
    if (row >= n) return;
    const QueryMass& query = a.weights[row / p.n_head];
    const float sink = a.sinks != nullptr ? a.sinks[row % p.n_head] * query.cold : -INFINITY;
    float top = sink;
    for (int i = 0; i < a.n_parts; i++) top = fmaxf(top, a.parts[static_cast<int64_t>(i) * n + row].x);
    if (top == -INFINITY) {
        a.parts[row] = make_float2(0.0f, 0.0f);
        return;
    }
    float sum = expf(sink - top);
    for (int i = 0; i < a.n_parts; i++) {
        const float2 part = a.parts[static_cast<int64_t>(i) * n + row];
        sum += part.y * expf(part.x - top);
    }
    a.parts[row] = make_float2(top, query.weight / sum);
}

// grid: tiles. The masses of a tile's slots, of all heads.
__global__ void __launch_bounds__(mass_threads) masses_kernel(const __grid_constant__ MassArgs a) {
    extern __shared__ __align__(16) float memory[];
    __shared__ float sums[mass_threads];
    wait_for_previous();
    Tile tile{};
    if (!find_tile(a, static_cast<int>(blockIdx.x), tile)) return;
    float* const to = a.mass[tile.problem][tile.region];
    if (to == nullptr) return;
    const Shared shared(a, memory);
    const Keys keys(a, shared.keys, shared.latents);
    const Lane lane(a);
    const Problem& p = a.problems[tile.problem];
    float mass = 0.0f;
    for (int head_kv = 0; head_kv < p.n_kv; head_kv++) {
        keys.load(tile, head_kv, head_kv % p.k_group != 0);
        with_logits(a, tile, head_kv, lane, keys.of(lane.slot, key_pitch(p)), [&](int, const Row& row, float x) {
            if (x == -INFINITY) return;
            const float2 of = a.parts[row.index(a)];
            mass += expf(x - of.x) * of.y;
        });
    }
    sums[threadIdx.x] = mass;
    __syncthreads();
    const int s = static_cast<int>(threadIdx.x);
    if (s >= a.tile || tile.first + s >= tile.end) return;
    float sum = 0.0f;
    for (int i = s; i < mass_threads; i += a.tile) sum += sums[i];
    to[tile.first + s] = sum;
}

size_t shared_bytes(const MassArgs& args) {
    int pitch = 0;
    int latents = 0;
    for (int i = 0; i < args.n_problems; i++) {
        const Problem& p = args.problems[i];
        pitch = std::max(pitch, key_pitch(p));
        if (p.rebuild != 0) latents = std::max(latents, stored_width(p));
    }
    return static_cast<size_t>(args.tile) * static_cast<size_t>(pitch + latents) * sizeof(float);
}

}  // namespace

void plan_masses(MassArgs& args, int capacity, const Device& device) {
    int widest = 0;
    int n_regions = 0;
    for (int i = 0; i < args.n_problems; i++) {
        widest = std::max(widest, stored_width(args.problems[i]));
        n_regions += args.problems[i].n_regions;
    }
    args.tile = wide_tile * widest <= shared_floats ? wide_tile : narrow_tile;
    args.n_tiles = capacity / args.tile + n_regions;
    const int wanted = std::max(1, 2 * device.n_multiprocessors / args.problems[0].n_kv);
    args.n_parts = std::clamp(args.n_tiles / least_of_part, 1, std::min(wanted, most_parts));
}

size_t mass_part_bytes(const MassArgs& args) {
    const Problem& p = args.problems[0];
    return static_cast<size_t>(args.n_parts) * static_cast<size_t>(p.n_tokens) * static_cast<size_t>(p.n_head) *
           sizeof(float2);
}

cudaError_t add_up_masses(const MassArgs& args, cudaStream_t stream) {
    static_assert(sizeof(MassArgs) <= 4096, "a launch has no more room for its parameters");
    const Problem& p = args.problems[0];
    const size_t bytes = shared_bytes(args);
    const dim3 parts(static_cast<unsigned>(args.n_parts), static_cast<unsigned>(p.n_kv));
    cudaError_t error = launch_next(sums_kernel, parts, mass_threads, bytes, stream, args);
    if (error != cudaSuccess) return error;
    const dim3 rows(static_cast<unsigned>((p.n_tokens * p.n_head + mass_threads - 1) / mass_threads));
    error = launch_next(factors_kernel, rows, mass_threads, 0, stream, args);
    if (error != cudaSuccess) return error;
    return launch_next(masses_kernel, dim3(static_cast<unsigned>(args.n_tiles)), mass_threads, bytes, stream, args);
}

}  // namespace lkv::cuda
