// What one step asks of the cache: a layer's rows as kernels see them, and room for tokens that leave the recent window.
#include "cache/kv_cache.h"

namespace lkv {

RegionView KvCache::view(int region, int layer) const {
    const Cells& held = placement_.cells(region, layer);
    const bool has_rows = rows_.region(region, layer).layers[static_cast<size_t>(layer)].held;
    const bool of_value = rows_.key_of_value(layer);
    return {rows_.row(region, layer, of_value, 0),
            rows_.v_row(region, layer, 0),
            held.pos_data(),
            held.seq_data(),
            has_rows ? held.end() : 0,
            rows_.layout(region, layer, of_value),
            rows_.v_layout(region, layer)};
}

float* KvCache::masses(int region, int layer) {
    if (!has_masses(region)) return nullptr;
    Eviction& eviction = *placement_.eviction();
    return region == placement_.middle() ? eviction.mass(layer) : eviction.recent_mass(layer);
}

void KvCache::demote(int n_ahead) {
    const std::vector<RowMove> moves = placement_.demote(n_ahead);
    if (moves.empty()) return;
    for (CacheDevice* device : rows_.devices()) {
        if (device != nullptr) device->move_rows(*this, placement_.recent(), placement_.middle(), moves);
    }
    for (int il = 0; il < placement_.n_layers() && rows_.on_host(il); il++) {
        rows_.demote(il, placement_.moves_of(il, moves));
    }
    placement_.leave_recent(moves);
}

}  // namespace lkv
