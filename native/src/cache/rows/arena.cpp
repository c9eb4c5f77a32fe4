// Recent and middle in one memory. A page has page_slots tokens of every layer of a device, so that a page which one region gives up is
// room for whole tokens of the other:
//
//   | middle page 0 | middle page 1 | … →        free        ← … | recent page 1 | recent page 0 |
//   page: K of the first layer, V of the first layer, K of the second layer, …
#include <algorithm>

#include "cache/placement/cells.h"
#include "cache/rows/rows.h"
#include "cache/slots.h"

namespace lkv {

Arena Rows::share_memory(int least_exact) {
    RegionRows& recent = regions_[static_cast<size_t>(recent_)];
    RegionRows& middle = regions_[static_cast<size_t>(middle_)];
    const auto place = [](RegionRows& region, const LayerRun& run, size_t first, int64_t page) {
        for (int il = run.first_layer; il < run.end_layer; il++) {
            LayerRows& layer = region.layers[static_cast<size_t>(il)];
            for (int side = 0; side < 2; side++) {
                layer.offset[side] = first;
                layer.page[side] = page;
                first += static_cast<size_t>(bytes_of_page(layer.layout[side].row_bytes));
            }
        }
    };
    Arena arena;
    arena.least_exact = least_exact;
    const std::vector<LayerRun> on_host{{-1, 0, n_layers()}};
    const std::vector<LayerRun>& runs = options_.runs.empty() ? on_host : options_.runs;
    for (const LayerRun& run : runs) {
        const auto page_of = [&run](const RegionRows& region) {
            return static_cast<int64_t>(region.bytes_of(run)) / region.n_slots * page_slots;
        };
        const auto bytes = static_cast<int64_t>(recent.bytes_of(run) + middle.bytes_of(run));
        arena.devices.push_back({bytes, page_of(recent), page_of(middle)});
    }
    pay_for_cells(arena, static_cast<int>(runs.size()));
    size_t end = 0;
    for (size_t i = 0; i < runs.size(); i++) {
        const Arena::Device& of = arena.devices[i];
        place(middle, runs[i], end, of.middle_page);
        end += static_cast<size_t>(of.bytes);
        place(recent, runs[i], end - static_cast<size_t>(of.exact_page), -of.exact_page);
    }
    recent.storage_bytes = middle.storage_bytes = end;
    shares_memory_ = true;
    return arena;
}

// More exact tokens need more cells. These come off the rows, as far as the fullest middle leaves some, so that a cache takes no more memory
// than one with a fixed window; beyond that a thousandth may be added.
void Rows::pay_for_cells(Arena& arena, int n_runs) {
    const int n_least = regions_[static_cast<size_t>(recent_)].n_slots;
    // what is exact at the end is not in the middle, but for batches that wait
    const int exact = std::max(0, arena.least_exact - 2 * demotion_batch * options_.n_seq_max);
    const int compressed = whole_pages(regions_[static_cast<size_t>(middle_)].n_slots - exact);
    const auto cell = static_cast<int64_t>(Cells::bytes_per_slot());
    const int64_t most = std::min(arena.exact_beside(0), whole_pages(options_.n_ctx)) - n_least;
    const int64_t due = (std::max<int64_t>(0, most) * cell / n_runs + 64) / 64 * 64;
    int64_t allowed = 0;
    for (Arena::Device& of : arena.devices) {
        const int64_t least = arena.least_exact / page_slots * of.exact_page + compressed / page_slots * of.middle_page;
        const int64_t paid = std::max<int64_t>(0, std::min(due, (of.bytes - least) / 64 * 64));
        allowed += paid + of.bytes / 1000;
        of.bytes -= paid;
        for_cells_.push_back(static_cast<size_t>(paid));
    }
    arena.most_exact = std::max(arena.least_exact, n_least + static_cast<int>(std::min(most, allowed / cell)));
}

}  // namespace lkv
