// A state of other row formats, budgets or exact windows becomes one of this cache: rows are read by the state's own layouts
// and written by this cache's, wherever its regions want their tokens.
//
//   exact, and still in a window here    full rows or latents in the window's format
//   exact, in none                       as a demotion writes them: latents of full rows, in the middle's format
//   in the middle                        stays there, in the middle's format, also where a window here would have kept it exact
//
// What a smaller budget does not keep of a latent is dropped, what a larger one keeps beside reads as zeros.
#include "cache/transcode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <unordered_map>

#include "cache/formats.h"

namespace lkv {
namespace {

constexpr size_t rows_at_once = 256;  // bounds the floats that are held

bool is_window(const std::string& name) { return name == "sink" || name == "recent"; }

// x: [n] whole blocks, in place: the product with the symmetric orthonormal Hadamard matrix of each block.
void turn(std::span<float> x, size_t block) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(block));
    for (size_t first = 0; first < x.size(); first += block) {
        for (size_t half = 1; half < block; half *= 2) {
            for (size_t i = 0; i < block; i++) {
                if ((i & half) != 0) continue;
                float& a = x[first + i];
                float& b = x[first + i + half];
                const float sum = a + b;
                b = a - b;
                a = sum;
            }
        }
        for (size_t i = 0; i < block; i++) x[first + i] *= scale;
    }
}

// Bits of stored rows and channels of whole ones.
struct Bits {
    double bits = 0;
    double channels = 0;
    void add(const RowLayout& row) {
        bits += 8.0 * row.row_bytes;
        channels += row.width;
    }
    double mean() const { return channels > 0 ? bits / channels : 0; }
};

// `what` of so many bits in so many others; "" where the layouts are alike.
std::string restored_as(const char* what, const Bits& from, const Bits& to, bool differs) {
    if (!differs || from.channels == 0) return "";
    const auto text = [](double bits) { return concat(std::fixed, std::setprecision(1), bits); };
    const std::string was = text(from.mean());
    const std::string is = text(to.mean());
    return concat(what, " of ", was, " bits a channel restored as ", is == was ? "others of as many" : is,
                  to.mean() > from.mean() ? ": what they had lost stays lost" : "");
}

}  // namespace

KvCache::Transcoder::Transcoder(KvCache& cache, std::span<const SavedRegion> saved, int to_seq, const RowTurn& turned)
    : cache_(cache), saved_(saved), turned_(turned) {
    for (const SavedRegion& region : saved) {
        if (region.name == "ring") ring_ = &region;
    }
    const auto mapped = [to_seq](uint64_t seq) { return to_seq < 0 || seq == 0 ? seq : uint64_t{1} << to_seq; };
    for (const SavedRegion& region : saved) {
        if (&region == ring_) continue;
        for (size_t i = 0; i < region.tokens.size(); i++) {
            const SavedToken& token = region.tokens[i];
            if (token.seq != 0) tokens_.push_back({{&region, i}, {ring_, 0}, token.pos, mapped(token.seq)});
        }
    }
    std::stable_sort(tokens_.begin(), tokens_.end(), [](const Token& a, const Token& b) { return a.pos < b.pos; });
    find_in_ring();
    for (Region& region : cache_.regions_) regions_.push_back({&region, {}, nullptr});
    if (cache_.ring_) regions_.push_back({&*cache_.ring_, {}, nullptr});
}

// Which of the saved ring's tokens is the same.
void KvCache::Transcoder::find_in_ring() {
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

std::string KvCache::Transcoder::run() {
    choose_regions();
    claim_cells();
    claim_ring();
    for (Target& target : regions_) target.rows = target.region->storage->load(target.copy);
    for (size_t il = 0; il < cache_.in_ring_.size(); il++) {
        for (int side = 0; side < 2; side++) write(il, side);
    }
    for (Target& target : regions_) target.region->storage->store(target.copy);
    return lost();
}

void KvCache::Transcoder::choose_regions() {
    std::array<int32_t, max_sequences> newest;
    newest.fill(-1);
    const auto each = [](uint64_t mask, auto&& visit) {
        for (; mask != 0; mask &= mask - 1) visit(static_cast<size_t>(std::countr_zero(mask)));
    };
    for (const Token& token : tokens_) {
        each(token.seq, [&](size_t s) { newest[s] = std::max(newest[s], token.pos); });
    }
    const int sink = cache_.region_index("sink");
    const int recent = cache_.region_index("recent");
    const auto room = [this](int region) {
        return region < 0 ? 0 : cache_.regions_[static_cast<size_t>(region)].cells.n_free();
    };
    int sink_room = room(sink);
    int recent_room = room(recent);
    // the latest first: of those that find no room the oldest are compressed
    for (auto it = tokens_.rbegin(); it != tokens_.rend(); ++it) {
        Token& token = *it;
        const bool first = sink >= 0 && token.pos < cache_.options_.sink;
        int32_t age = INT32_MAX;  // tokens of a sequence from here on, less its window
        each(token.seq,
             [&](size_t s) { age = std::min(age, newest[s] - token.pos - cache_.options_.window(newest[s] + 1)); });
        const bool latest = recent >= 0 && !first && age < 0;
        const bool waits = recent >= 0 && !first && age < demotion_batch - 1;  // as those that leave in batches
        token.to = cache_.n_regions() - 1;
        if (!is_window(token.from.region->name)) {
            n_stay_ += first || latest ? 1 : 0;
        } else if (first && sink_room-- > 0) {
            token.to = sink;
        } else if (waits && recent_room-- > 0) {
            token.to = recent;
        } else {
            n_compressed_++;
        }
    }
}

void KvCache::Transcoder::claim_cells() {
    const auto claim = [this](Token& token) {
        Region& region = cache_.regions_[static_cast<size_t>(token.to)];
        token.slot = region.cells.claim(token.pos, token.seq);
    };
    Cells& middle = cache_.regions_.back().cells;
    std::vector<std::vector<size_t>> owned(
        max_sequences);  // blocks are of one sequence, by the first that holds a token
    size_t n_middle = 0;
    for (size_t i = 0; i < tokens_.size(); i++) {
        Token& token = tokens_[i];
        if (token.to != cache_.n_regions() - 1) {
            claim(token);
            continue;
        }
        owned[middle.block() == 1 ? 0 : static_cast<size_t>(std::countr_zero(token.seq))].push_back(i);
    }
    const auto block = static_cast<size_t>(middle.block());
    for (const std::vector<size_t>& tokens : owned) n_middle += (tokens.size() + block - 1) / block * block;
    if (static_cast<int64_t>(n_middle) > middle.n_free()) {
        fail("state", "expected room for ", n_middle, " tokens among the compressed ones; raise -c / n_ctx; got ",
             middle.n_free());
    }
    std::vector<Token> in_order;  // those of a block together
    for (const std::vector<size_t>& tokens : owned) {
        for (size_t n = 0; n < tokens.size(); n++) {
            Token token = tokens_[tokens[n]];
            if (block == 1) {
                claim(token);
            } else {
                token.slot = n % block == 0 ? middle.find_block() : in_order.back().slot + 1;
                middle.place(token.slot, token.pos, token.seq);
            }
            in_order.push_back(token);
        }
    }
    std::erase_if(tokens_, [this](const Token& token) { return token.to == cache_.n_regions() - 1; });
    tokens_.insert(tokens_.end(), in_order.begin(), in_order.end());
}

void KvCache::Transcoder::claim_ring() {
    if (!cache_.ring_) return;
    const std::vector<int32_t> next = cache_.next_positions();
    std::vector<Token*> seen;
    for (Token& token : tokens_) {
        if (cache_.enters_ring(token.to) && cache_.is_seen_again(token.pos, token.seq, next)) seen.push_back(&token);
    }
    cache_.make_ring_room(static_cast<int>(seen.size()));
    for (Token* const token : seen) token->ring_slot = cache_.ring_->cells.claim(token->pos, token->seq);
}

KvCache::Transcoder::Place KvCache::Transcoder::place_of(const Token& token, size_t il) {
    const auto layer = static_cast<int>(il);
    if (cache_.in_ring(layer) && cache_.enters_ring(token.to)) return {&regions_.back(), token.ring_slot, false};
    Target& target = regions_[static_cast<size_t>(token.to)];
    return {&target, token.slot, cache_.is_full(token.to, layer)};
}

KvCache::Transcoder::Source KvCache::Transcoder::source_of(const Token& token, size_t il) const {
    if (token.from.region->layers[il].held()) return token.from;
    if (token.in_ring.region == nullptr || !token.in_ring.region->layers[il].held()) {
        fail("state", "expected rows of the token at position ", token.pos, " in layer ", il,
             "; got a state whose layers with a sliding window had forgotten it", as_it_was_saved);
    }
    return token.in_ring;
}

// A token's bytes, those of its block where there is one, and which of them are its own.
size_t KvCache::Transcoder::load(const Source& source, size_t il, int side) {
    const SavedLayer& layer = source.region->layers[il];
    const auto row_bytes = static_cast<size_t>(layer.plan[side].row_bytes());
    const size_t block = lkv::in_blocks(layer.plan[side].view()) ? block_slots : 1;
    const size_t first = source.index / block * block;
    if (first + block > source.region->tokens.size()) {
        fail("state", "expected whole blocks of ", block, " slots; got ", source.region->tokens.size(), " slots");
    }
    bytes_.resize(block * row_bytes);
    for (size_t i = 0; i < block; i++) {
        std::memcpy(&bytes_[i * row_bytes], source.region->tokens[first + i].rows + layer.offset[side], row_bytes);
    }
    return source.index - first;
}

bool KvCache::Transcoder::turns(size_t il, int side) const {
    return (turned_.sides >> side & 1U) != 0 && cache_.is_full_path_[static_cast<size_t>(side)][il];
}

void KvCache::Transcoder::read(const Source& source, size_t il, int side, std::span<float> x) {
    const RowLayout from = source.region->layers[il].plan[side].view();
    const size_t own = load(source, il, side);
    read_slot(from, bytes_.data(), static_cast<int64_t>(own), x.data());
    if (turns(il, side)) turn(x, static_cast<size_t>(turned_.block[side]));
}

// Tokens of one region as it stores them, before any format: x [n, width].
void KvCache::Transcoder::values(std::span<const Token> tokens, size_t il, int side, size_t width,
                                 std::vector<float>& x) {
    x.assign(tokens.size() * width, 0.0F);
    std::vector<float> full;
    std::vector<size_t> encoded;
    for (size_t i = 0; i < tokens.size(); i++) {
        const Source source = source_of(tokens[i], il);
        const bool was_full = cache_.exact_is_full_[il] && is_window(source.region->name);
        if (!was_full || place_of(tokens[i], il).full) {
            read(source, il, side, std::span(x).subspan(i * width, width));
            continue;
        }
        const auto full_width = static_cast<size_t>(source.region->layers[il].plan[side].view().width);
        full.resize((encoded.size() + 1) * full_width);
        read(source, il, side, std::span(full).last(full_width));
        encoded.push_back(i);
    }
    if (encoded.empty()) return;
    if (cache_.encoder_ == nullptr || !cache_.on_host(static_cast<int>(il))) {
        fail("state", "expected exact tokens that stay in their window in layers on a GPU; got ", n_compressed_,
             " that this session compresses; use the same --sink and --recent, or -ngl 0");
    }
    std::vector<float> z(encoded.size() * width);
    cache_.encoder_->encode(static_cast<int>(il), side == 1, full, static_cast<int>(encoded.size()), z);
    for (size_t i = 0; i < encoded.size(); i++) {
        std::copy_n(&z[i * width], width, &x[encoded[i] * width]);
    }
}

// K or V of a layer, of all tokens.
void KvCache::Transcoder::write(size_t il, int side) {
    std::vector<float> x;
    for (size_t first = 0; first < tokens_.size();) {
        const Place place = place_of(tokens_[first], il);
        if (place.slot < 0) {
            first++;
            continue;
        }
        const Layer& layer = place.target->region->layers[il];
        const RowLayout& to = side == 0 ? layer.k : layer.v;
        const auto row_bytes = static_cast<size_t>(to.row_bytes);
        uint8_t* const rows = place.target->rows + (side == 0 ? layer.k_offset : layer.v_offset);
        const bool blocks = lkv::in_blocks(to);
        const auto belongs = [&](size_t i) {
            const Place other = place_of(tokens_[i], il);
            return other.target == place.target && other.slot >= 0 &&
                   (!blocks || other.slot / block_slots == place.slot / block_slots);
        };
        size_t end = first + 1;
        while (end < tokens_.size() && end - first < rows_at_once && belongs(end)) end++;
        const std::span<const Token> tokens = std::span(tokens_).subspan(first, end - first);
        const auto width = static_cast<size_t>(to.width);
        if (blocks) {
            values(tokens, il, side, width, x);
            x.resize(static_cast<size_t>(block_slots) * width);
            for (size_t i = tokens.size(); i < static_cast<size_t>(block_slots); i++) {  // widens no channel's range
                std::copy_n(&x[(tokens.size() - 1) * width], width, &x[i * width]);
            }
            write_block(to, x.data(), rows + static_cast<size_t>(place.slot) * row_bytes);
        } else {
            write_single(tokens, il, side, to, rows);
        }
        first = end;
    }
}

void KvCache::Transcoder::write_single(std::span<const Token> tokens, size_t il, int side, const RowLayout& to,
                                       uint8_t* rows) {
    const auto row_of = [&](const Token& token) {
        return rows + static_cast<size_t>(place_of(token, il).slot) * static_cast<size_t>(to.row_bytes);
    };
    std::vector<Token> coded;
    for (const Token& token : tokens) {
        const Source source = source_of(token, il);
        const RowLayout from = source.region->layers[il].plan[side].view();
        const bool was_full = cache_.exact_is_full_[il] && is_window(source.region->name);
        if (was_full != place_of(token, il).full || turns(il, side) || lkv::in_blocks(from)) {
            coded.push_back(token);
            continue;
        }
        load(source, il, side);
        move_rows(from, bytes_.data(), to, row_of(token));
    }
    std::vector<float> x;
    const auto width = static_cast<size_t>(to.width);
    values(coded, il, side, width, x);
    for (size_t i = 0; i < coded.size(); i++) write_row(to, &x[i * width], row_of(coded[i]));
}

std::string KvCache::Transcoder::lost() {
    Bits from[2];  // of windows, of the middle
    Bits to[2];
    bool differs[2] = {false, false};
    for (const Token& token : tokens_) {
        for (size_t il = 0; il < cache_.in_ring_.size(); il++) {
            const Place place = place_of(token, il);
            const Source source = place.slot < 0 ? Source{} : source_of(token, il);
            if (place.slot < 0 || is_window(source.region->name) != is_window(place.target->region->name)) continue;
            const Layer& layer = place.target->region->layers[il];
            const int middle = is_window(source.region->name) ? 0 : 1;
            for (int side = 0; side < 2; side++) {
                const RowLayout was = source.region->layers[il].plan[side].view();
                const RowLayout& is = side == 0 ? layer.k : layer.v;
                from[middle].add(was);
                to[middle].add(is);
                differs[middle] = differs[middle] || !same_layout(was, is);
            }
        }
    }
    std::string text;
    const auto say = [&text](const std::string& part) {
        if (!part.empty()) text += (text.empty() ? "" : "; ") + part;
    };
    say(restored_as("rows", from[1], to[1], differs[1]));
    say(restored_as("exact rows", from[0], to[0], differs[0]));
    if (n_compressed_ > 0) say(concat(n_compressed_, " exact tokens are compressed now"));
    if (n_stay_ > 0) say(concat(n_stay_, " tokens of the exact windows were compressed before, and stay so"));
    return text;
}

}  // namespace lkv
