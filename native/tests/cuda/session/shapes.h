// The small models that sessions are tested on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lkv::test {

inline constexpr int n_embd = 64;
inline constexpr int n_ff = 96;
inline constexpr int n_kv = 2;
inline constexpr int rep = 2;
inline constexpr int n_vocab = 96;
inline constexpr int n_key = 32;  // with MLA: channels of a head's key that are not turned, and of its value
inline constexpr int n_value = 24;
inline constexpr int n_brought = 16;  // numbers that a token brings to a layer

// The files' cache: one latent a group of `group` heads, of `rank` channels in `n_segments` segments.
struct Shape {
    const char* k_path;
    const char* v_path;
    int head_dim;
    int group;
    int rank;
    int n_segments;
    // Latents are E of K and V, so that exact windows hold full rows. `identity`: E, B and E_q change nothing, and it is the same which
    // tokens are exact.
    enum Encoded { no, random, identity } encoded = no;
    bool unlike = false;  // layers have windows and RoPE of their own, branches norms behind them
    // Experts of the FFN; each token has all of them, as the choice may hang on a rounding
    int n_expert = 0;
    bool sinks = false;
    float softcap = 0.0F;      // of scores
    bool whole_norms = false;  // of Q and K over all heads, none before a branch
    int n_layer = 2;           // even ones are alike, and odd ones
    bool hybrid = false;       // even ones are gated delta nets, and the others have an output gate
    // Odd layers have heads of twice the width, and V of the key projection; V has a norm without weights.
    bool of_keys = false;
    bool one_row = false;  // and no rows of K
    bool gated = false;    // queries grow with their position, odd layers have more of them, and each head has a gate
    // The second half of the layers reads the K and V of the first, and tokens bring numbers to each layer.
    bool shares = false;
    int turned =
        0;  // above 0: MLA, whose rows are so many turned channels and a latent, together `head_dim`; narrowed: `rank`
    bool guesses = false;  // behind the layers one more guesses further tokens

    Shape at(int layer) const {
        Shape own = *this;
        if (of_keys && layer % 2 == 1) own.head_dim *= 2;
        if (one_row && layer % 2 == 1) own.k_path = "value";
        return own;
    }
    int n_head(int layer) const { return n_kv * (gated && layer % 2 == 1 ? 3 : rep); }
    // Groups of a layer that have rows of K or V.
    int n_groups(const char* path, bool value_side, int layer) const {
        if (shares && layer >= n_layer / 2) return 0;
        if (turned > 0) return value_side ? 1 : 0;
        if ((hybrid && layer % 2 == 0) || (one_row && !value_side && layer % 2 == 1)) return 0;
        return n_kv / (std::string(path) == "full" ? 1 : group);
    }
};

extern const std::span<const Shape> shapes;
inline size_t number_of(const Shape& shape) { return static_cast<size_t>(&shape - shapes.data()); }

// The first shape of a path whose exact windows are full rows beside latents.
const Shape* first_encoded(const char* k_path);
const Shape& first_hybrid();
const Shape& first_mla();

// Shapes that run on both devices together, too: of every path, one with windows.
bool splits(const Shape& shape);

bool is_full(const char* path);

}  // namespace lkv::test
