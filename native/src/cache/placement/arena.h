// Memory that exact and compressed rows share: compressed pages lie from its beginning on, exact ones from its end back. Counts slots; what
// a page is made of is the business of rows/arena.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/pages.h"

namespace lkv {

struct Arena {
    struct Device {
        int64_t bytes;
        int64_t exact_page;   // bytes of page_slots exact rows; 0: all of its layers recur
        int64_t middle_page;  // likewise
    };
    std::vector<Device> devices;  // none: exact rows have memory of their own
    int least_exact = 0;          // slots that the fullest middle leaves, whole pages
    int most_exact = 0;           // slots that there are cells for

    bool is_shared() const { return !devices.empty(); }
    // Slots in whole pages that fit beside so many of the others.
    int exact_beside(int middle_slots) const;
    int middle_beside(int exact_slots) const;
    // Exact tokens to hold beside so many slots of the middle. It falls token by token as these grow, and the tokens always fit into the
    // pages that exact_beside() leaves: no page is given up at once.
    int target_beside(int middle_slots) const;
};

}  // namespace lkv
