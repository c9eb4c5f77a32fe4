// Products of latents with B: 128 slots x 128 dimensions of whole heads, 32 channels a step.
#pragma once

#include "ops/cuda/kernels/expand/latents.cuh"
#include "ops/cuda/kernels/mla/units.cuh"

namespace lkv::cuda {

// A thread's four pieces of a step's 32 channels of B: eight dimensions each, of channels x, x + 8, x + 16 and x + 24. Rows of a step lie in
// the order of KeyReader's pairs, those of its first product before those of its second.
class FactorCopies {
public:
    __device__ FactorCopies(const ExpandSide& side, int head0, int column0, int head_dim) : rank_(side.rank) {
        constexpr int pieces = expand_columns / 8;
        const int thread = static_cast<int>(threadIdx.x);
        const int column = thread % pieces * 8;
        const int head = small_quotient(column, head_dim);
        channel_ = thread / pieces;
        exists_ = head < side.heads;
        from_ = side.factor + (static_cast<int64_t>(head0 + head) * side.rank + channel_) * head_dim + column0 +
                column - head * head_dim;
        const int row = channel_ / 4 * 16 + channel_ % 2 * 8 + channel_ % 4 / 2;
        to_ = row * factor_pitch + column * 2;
        step_ = 8 * head_dim;
    }
    // The next step's, into its stage.
    __device__ void issue(uint8_t* stage) {
        if (!exists_) return;
#pragma unroll
        for (int k = 0; k < 4; k++, channel_ += 8, from_ += step_) {
            uint8_t* const at = stage + to_ + 2 * k * factor_pitch;
            if (channel_ < rank_) {
                copy_async<16>(at, from_);
            } else {
                *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
            }
        }
    }

private:
    const uint16_t* from_;
    int rank_, channel_, to_, step_;
    bool exists_;
};

// A warp's latents of one step: 32 slots x 16 channels twice, operands a.
using LatentPair = uint32_t[2][2][4];  // [product][16 slots][word]

__device__ __forceinline__ float (&four_of(float (&acc)[64], int n))[4] {
    return *reinterpret_cast<float (*)[4]>(acc + 4 * n);
}

__device__ __forceinline__ void expand_step(float (&acc)[2][64], const LatentPair& a, const uint8_t* factor, int lane) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint32_t b[4];
            load_four<true>(b, factor + (16 * k + lane % 16) * factor_pitch + 32 * n + lane / 16 * 16);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(four_of(acc[m], 2 * n), a[k][m], b[0], b[1]);
                mma(four_of(acc[m], 2 * n + 1), a[k][m], b[2], b[3]);
            }
        }
    }
}

// One unit of the lane's four slots.
template <int Bits>
__device__ __forceinline__ void decode_unit(const KeyReader<Bits>& reader,
                                            const uint32_t (&words)[4][KeyReader<Bits>::n_words],
                                            const uint32_t (&affine)[4], LatentPair& a) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint32_t x[4];
        uint32_t y[4];
        reader.decode(words[2 * m], affine[2 * m], x);
        reader.decode(words[2 * m + 1], affine[2 * m + 1], y);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            a[k][m][0] = x[2 * k];
            a[k][m][1] = y[2 * k];
            a[k][m][2] = x[2 * k + 1];
            a[k][m][3] = y[2 * k + 1];
        }
    }
}

// B in turns of expand_stages steps, in shared memory.
class FactorStages {
public:
    __device__ FactorStages(const ExpandSide& side, int head0, int column0, int head_dim, uint8_t* stages, int n_steps)
        : copies_(side, head0, column0, head_dim), stages_(stages), n_steps_(n_steps) {
        for (int step = 0; step < expand_stages - 1; step++) {
            if (step < n_steps) copies_.issue(at(step));
            copies_commit();
        }
    }
    // Before a step's product: its B is there, the one three steps further on its way. By all threads
    __device__ const uint8_t* next(int step) {
        copies_wait(expand_stages - 2);
        __syncthreads();  // this step has come, the one before was read
        const int ahead = step + expand_stages - 1;
        if (ahead < n_steps_) copies_.issue(at(ahead));
        copies_commit();
        return at(step);
    }
    __device__ int n_steps() const { return n_steps_; }

private:
    __device__ uint8_t* at(int step) const { return stages_ + step % expand_stages * expand_depth * factor_pitch; }

    FactorCopies copies_;
    uint8_t* stages_;
    int n_steps_;
};

// Sums of a warp's 32 slots: of 16 each, [dimensions / 8][4].
using ExpandSums = float[2][64];

// The units of a lane's four slots, which are of one region.
struct UnitRows {
    const uint8_t* rows[4];
    const MlaUnit* units;
    int n_units;
};

// Expands units by single warps.
__device__ __forceinline__ void expand_by_units(ExpandSums& acc, const UnitRows& of, FactorStages& stages, int lane) {
    const auto run = [&](auto bits, int& u, int end) __attribute__((always_inline)) {
        constexpr int Bits = decltype(bits)::value;
        const KeyReader<Bits> reader(lane);
        constexpr int n_words = KeyReader<Bits>::n_words;
        uint32_t words[4][n_words];
        uint32_t affine[4] = {};
        int at = 0;
        int segment_end = u;
        const auto load = [&] {
#pragma unroll
            for (int i = 0; i < 4; i++) reader.load(of.rows[i] + at, words[i]);
        };
        const auto begin_segment = [&] {
            const MlaUnit unit = of.units[u];
            segment_end = unit.end;
            at = unit.codes;
            if constexpr (Bits < 16) {
#pragma unroll
                for (int i = 0; i < 4; i++) affine[i] = UnitAffine<Bits>(unit).of(of.rows[i]);
            }
            load();
        };
#pragma unroll 1
        while (u < end) {
            if (u == segment_end) begin_segment();
            LatentPair a;
            decode_unit<Bits>(reader, words, affine, a);
            at += 4 * Bits;
            if (u + 1 < segment_end) load();
            expand_step(acc, a, stages.next(u), lane);
            u++;
        }
    };
    int u = 0;
#pragma unroll 1
    while (u < of.n_units) {
        const MlaUnit unit = of.units[u];
        const int end = min(static_cast<int>(unit.kind_end), of.n_units);
        if (unit.kind == kind_f16_wide) {
            run(std::integral_constant<int, 16>{}, u, end);
        } else {
            with_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) { run(bits, u, end); });
        }
    }
    for (; u < stages.n_steps(); u++) stages.next(u);  // the other slots' regions store more channels
}

// Expands any rows. latents: f16 [2][128 slots][latent_pitch bytes]
__device__ __forceinline__ void expand_by_chunks(ExpandSums& acc, const ExpandSlot& slot, uint8_t* latents,
                                                 FactorStages& stages, int lane) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const auto load_latents = [&](int step) {
        uint8_t* const at = latents + (step % 2 * expand_slots + thread) * latent_pitch;
        put_pairs(slot, 2 * step, at);
        put_pairs(slot, 2 * step + 1, at);
    };
    if (stages.n_steps() > 0) load_latents(0);
#pragma unroll 1
    for (int step = 0; step < stages.n_steps(); step++) {
        const uint8_t* const factor = stages.next(step);
        if (step + 1 < stages.n_steps()) load_latents(step + 1);
        const uint8_t* const from = latents + (step % 2 * expand_slots + 32 * warp) * latent_pitch;
        LatentPair a;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int k = 0; k < 2; k++) load_a(a[k][m], from + 16 * m * latent_pitch + 32 * k, latent_pitch, lane);
        }
        expand_step(acc, a, factor, lane);
    }
}

}  // namespace lkv::cuda
