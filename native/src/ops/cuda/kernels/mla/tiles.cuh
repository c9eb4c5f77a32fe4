// How the slots in use are cut in parts, a thread block each.
#pragma once

#include "ops/cuda/kernels/mla/layout.h"
#include "ops/cuda/softmax/own_steps.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// A launch's slots of every region: all in use, or those of a chunk.
struct MlaSlots {
    int32_t of[max_regions];
    int32_t first[max_regions];
    int32_t key_row[max_regions];  // expanded row of slot `first`

    __device__ explicit MlaSlots(const MlaArgs& p) {
        const SlotCounts counts(p);
        const MlaKeys& keys = p.mla.keys;
        int before = 0;  // tiles
#pragma unroll
        for (int r = 0; r < max_regions; r++) {
            of[r] = counts.of[r];
            first[r] = key_row[r] = 0;
            if (keys.as == MlaK::latents || keys.as == MlaK::values) continue;
            first[r] = max(0, (keys.first_tile - before) * key_tile);
            key_row[r] = (before - keys.first_tile) * key_tile + first[r];
            of[r] = max(0, min(of[r], (keys.first_tile - before) * key_tile + keys.chunk_slots) - first[r]);
            before += (counts.of[r] + key_tile - 1) / key_tile;
        }
    }
};

// Slots are shared out in steps of step_slots, so that no part has a whole tile more than another: 128 tiles in 122 parts would be two for
// six of them, and one for the others, which wait.
// A part that waits for the exact windows' kernel has so many steps less than others: about 7 us, or as long as that kernel runs. Where parts
// are shorter than three times that there are none on its multiprocessors.
constexpr int least_late_steps = 5;

struct MlaSteps {
    int before_1, before_2, all;  // steps before regions 1 and 2, and of all
    int count;                    // parts with work, 1 … n_split
    int late;                     // the last ones, that start late
    int late_steps;               // so many later

    __device__ MlaSteps(const MlaArgs& p, const MlaSlots& n_slots) {
        const auto steps = [&](int r) { return (n_slots.of[r] + step_slots - 1) / step_slots; };
        before_1 = steps(0);
        before_2 = before_1 + steps(1);
        all = before_2 + steps(2);
        const auto quotient = [](int a, int b) {
            return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
        };
        int late_parts = p.mla.late_parts;
        late_steps = least_late_steps;
        if (late_parts > 0 && p.sharing.parts != 0) {
            const WindowShare windows(p.sharing);
            const int own_blocks = p.sharing.latent_blocks;
            const int blocks = (windows.parts - 1) * p.sharing.window_blocks;
            late_parts = min(p.n_split - 1, late_parts + quotient(blocks + own_blocks - 1, own_blocks));
            late_steps = max(late_steps, static_cast<int>(windows.each * static_cast<float>(own_blocks)) / step_slots);
        }
        const int early = p.n_split - late_parts;
        const int few = p.mla.few_parts;
        const int least = few > 0 ? min((all + few - 1) / few, most_tile / step_slots) : 1;
        const int each = max(quotient(all + early - 1, early), least);
        late = each < 3 * late_steps ? 0 : late_parts;
        count = late > 0 ? p.n_split : (each <= 1 ? max(1, all) : quotient(all + each - 1, each));
        if (p.mla.keys.n_parts != 0) count = p.mla.keys.n_parts;
    }
    // The first step of a part, or the last one's end.
    __device__ int begin(int part) const {
        const int product = (all + late * late_steps) * part;
        const int begin = product < 1 << 20
                              ? small_quotient(product, count)
                              : static_cast<int>(static_cast<uint32_t>(product) / static_cast<uint32_t>(count));
        return begin - late_steps * max(0, part - (count - late));
    }
    __device__ int region_of(int step) const { return (step >= before_1 ? 1 : 0) + (step >= before_2 ? 1 : 0); }
    __device__ int steps_before(int region) const { return region == 0 ? 0 : (region == 1 ? before_1 : before_2); }
};

// What a thread block has of the slots: steps begin … end - 1 of all, or of a token's own.
template <bool Apart>
struct MlaShare {
    int part = -1;  // -1: there is nothing to do
    int token = -1;
    int begin = 0, end = 0;
    const int32_t* steps = nullptr;  // a token's own

    __device__ MlaShare() {}
    __device__ MlaShare(const MlaArgs& p, const MlaSteps& all) {
        const int index = static_cast<int>(blockIdx.z);
        if constexpr (!Apart) {
            if (index >= all.count) return;
            part = index;
            begin = all.begin(part);
            end = all.begin(part + 1);
            return;
        }
        const ApartShare own(p, index);
        part = own.part;
        token = own.token;
        begin = own.begin;
        end = own.end;
        steps = own.steps;
    }
};

}  // namespace lkv::cuda
