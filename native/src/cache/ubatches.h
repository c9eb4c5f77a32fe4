// How many tokens pass through the graph together. This is the one place that decides it; everybody else asks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace lkv {

struct CacheSpec;
struct HParams;
struct KvCacheOptions;

struct Ubatches {
    static constexpr int usual = 512;

    int longest = usual;
    int exact = usual;  // the most tokens that enter the recent region whole; longer ubatches come settled

    // 0 leaves the choice.
    struct Asked {
        int n_ubatch = 0;
        int n_batch = 0;  // tokens of a call: no ubatch is longer
    };
    // Whether there is memory for a session with these.
    using HasRoom = std::function<bool(const Ubatches&)>;

    // cache: all but its ubatches. has_room: asked where nobody chose a length and a long one would be of use; none given: there is.
    static Ubatches of(const Asked& asked, const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& cache,
                       const HasRoom& has_room = {});

    bool comes_settled(size_t n_tokens) const { return n_tokens > static_cast<size_t>(exact); }
    // How many of a batch's tokens come first. output: which results are wanted. settles: whether tokens may come settled; those are of one
    // sequence, whose latest ones the recent region has room for.
    size_t next(std::span<const int32_t> seq, std::span<const uint8_t> output, bool settles) const;
};

}  // namespace lkv
