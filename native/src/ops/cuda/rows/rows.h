// Rows of a layer are stored, moved between regions, and their slots claimed.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/problem.h"

namespace lkv::cuda {

// One region's K and V rows of one layer, for writing. Segments live on the device.
struct RowTarget {
    int32_t full;  // 1: full rows beside latents in other regions
    uint8_t* k_rows;
    uint8_t* v_rows;
    const SegmentLayout* k_segments;
    const SegmentLayout* v_segments;
    int64_t k_page;
    int64_t v_page;
    int32_t k_row_bytes;
    int32_t v_row_bytes;
    int32_t n_k_segments;
    int32_t n_v_segments;
};

// K and V of a batch in one form.
struct StoreSource {
    const float* k;  // [n_tokens, k_stride]
    const float* v;  // [n_tokens, v_stride]
    int64_t k_stride;
    int64_t v_stride;
    int32_t v_hadamard = 0;  // V is stored times a Hadamard matrix of so many channels, at most 64; 0: as it is
};
// Floats of a row of V that is, at most.
constexpr int64_t most_rotated = 48 * 1024 / sizeof(float);

struct StoreArgs {
    StoreSource full;     // for regions of full rows
    StoreSource latents;  // for all others
    int32_t with_k;
    int32_t with_v;
    const int32_t* region;  // [n_tokens]
    const int32_t* slot;    // [n_tokens], -1: the token's rows go nowhere
    RowTarget targets[max_regions];
};

// Marks the slots of new tokens as used.
struct ClaimArgs {
    const int32_t* q_pos;   // [n_tokens]
    const int32_t* q_seq;   // [n_tokens]
    const int32_t* region;  // [n_tokens]
    const int32_t* slot;    // [n_tokens], -1: none
    int32_t* pos[max_regions];
    uint64_t* seq[max_regions];
    int32_t seen;  // 0: they hold nothing yet
};

// Finds OwnSteps of all regions.
struct FindStepsArgs {
    const int32_t* q_seq;              // [n_tokens]
    const uint64_t* seq[max_regions];  // [n_slots]
    const int32_t* n_slots;            // [n_regions], on the device
    int32_t n_regions;
    int32_t* begins;  // of the last region's steps
    int32_t* ends;
    int32_t* steps;
    int32_t capacity;
};

// K of single rows into blocks of 32 tokens: the segments that are stored so, no others.
struct BlockArgs {
    const uint8_t* rows;
    int64_t page;  // from a page of rows to the next one
    int64_t row_bytes;
    const SegmentLayout* segments;  // of `rows`; null: these are f32, of all channels
    int32_t n_segments;
    const int32_t* from_slot;  // [n_rows] of `rows`; null: 0, 1, …
    RowTarget to;
    const int32_t* to_slot;  // [n_rows], 32 of one block after 32 of another
};

struct MoveArgs {
    RowTarget from;
    RowTarget to;
    const int32_t* from_slot;  // [n_rows]
    const int32_t* to_slot;    // [n_rows]
    int32_t k_width;           // channels of the uncompressed vector
    int32_t v_width;
};

// Every call enqueues on the stream and returns the launch's error.
cudaError_t claim_slots(const ClaimArgs& args, int n_tokens, cudaStream_t stream);
cudaError_t find_own_steps(const FindStepsArgs& args, int n_tokens, cudaStream_t stream);
cudaError_t store_rows(const StoreArgs& args, int n_tokens, cudaStream_t stream);
cudaError_t move_rows(const MoveArgs& args, int n_rows, cudaStream_t stream);
// n_rows: a multiple of 32
cudaError_t store_blocks(const BlockArgs& args, int n_rows, cudaStream_t stream);

}  // namespace lkv::cuda
