#include "cache/placement/arena.h"

#include <algorithm>
#include <climits>

namespace lkv {
namespace {

int64_t pages_of(int slots) { return (int64_t{slots} + page_slots - 1) / page_slots; }

}  // namespace

int Arena::exact_beside(int middle_slots) const {
    int64_t pages = INT_MAX / page_slots;
    for (const Device& of : devices) {
        if (of.exact_page == 0) continue;
        pages = std::min(pages, (of.bytes - pages_of(middle_slots) * of.middle_page) / of.exact_page);
    }
    return std::max(least_exact, static_cast<int>(pages) * page_slots);
}

int Arena::middle_beside(int exact_slots) const {
    int64_t pages = INT_MAX / page_slots;
    for (const Device& of : devices) {
        if (of.exact_page == 0) continue;
        pages = std::min(pages, (of.bytes - pages_of(exact_slots) * of.exact_page) / of.middle_page);
    }
    return static_cast<int>(pages) * page_slots;
}

int Arena::target_beside(int middle_slots) const {
    int64_t tokens = INT_MAX;
    for (const Device& of : devices) {
        if (of.exact_page == 0) continue;
        // a page of each kind may be in use for a single token
        const int64_t left = of.bytes - of.exact_page - of.middle_page - middle_slots * of.middle_page / page_slots;
        tokens = std::min(tokens, left * page_slots / of.exact_page);
    }
    return static_cast<int>(std::clamp<int64_t>(tokens, least_exact, most_exact));
}

}  // namespace lkv
