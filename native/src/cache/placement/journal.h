// Changes of cells that can be taken back.
#pragma once

#include <vector>

#include "cache/placement/cells.h"

namespace lkv {

class Journal {
public:
    void put(Cells& cells, int slot, const Token& token) {
        const Token before{cells.pos(slot), cells.seq(slot)};
        touched_ |= before.seq | token.seq;
        changes_.push_back({&cells, slot, before});
        cells.put(slot, token);
    }
    void undo() {
        for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) {
            change->cells->put(change->slot, change->before);
        }
        changes_.clear();
    }
    uint64_t touched() const { return touched_; }  // sequences that held a changed slot, or hold it now

private:
    struct Change {
        Cells* cells;
        int slot;
        Token before;
    };
    std::vector<Change> changes_;
    uint64_t touched_ = 0;
};

}  // namespace lkv
