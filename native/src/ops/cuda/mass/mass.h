// The masses of eviction (ops/attn_mass.h) on the GPU, after a layer's attention: what every slot gathers from the batch's queries.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ops/cuda/gpu/device.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

struct QueryMass {
    float weight;  // 0: the query does not count
    float cold;    // 1 / temperature
};

struct MassArgs {
    // As attention had them, with queries: of the same tokens, one softmax over all. Regions beyond n_regions hold nothing.
    Problem problems[2];
    int32_t n_problems;
    float* mass[2][max_regions];  // of each problem's regions, [n_slots]; null: nobody asks
    const QueryMass* weights;     // [n_tokens]
    const float* sinks;           // [n_head] or null
    int32_t has_noise;            // cache/evict/gumbel.h
    int32_t layer;                // which noise

    int32_t tile;     // slots whose keys are in shared memory at once, 8 or 16
    int32_t n_tiles;  // of all regions together, at most
    int32_t n_parts;  // of the slots, for the softmax's maxima and sums
    float2* parts;    // [n_parts, n_tokens, n_head]
};

// Sets tile, n_tiles and n_parts; the problems' plans and mass are read. capacity: slots of all regions
void plan_masses(MassArgs& args, int capacity, const Device& device);
size_t mass_part_bytes(const MassArgs& args);

// Enqueued; writes mass of all slots in use.
cudaError_t add_up_masses(const MassArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
