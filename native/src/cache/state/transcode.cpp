// A state of other row formats, budgets or exact windows becomes one of this cache: rows are read by the state's own layouts
// and written by this cache's, wherever its regions want their tokens.
//
//   exact, and still in a window here    full rows or latents in the window's format
//   exact, in none                       as a demotion writes them: latents of full rows, in the middle's format
//   in the middle                        stays there, in the middle's format, also where a window here would have kept it exact
//
// What a smaller budget does not keep of a latent is dropped, what a larger one keeps beside reads as zeros.
#include "cache/state/transcode.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iomanip>

#include "cache/formats.h"

namespace lkv {
namespace {

constexpr size_t rows_at_once = 256;  // bounds the floats that are held

// x: [n] whole blocks, in place: the product with the symmetric orthonormal Hadamard matrix of each block.
void hadamard(std::span<float> x, size_t block) {
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

Transcoder::Transcoder(KvCache& cache, std::span<const SavedRegion> saved, int to_seq, const RowRotation& rotation)
    : cache_(cache),
      options_(cache.options()),
      placement_(cache.placement()),
      rows_(cache.rows()),
      saved_(saved),
      rotation_(rotation) {
    for (const SavedRegion& region : saved) {
        if (region.name == "ring") ring_ = &region;
    }
    const auto mapped = [to_seq](uint64_t seq) { return to_seq < 0 || seq == 0 ? seq : bit(to_seq); };
    for (const SavedRegion& region : saved) {
        if (&region == ring_) continue;
        for (size_t i = 0; i < region.tokens.size(); i++) {
            const SavedToken& token = region.tokens[i];
            if (token.seq != 0) tokens_.push_back({{&region, i}, {ring_, 0}, token.pos, mapped(token.seq)});
        }
    }
    std::stable_sort(tokens_.begin(), tokens_.end(), [](const Token& a, const Token& b) { return a.pos < b.pos; });
    find_in_ring();
    for (const RegionRows& region : rows_.regions()) {
        regions_.push_back({&region, region.host_bytes(), {}});
    }
}

std::string Transcoder::run() {
    choose_regions();
    claim_cells();
    claim_ring();
    read_rows();
    for (size_t il = 0; il < static_cast<size_t>(rows_.n_layers()); il++) {
        for (int side = 0; side < 2; side++) {
            if (rows_.has_side(static_cast<int>(il), side == 1)) write(il, side);
        }
    }
    for (Target& target : regions_) target.bytes.write_back(target.ranges);
    return lost();
}

// What lies where tokens go: they share token blocks with others.
void Transcoder::read_rows() {
    std::vector<std::vector<int>> slots(regions_.size());
    const auto add = [&](size_t region, int slot) {
        if (slot < 0) return;
        const int first = slot / token_block_slots * token_block_slots;
        const int end = std::min(first + token_block_slots, regions_[region].region->n_slots);
        for (int i = first; i < end; i++) slots[region].push_back(i);
    };
    for (const Token& token : tokens_) {
        if (token.to >= 0) add(static_cast<size_t>(token.to), token.slot);
        add(regions_.size() - 1, token.ring_slot);
    }
    for (size_t r = 0; r < regions_.size(); r++) {
        regions_[r].ranges = regions_[r].region->ranges_of(slots[r], 0);
        regions_[r].bytes.read(regions_[r].ranges);
    }
}

Transcoder::Place Transcoder::place_of(const Token& token, size_t il) {
    const auto layer = static_cast<int>(il);
    if (placement_.in_ring(layer) && token.to == placement_.middle()) return {&regions_.back(), token.ring_slot, false};
    Target& target = regions_[static_cast<size_t>(token.to)];
    return {&target, token.slot, rows_.is_full(token.to, layer)};
}

Transcoder::Source Transcoder::source_of(const Token& token, size_t il) const {
    if (token.from.region->layers[il].held()) return token.from;
    if (token.in_ring.region == nullptr || !token.in_ring.region->layers[il].held()) {
        fail("state", "expected rows of the token at position ", token.pos, " in layer ", il,
             "; got a state whose layers with a sliding window had forgotten it", as_it_was_saved);
    }
    return token.in_ring;
}

// A token's bytes, those of its block where there is one, and which of them are its own.
size_t Transcoder::load(const Source& source, size_t il, int side) {
    const SavedLayer& layer = source.region->layers[il];
    const auto row_bytes = static_cast<size_t>(layer.plan[side].row_bytes());
    const size_t block = lkv::in_token_blocks(layer.plan[side].view()) ? token_block_slots : 1;
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

bool Transcoder::rotates(size_t il, int side) const {
    return (rotation_.sides >> side & 1U) != 0 && rows_.is_full_path(static_cast<int>(il), side == 1);
}

bool Transcoder::is_full(const Source& source, size_t il) const {
    return source.region->is_exact() && rows_.exact_is_full(static_cast<int>(il));
}

void Transcoder::read(const Source& source, size_t il, int side, std::span<float> x) {
    const RowLayout from = source.region->layers[il].plan[side].view();
    const size_t own = load(source, il, side);
    read_slot(from, bytes_.data(), static_cast<int64_t>(own), x.data());
    if (rotates(il, side)) hadamard(x, static_cast<size_t>(rotation_.block[side]));
}

// Tokens of one region as it stores them, before any format: x [n, width].
void Transcoder::values(std::span<const Token> tokens, size_t il, int side, size_t width, std::vector<float>& x) {
    x.assign(tokens.size() * width, 0.0F);
    std::vector<float> full;
    std::vector<size_t> encoded;
    for (size_t i = 0; i < tokens.size(); i++) {
        const Source source = source_of(tokens[i], il);
        const bool was_full = is_full(source, il);
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
    if (rows_.encoder() == nullptr || !rows_.on_host(static_cast<int>(il))) {
        fail("state", "expected exact tokens that stay in their window in layers on a GPU; got ", n_compressed_,
             " that this session compresses; use the same --sink and --recent, or -ngl 0");
    }
    std::vector<float> z(encoded.size() * width);
    rows_.encoder()->encode(static_cast<int>(il), side == 1, full, static_cast<int>(encoded.size()), z);
    for (size_t i = 0; i < encoded.size(); i++) {
        std::copy_n(&z[i * width], width, &x[encoded[i] * width]);
    }
}

// K or V of a layer, of all tokens.
void Transcoder::write(size_t il, int side) {
    std::vector<float> x;
    for (size_t first = 0; first < tokens_.size();) {
        const Place place = place_of(tokens_[first], il);
        if (place.slot < 0) {
            first++;
            continue;
        }
        const LayerRows& layer = place.target->region->layers[il];
        const RowLayout& to = layer.layout[side];
        uint8_t* const rows = place.target->bytes.data();
        const bool blocks = lkv::in_token_blocks(to);
        const auto belongs = [&](size_t i) {
            const Place other = place_of(tokens_[i], il);
            return other.target == place.target && other.slot >= 0 &&
                   (!blocks || other.slot / token_block_slots == place.slot / token_block_slots);
        };
        size_t end = first + 1;
        while (end < tokens_.size() && end - first < rows_at_once && belongs(end)) end++;
        const std::span<const Token> tokens = std::span(tokens_).subspan(first, end - first);
        const auto width = static_cast<size_t>(to.width);
        if (blocks) {
            values(tokens, il, side, width, x);
            x.resize(static_cast<size_t>(token_block_slots) * width);
            for (size_t i = tokens.size(); i < static_cast<size_t>(token_block_slots);
                 i++) {  // widens no channel's range
                std::copy_n(&x[(tokens.size() - 1) * width], width, &x[i * width]);
            }
            write_token_block(to, x.data(), rows + layer.at(side, place.slot));
        } else {
            write_single(tokens, il, side, layer, rows);
        }
        first = end;
    }
}

void Transcoder::write_single(std::span<const Token> tokens, size_t il, int side, const LayerRows& in, uint8_t* rows) {
    const RowLayout& to = in.layout[side];
    const auto row_of = [&](const Token& token) { return rows + in.at(side, place_of(token, il).slot); };
    std::vector<Token> coded;
    for (const Token& token : tokens) {
        const Source source = source_of(token, il);
        const RowLayout from = source.region->layers[il].plan[side].view();
        const bool was_full = is_full(source, il);
        if (was_full != place_of(token, il).full || rotates(il, side) || lkv::in_token_blocks(from)) {
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

std::string Transcoder::lost() {
    Bits from[2];  // of windows, of the middle
    Bits to[2];
    bool differs[2] = {false, false};
    for (const Token& token : tokens_) {
        for (size_t il = 0; il < static_cast<size_t>(rows_.n_layers()); il++) {
            if (!rows_.has_rows(static_cast<int>(il))) continue;
            const Place place = place_of(token, il);
            const Source source = place.slot < 0 ? Source{} : source_of(token, il);
            if (place.slot < 0 || source.region->is_exact() != (token.to < placement_.middle())) continue;
            const LayerRows& layer = place.target->region->layers[il];
            const int middle = source.region->is_exact() ? 0 : 1;
            for (int side = 0; side < 2; side++) {
                if (!rows_.has_side(static_cast<int>(il), side == 1)) continue;
                const RowLayout was = source.region->layers[il].plan[side].view();
                const RowLayout& is = layer.layout[side];
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
