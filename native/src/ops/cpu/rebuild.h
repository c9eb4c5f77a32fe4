// Rebuilding one KV head's K or V tile from the tile of its latent.
#pragma once

#include <cstdint>

#include "ops/cpu/gemm.h"
#include "ops/cpu/tile.h"
#include "ops/latent_attn.h"

namespace lkv {

// cos and sin of the slots' own positions, times rope_mscale. out: cos [n_rot/2][64], then sin [n_rot/2][64].
void rope_tile(const LatentAttnParams& p, const int32_t* positions, float* out);

// latent: by channel, [4][kept][16] -> k: by channel, [4][head_dim][16]. a, c: scratch for head_dim row pointers.
void rebuild_k(const LatentAttnParams& p, int head, int kept, const float* latent, const float* rope, float* k,
               const float** a, float** c);

// latent: by channel, [4][kept][16] -> v: by slot, [ceil(head_dim / 16)][64][16]. a, c: scratch for 64 row pointers.
void rebuild_v(const LatentAttnParams& p, int head, int kept, const float* latent, float* v, const float** a,
               float** c);

}  // namespace lkv
