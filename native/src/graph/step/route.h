// How one layer of a graph attends: decided here, and asked by whatever draws the layer or describes it to a kernel.
#pragma once

namespace lkv {

struct GraphSources;

struct Route {
    // Keys are made of the rows: of latents that the file stores for that, or on a GPU because there are many queries.
    enum class Keys { stored, rebuilt, expanded } keys = Keys::stored;
    bool projects = false;         // queries meet latents in the latents' own space (E_q)
    bool rotates_results = false;  // a GPU takes V's Hadamard rotation back as it merges the parts of few tokens
};

// il: the layer whose rows are read.
Route route_of(const GraphSources& from, int il);

}  // namespace lkv
