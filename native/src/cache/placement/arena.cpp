#include "cache/placement/arena.h"

#include <algorithm>
#include <climits>

namespace lkv {
namespace {

int64_t pages_of(int slots) { return whole_pages(slots) / page_slots; }

// The least of what devices have room for, those aside whose layers all recur.
template <typename F>
int64_t least_of(const Arena& arena, int64_t most, F&& room) {
    for (const Arena::Device& of : arena.devices) {
        if (of.exact_page > 0) most = std::min(most, room(of));
    }
    return most;
}

}  // namespace

int Arena::exact_beside(int middle_slots) const {
    const int64_t pages = least_of(*this, INT_MAX / page_slots, [&](const Device& of) {
        return (of.bytes - pages_of(middle_slots) * of.middle_page) / of.exact_page;
    });
    return std::max(least_exact, static_cast<int>(pages) * page_slots);
}

int Arena::middle_beside(int exact_slots) const {
    const int64_t pages = least_of(*this, INT_MAX / page_slots, [&](const Device& of) {
        return (of.bytes - pages_of(exact_slots) * of.exact_page) / of.middle_page;
    });
    return static_cast<int>(pages) * page_slots;
}

int Arena::target_beside(int middle_slots) const {
    const int64_t tokens = least_of(*this, INT_MAX, [&](const Device& of) {
        // a page of each kind may be in use for a single token
        const int64_t left = of.bytes - of.exact_page - of.middle_page - middle_slots * of.middle_page / page_slots;
        return left * page_slots / of.exact_page;
    });
    return static_cast<int>(std::clamp<int64_t>(tokens, least_exact, most_exact));
}

}  // namespace lkv
