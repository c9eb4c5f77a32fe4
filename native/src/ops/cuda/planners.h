// Whether a kernel takes a shape, and how it cuts the work: one function a kernel, in the kernel's folder, named in plan.cpp's list. `a` comes
// with the shape and is spoilt where the answer is false. capacity: slots of all regions.
#pragma once

#include "ops/cuda/args.h"
#include "ops/latent_attn.h"

namespace lkv::cuda {

bool plan_specialized(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_decode(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_mla(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_expand_keys(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_wide(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_expand(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_prefill(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);
bool plan_direct(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a);

// What expand/ asks of the kernels that attend to its rows. K of the MLA kernel may be expanded, AttnArgs::rebuild.
bool plan_mla_rows(const LatentAttnParams& p, const Device& device, AttnArgs& a);
// Whether all rows of a side are what the MLA kernel reads.
bool side_has_units(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks);
// k_pitch, v_pitch: of the region with the smallest rows, the compressed one; exact windows beside it are a few tiles, read where they
// lie instead of making every stage four times as large. any_rows: even so few that warps stay idle
bool plan_prefill_rows(int capacity, const Device& device, int k_pitch, int v_pitch, AttnArgs& a, bool any_rows);

}  // namespace lkv::cuda
