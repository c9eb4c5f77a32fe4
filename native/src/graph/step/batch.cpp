#include "graph/step/batch.h"

#include <algorithm>

#include "ops/cuda/routes.h"

namespace lkv {

void BatchSlots::count(const Placement& placement) {
    std::fill(apart, apart + 2, Apart{});
    if (placement.options().n_seq_max == 1 || own_rows) return;
    const auto n = static_cast<int64_t>(pos.size());
    const int middle = placement.middle();
    int64_t exact = 0;  // slots of the windows in use
    for (int r = 0; r < middle; r++) exact += placement.cells(r).end();
    int64_t seen_exact = 0;
    for (size_t i = 0; i < pos.size(); i++) {
        const int32_t n = pos[i] + 1;
        const int recent = placement.has_tiers() ? placement.cells(placement.recent()).count(seq[i])
                                                 : placement.options().window(n) + demotion_batch;
        seen_exact += std::min(n, placement.options().sink + recent);
    }
    for (const bool in_ring : {false, true}) {
        // tokens of layers that evict read all slots
        if (in_ring ? placement.ring() == nullptr : placement.eviction() != nullptr) continue;
        int64_t seen = 0;
        for (const int32_t p : pos) seen += in_ring ? std::min(p + 1, placement.ring()->window()) : p + 1;
        const Cells& others = in_ring ? placement.ring()->cells() : placement.cells(middle);
        apart[in_ring ? 1 : 0] = {less_work_apart(n, seen_exact, exact), less_work_apart(n, seen, others.end())};
    }
}

}  // namespace lkv
