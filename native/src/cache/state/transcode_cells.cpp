// Where the tokens of a state go that is coded anew.
#include <algorithm>
#include <array>
#include <bit>
#include <unordered_map>

#include "cache/state/transcode.h"

namespace lkv {

// Which of the saved ring's tokens is the same.
void Transcoder::find_in_ring() {
    if (ring_ == nullptr) return;
    std::unordered_multimap<int32_t, size_t> at;
    for (size_t i = 0; i < ring_->tokens.size(); i++) at.emplace(ring_->tokens[i].pos, i);
    for (Token& token : tokens_) {
        const uint64_t seq = token.from.region->tokens[token.from.index].seq;
        token.in_ring.region = nullptr;
        const auto [first, end] = at.equal_range(token.pos);
        for (auto it = first; it != end; ++it) {
            if ((ring_->tokens[it->second].seq & seq) != 0) token.in_ring = {ring_, it->second};
        }
    }
}

// How many of the exact tokens stay so.
int Transcoder::exact_room() {
    if (placement_.recent() < 0) return 0;
    if (!placement_.has_tiers()) return placement_.cells(placement_.recent()).n_free();
    const auto n = static_cast<int>(tokens_.size());
    int exact = static_cast<int>(std::count_if(tokens_.begin(), tokens_.end(),
                                               [](const Token& token) { return token.from.region->is_exact(); }));
    if (n <= options_.n_ctx) cache_.make_exact_room(exact, n - exact);
    while (exact > 0 && placement_.excess(exact, n - exact, {}) > 0) exact--;
    placement_.limit_cells();
    return exact;
}

void Transcoder::choose_regions() {
    std::array<int32_t, max_sequences> newest;
    newest.fill(-1);
    for (const Token& token : tokens_) {
        each_sequence(token.seq, [&](int s) {
            int32_t& pos = newest[static_cast<size_t>(s)];
            pos = std::max(pos, token.pos);
        });
    }
    const int sink = placement_.sink();
    const int recent = placement_.recent();
    const auto room = [this](int region) { return region < 0 ? 0 : placement_.cells(region).n_free(); };
    int sink_room = room(sink);
    int recent_room = exact_room();
    // the latest first: of those that find no room the oldest are compressed
    for (auto it = tokens_.rbegin(); it != tokens_.rend(); ++it) {
        Token& token = *it;
        const bool first = sink >= 0 && token.pos < options_.sink;
        int32_t age = INT32_MAX;  // tokens of a sequence from here on, less its window
        each_sequence(token.seq, [&](int s) {
            const int32_t last = newest[static_cast<size_t>(s)];
            age = std::min(age, last - token.pos - options_.window(last + 1));
        });
        const bool latest = recent >= 0 && !first && age < 0;
        const bool waits = recent >= 0 && !first && age < demotion_batch - 1;  // as those that leave in batches
        token.to = placement_.middle();
        if (!token.from.region->is_exact()) {
            n_stay_ += first || latest ? 1 : 0;
        } else if (first && sink_room-- > 0) {
            token.to = sink;
        } else if ((waits || placement_.has_tiers()) && recent_room-- > 0) {
            token.to = recent;
        } else {
            n_compressed_++;
        }
    }
}

void Transcoder::claim_cells() {
    // blocks are of one sequence, by the first that holds a token, as far as there is room for that
    std::vector<std::vector<Token>> owned(max_sequences);
    std::vector<Token> in_order;  // those of a block together
    for (Token& token : tokens_) {
        if (token.to == placement_.middle()) {
            owned[static_cast<size_t>(std::countr_zero(token.seq))].push_back(token);
            continue;
        }
        token.slot = placement_.cells_of_rows(token.to).claim({token.pos, token.seq});
        in_order.push_back(token);
    }
    placement_.limit_cells();
    Cells& middle = placement_.cells_of_rows(placement_.middle());
    const auto block = static_cast<size_t>(middle.block());
    size_t n_middle = 0;
    size_t n_tokens = 0;
    const auto whole = [block](size_t n) { return (n + block - 1) / block * block; };
    for (const std::vector<Token>& tokens : owned) {
        n_middle += whole(tokens.size());
        n_tokens += tokens.size();
    }
    if (block > 1) cache_.free_blocks(static_cast<int>(n_middle / block));
    const bool apart = static_cast<int64_t>(n_middle) <= middle.n_free();
    if (!apart) n_middle = whole(n_tokens);
    if (static_cast<int64_t>(n_middle) > middle.n_free()) {
        fail("state", "expected room for ", n_middle, " tokens among the compressed ones; raise -c / n_ctx; got ",
             middle.n_free());
    }
    size_t n = 0;  // in the block
    for (const std::vector<Token>& tokens : owned) {
        if (apart) n = 0;
        for (Token token : tokens) {
            token.slot = n++ % block == 0 ? middle.find_free(token.seq) : in_order.back().slot + 1;
            middle.put(token.slot, {token.pos, token.seq});
            in_order.push_back(token);
        }
    }
    tokens_ = std::move(in_order);
}

void Transcoder::claim_ring() {
    if (placement_.ring() == nullptr) return;
    Ring& ring = *placement_.ring();
    std::vector<Token*> seen;
    for (Token& token : tokens_) {
        const bool in_middle = token.to == placement_.middle();
        if (in_middle && ring.is_seen_again(placement_, {token.pos, token.seq})) seen.push_back(&token);
    }
    ring.make_room(placement_, static_cast<int>(seen.size()));
    for (Token* const token : seen) token->ring_slot = ring.cells().claim({token->pos, token->seq});
}

}  // namespace lkv
