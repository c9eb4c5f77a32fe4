#include "graph/step/route.h"

#include "graph/attention_branch.h"
#include "ops/cuda/routes.h"

namespace lkv {
namespace {

bool expands(const GraphSources& from, const LayerCacheSpec& spec, int il) {
    const GraphShape& shape = from.shape;
    const Placement& placement = from.cache.placement();
    const bool can = shape.on_gpu && shape.fused && from.exact == nullptr && spec.k_path != KPath::rebuild &&
                     spec.k_path != KPath::value && !from.model.layers()[static_cast<size_t>(il)].k_b.empty() &&
                     !in_token_blocks(from.cache.rows().k_layout(placement.middle(), il));
    if (!can || (placement.in_ring(il) ? shape.ring_apart : shape.apart)) return false;
    const HeadShape& heads = from.model.hparams().heads_of(il);
    return expands_latents(shape.n_tokens, shape.n_tokens * (heads.n_head / heads.n_kv), heads.head_dim,
                           spec.k.rank_max());
}

}  // namespace

Route route_of(const GraphSources& from, int il) {
    const LayerCacheSpec& spec = from.model.cache_spec().layers[static_cast<size_t>(il)];
    const GraphShape& shape = from.shape;
    // a lazy prefill attends to rows before compression, as a layer of their own
    const LayerCacheSpec& rows = from.exact != nullptr ? from.exact->spec : spec;
    Route route;
    if (rows.k_path == KPath::rebuild || rows.rebuilds_key_of_value()) {
        route.keys = Route::Keys::rebuilt;
    } else if (expands(from, spec, il)) {
        route.keys = Route::Keys::expanded;
    }
    route.projects = (spec.k_path == KPath::rotated || spec.k_path == KPath::absorbed) && rows.k_path != KPath::full &&
                     route.keys != Route::Keys::expanded;
    route.rotates_results = shape.fused && shape.concurrent && from.constants.hadamard_v != nullptr &&
                            spec.k_path == KPath::full && spec.v_path == VPath::full && !spec.is_mla();
    return route;
}

}  // namespace lkv
