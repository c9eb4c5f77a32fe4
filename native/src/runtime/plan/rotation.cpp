#include "runtime/plan/rotation.h"

namespace lkv {
namespace {

// A row's stored formats for which `holds` does.
template <typename Holds>
bool any_format(const RowLayout& row, Holds holds) {
    for (int g = 0; g < row.n_groups; g++) {
        for (int s = 0; s < row.groups[g].n_segments; s++) {
            if (holds(static_cast<Format>(row.segments[row.groups[g].first_segment + s].format))) {
                return true;
            }
        }
    }
    return false;
}

}  // namespace

bool rotates_full(const Model& model, const KvCache& cache, bool value_side) {
    bool quantized = false;
    for (int il = 0; il < model.hparams().n_layer; il++) {
        const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
        const bool full = value_side ? spec.v_path == VPath::full : spec.k_path == KPath::full;
        for (int r = 0; full && r < cache.placement().n_regions(); r++) {
            if (in_token_blocks(cache.rows().k_layout(r, il))) {
                return false;
            }
            quantized = quantized || any_format(cache.rows().layout(r, il, value_side), format_is_quantized);
        }
    }
    return quantized;
}

}  // namespace lkv
