// The MLA kernel's plan: all query heads of a group against latents that they share, K direct and V latent, few query rows. Or both are one
// row, of which V is what lies behind K's turned channels, and the model has V's factor (DeepSeek's MLA).
//
// Channels come in units of 32 within one segment, so that a row is read without a table of chunks: f16 (exact windows), codes of 8, 4, 2
// and 1 bits with a scale and a minimum (units.cuh), and codes of 8, 6, 4, 3, 2 and 1 bits of groups with scales (codes.cuh).
#pragma once

#include "ops/cuda/kernel.h"

namespace lkv::cuda {

constexpr int mla_warp_bits = 4;
constexpr int mla_warps = 1 << mla_warp_bits;
constexpr int mla_threads = 32 * mla_warps;
constexpr int unit_channels = 32;
constexpr int most_units = 32;                          // of one side: a warp finds out about them at once
constexpr int key_slots = 16;                           // slots of a warp when it scores
constexpr int score_pitch = key_slots * mla_warps + 4;  // four lanes' rows start in different banks
constexpr int most_tile = 128;                          // slots
constexpr int mla_fixed = 5120;                         // bytes of the kernel's own variables, at most
constexpr int least_tile = 32;                          // and of a tile of f16 rows, which are read where they lie
constexpr int most_decoded_head = 256;                  // head_dim, where V's latent is multiplied with a factor

constexpr int n_scaled_formats = 6;  // that the kernel reads, of rows whose groups have scales

// Where K of the MLA kernel is: latents like V, or made from them of a chunk of the slots: full rows (expand/), or the queries' scores
// (expand/score.cuh). Or in the same rows as V, which are staged once, f16 too.
enum class MlaK : int32_t { latents, rows, scores, values };

// Whether a tile's rows are staged at once, in two stages by turns; else K and V have a stage each.
LKV_HD constexpr bool stages_alternate(MlaK k) { return k == MlaK::scores || k == MlaK::values; }

constexpr int key_tile = 64;  // slots

struct MlaKeys {
    MlaK as;
    int32_t first_tile;   // of the chunk, of key_tile slots
    const uint8_t* rows;  // f16 [slots][n_kv][head_dim]
    const float* scores;  // [n_tokens · n_head][chunk_slots]
    int32_t chunk_slots;
    int32_t continues;  // 1: parts of the chunks before are there
    int32_t
        n_parts;  // of every chunk, which add up in the same ones; 0: there is one chunk, and as many as its slots ask for
};

struct MlaPlan {
    int32_t rows;     // query rows of a thread block, 8, 16 or 32
    int32_t k_units;  // of the widest group in any region; 0: scores are there
    int32_t tile;     // slots of a tile of compressed rows, at most
    int32_t k_pitch;  // bytes from row to row of a staged tile, equal to the cache's row_bytes modulo 16
    int32_t v_pitch;
    int32_t small_pitch;  // of tiles of least_tile slots that are staged
    int32_t small_tiles;  // bit r: tiles of region r have least_tile slots
    int32_t late_parts;   // of n_split, the last ones: where another kernel runs first, see MlaSteps
    int32_t few_parts;    // more than these have a whole tile each; 0: they need not
    int32_t scaled;       // 1: V of a region is in rows whose groups have scales
    MlaKeys keys;
};

// From row to row of a staged tile, for a group's bytes of rows that are row_bytes apart: what lies at a multiple of 16 in memory does
// so in the tile. Rows that are one group lie as in memory; others far enough apart for the 16-byte pieces that they begin and end in,
// and an odd number of them where there is a choice, so that eight rows start in different banks.
LKV_HD constexpr int mla_pitch(uint32_t bytes, uint32_t first, uint32_t row_bytes) {
    if (row_bytes % 16 == 0 && first % 16 == 0) return static_cast<int>((bytes + 15) / 16 | 1) * 16;
    if (bytes == row_bytes) return static_cast<int>(bytes);
    const uint32_t least = bytes + 30;
    return static_cast<int>(least + (row_bytes - least) % 16);
}

struct MlaArgs : CutProblem {
    MlaPlan mla;
};

// Shared memory, in this order. Sizes in bytes, multiples of 16.
struct MlaLayout {
    int queries;  // [k_units][rows / 8][32 lanes] four f16 pairs
    int scores;   // f32 [rows][score_pitch]: of each warp key_slots, those of all shares of K's channels side by side
    int weights;  // f16, see weight_at; of two tiles unless stages alternate
    int scales;  // of V's rows, of two tiles by turns: [tile] as stored, then [n_scaled_formats][tile] in f16, see keep_scales
    int units;    // MlaUnit [regions][K, V][most_units]
    int k_stage;  // a tile as stored, and up to 15 bytes before its first row; see stages_alternate
    int v_stage;

    LKV_HD MlaLayout(const MlaPlan& p, int n_regions)
        : queries(p.k_units * p.rows * 64),
          scores(p.k_units > 0 ? p.rows * score_pitch * 4 : 0),
          weights(p.rows * p.tile * (stages_alternate(p.keys.as) ? 2 : 4)),
          scales(p.scaled * p.tile * (2 * 4 + 2 * n_scaled_formats * 2)),
          units(n_regions * 2 * most_units * 8),
          k_stage(stage(p, p.k_pitch)),
          v_stage(stage(p, p.v_pitch)) {}
    LKV_HD int total() const { return queries + scores + weights + scales + units + k_stage + v_stage; }

private:
    LKV_HD static int stage(const MlaPlan& p, int pitch) {
        const int whole = p.tile * pitch;
        const int small = least_tile * p.small_pitch;
        return ((whole > small ? whole : small) + 47) / 16 * 16;
    }
};

// For a kernel that makes keys for this one (expand/), too: rows of V and how the work is cut, into `plan` and its MlaPlan, which comes with
// `keys.as`. Null, or the reason against it.
const char* plan_mla_rows(const Request& request, Plan& plan, MlaPlan& mla);
// Whether all rows of a side are what this kernel reads.
bool side_has_units(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks);
size_t mla_parts_floats(const Plan& plan);
cudaError_t launch_mla(const MlaArgs& args, int items, cudaStream_t stream);
// full: a problem whose parts are merged with them, or null
cudaError_t merge_mla(const MlaArgs& args, const CutProblem* full, cudaStream_t stream);

}  // namespace lkv::cuda
