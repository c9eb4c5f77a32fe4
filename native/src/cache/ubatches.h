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
    int exact = usual;  // the most tokens that enter a recent region of fixed size whole
    bool sees_own_rows =
        false;  // whether longer ubatches come settled: their tokens attend to each other's rows before these are stored

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

    // How many of a batch's tokens come first. output: which results are wanted. most_exact: tokens that can enter the recent region whole
    // now. settles: whether tokens may come settled; those are of one sequence, whose latest ones the recent region has room for.
    size_t next(std::span<const int32_t> seq, std::span<const uint8_t> output, int most_exact, bool settles) const;
};

}  // namespace lkv
