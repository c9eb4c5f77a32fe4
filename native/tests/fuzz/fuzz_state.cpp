// Fuzzes saved states: any bytes are restored, and the cache works on, or refused with lkv::Error. The first byte of an
// input chooses the cache and what is restored, all of it or one sequence; the rest is the state.
// With clang: -fsanitize=fuzzer,address,undefined. Otherwise mutations of states that each cache has saved (mutate.h).
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "cache/evict/policies.h"
#include "cache/kv_cache.h"
#include "cache/state/reader.h"
#include "cache/state/writer.h"
#include "decoder/hparams.h"

namespace {

using lkv::Format;
using lkv::KvCache;
using lkv::StateReader;
using lkv::StateWriter;
using Bytes = std::vector<uint8_t>;

constexpr int n_kinds = 6;  // of caches
constexpr int recurrent = n_kinds - 1;
enum Mode { whole, sequence, converted, n_modes };

// An input's first byte: of the recurrent one behind all others, whose inputs were found before it came.
constexpr int first_byte(int kind, int mode) {
    return kind == recurrent ? recurrent * n_modes + mode : kind + recurrent * mode;
}
constexpr int kind_of(int byte) { return byte >= recurrent * n_modes ? recurrent : byte % recurrent; }
constexpr int mode_of(int byte) { return byte >= recurrent * n_modes ? byte % n_modes : byte / recurrent; }

struct Small {
    lkv::HParams hparams;
    lkv::CacheSpec spec;
    lkv::KvCacheOptions options;
};

// Two layers with one KV head of 32 channels, two sequences, 128 cells.
Small small(int kind) {
    Small of;
    of.hparams.n_layer = 2;
    of.hparams.n_head = 1;
    of.hparams.n_embd = 32;
    of.hparams.heads.assign(2, {1, 32, 32});
    of.hparams.block.layers.resize(2);
    of.spec.layers.resize(2);
    for (lkv::LayerCacheSpec& layer : of.spec.layers) {
        layer.k.ranks = layer.v.ranks = {32};
        layer.k.segments = layer.v.segments = {{16, 16}};
        layer.k.formats = layer.v.formats = {{{Format::q4, Format::none}}};
    }
    of.options.n_ctx = 128;
    of.options.ubatches = {8, 8};
    of.options.n_seq_max = 2;
    switch (kind) {
        case 1:  // exact windows
            of.options.sink = 2;
            of.options.recent = 4;
            break;
        case 2:  // a sliding window
            of.hparams.block.layers[1].window = 4;
            break;
        case 3:  // blocks of 32
            of.spec.layers[0].k.segments = {{32}};
            of.spec.layers[0].k.formats = {{{Format::c4}}};
            of.options.recent = 4;
            break;
        case 4:  // eviction
            of.options.evict = {lkv::find_policy("h2o"), 72};
            of.options.recent = 4;
            break;
        case recurrent:
            of.hparams.recurrence = lkv::DeltaNetSizes{2, 2, 1, 1};
            of.hparams.block.layers[1].mixer = lkv::Mixer::delta_net;
            of.spec.layers[1] = {};
            break;
        default:
            break;
    }
    return of;
}

// States of recurrent layers, as nobody computes them.
class States : public lkv::StateMemory {
public:
    explicit States(const KvCache& cache)
        : size_(cache.states().slot_bytes()), bytes_(size_ * static_cast<size_t>(cache.states().n_slots())) {}
    size_t slot_bytes() const override { return size_; }
    void read(int slot, uint8_t* to) const override { std::copy_n(&bytes_.at(first(slot)), size_, to); }
    void write(int slot, const uint8_t* from) override { std::copy_n(from, size_, &bytes_.at(first(slot))); }
    void clear(int slot) override { std::fill_n(&bytes_.at(first(slot)), size_, uint8_t{0}); }

private:
    size_t first(int slot) const { return static_cast<size_t>(slot) * size_; }
    size_t size_;
    Bytes bytes_;
};

struct Opened {
    KvCache cache;
    States states;

    explicit Opened(int kind) : Opened(small(kind)) {}
    explicit Opened(const Small& of) : cache(of.hparams, of.spec, of.options), states(cache) {
        if (cache.states().is_used()) cache.states().attach({&states});
    }
};

// Tokens [first, end) of a sequence, one by one; their rows are what was there, zeros.
void fill(KvCache& cache, int seq, int first, int end) {
    for (int32_t pos = first; pos < end; pos++) {
        const std::array<int32_t, 1> at{pos};
        const std::array<int32_t, 1> of{seq};
        cache.claim({at, of, false});
        if (cache.states().is_used()) {
            cache.states().commit(cache.states().claim(of), std::array{pos + 1});
            if (pos % 4 == 3) cache.states().keep_copy(seq);
        }
        cache.demote();
    }
}

void expect(bool holds) {
    if (!holds) __builtin_trap();
}

// What a session does next with a cache, whatever a state left in it.
void use(KvCache& cache) {
    try {
        fill(cache, 0, cache.placement().last(0) + 1, cache.placement().last(0) + 3);
    } catch (const lkv::Error&) {  // no room
    }
    (void)cache.remove(0, {std::max(0, cache.resumable(0, cache.placement().last(0)))});
    StateReader(cache, lkv::Accept::same).all(StateWriter(cache).all());
}

// Why a state is refused; empty: it is not.
std::string refusal(std::span<const uint8_t> input) {
    if (input.empty()) return "no cache is named";
    const int kind = kind_of(input[0]);
    const int mode = mode_of(input[0]) % n_modes;
    static std::array<std::unique_ptr<Opened>, n_kinds> opened;
    std::unique_ptr<Opened>& one = opened[static_cast<size_t>(kind)];
    if (!one) one = std::make_unique<Opened>(kind);
    KvCache* const cache = &one->cache;
    const Bytes exact(input.begin() + 1, input.end());  // sanitizers see its end
    cache->clear();
    if (mode != whole) fill(*cache, 1, 0, 6);
    const Bytes other = mode == whole ? Bytes() : StateWriter(*cache).sequence(1);
    std::string refused;
    try {
        if (mode == whole) {
            StateReader(*cache, lkv::Accept::same).all(exact);
        } else {
            StateReader(*cache, mode == converted ? lkv::Accept::any : lkv::Accept::same)
                .sequence(0, std::array{std::span<const uint8_t>(exact)});
        }
    } catch (const lkv::Error& error) {
        refused = error.what();
        expect(cache->placement().last(0) == -1);  // a bad state leaves nothing
    }
    if (mode != whole && kind != 4)
        expect(StateWriter(*cache).sequence(1) == other);  // under eviction it tells of all sequences
    if (refused.empty()) {
        const Bytes again = StateWriter(*cache).all();
        StateReader(*cache, lkv::Accept::same).all(again);
        expect(StateWriter(*cache).all() == again);
        use(*cache);
    }
    return refused;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    refusal({data, size});
    return 0;
}

#ifndef LKV_LIBFUZZER

#include <cstring>

#include "fuzz/mutate.h"

namespace {

// What was found once. `state`: of one sequence with 12 tokens, in the first cache, which has one region.
void found_before(const Bytes& state) {
    constexpr size_t n_used_at = 1 + 40 + 16 + 4;         // mode, header, a name, layers
    constexpr size_t tokens_at = n_used_at + 4 + 4 * 24;  // the layouts of two layers, two segments each
    expect((state.size() - tokens_at) % 12 == 0);
    Bytes many = state;  // a count that was once read as a negative number, and more tokens than slots
    const uint32_t n_used = ~uint32_t{0};
    std::memcpy(many.data() + n_used_at, &n_used, sizeof n_used);
    for (int i = 0; i < 20; i++) many.insert(many.end(), state.begin() + tokens_at, state.end());
    expect(!refusal(many).empty());
    Bytes far = state;  // the next position did not fit its type
    const int32_t last = INT32_MAX;
    std::memcpy(far.data() + tokens_at + 4, &last, sizeof last);
    expect(!refusal(far).empty());
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<Bytes> states;
    for (int kind = 0; kind < n_kinds; kind++) {
        Opened opened(kind);
        KvCache& cache = opened.cache;
        fill(cache, 0, 0, kind >= 3 ? 45 : 12);
        const Bytes one = StateWriter(cache).sequence(0);
        fill(cache, 1, 0, 3);
        for (int mode = 0; mode < n_modes; mode++) {
            Bytes state = {static_cast<uint8_t>(first_byte(kind, mode))};
            const Bytes body = mode == whole ? StateWriter(cache).all() : one;
            state.insert(state.end(), body.begin(), body.end());
            expect(refusal(state).empty());
            states.push_back(std::move(state));
        }
    }
    found_before(states[sequence]);
    return lkv::test::fuzz(argc, argv, {.name = "fuzz_state", .files = states, .read = refusal, .fixed = 1});
}

#endif
