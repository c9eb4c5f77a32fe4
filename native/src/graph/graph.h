// One decoder, built from the block description: every architecture is this graph with other data.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/tensor_context.h"
#include "cache/kv_cache.h"
#include "decoder/rope.h"
#include "ggml-cpp.h"
#include "graph/constants.h"
#include "graph/ggml_entry.h"
#include "graph/recurrent/gpu_node.h"
#include "graph/reference/reference.h"
#include "graph/step/roles.h"
#include "model/model.h"

namespace lkv {

class StateTensors;

struct Graph {
    TensorContext context;
    ggml_cgraph* nodes = nullptr;
    ggml_tensor* tokens =
        nullptr;  // i32 [n_tokens], null in a graph of later layers, and where the model is on the GPU
    ggml_tensor* embeddings = nullptr;  // f32 [n_embd, n_tokens], there instead: the host looks the rows up
    ggml_tensor* layer_embeddings =
        nullptr;  // f32 [n_embd_layer · n_layer, n_tokens], null where tokens bring nothing to layers
    ggml_tensor* hidden_in = nullptr;   // f32 [n_embd, n_tokens], null in a graph that begins with the embedding alone
    ggml_tensor* hidden_out = nullptr;  // f32 [n_embd, n_tokens], null in a graph that ends with the last layer
    ggml_tensor* positions = nullptr;   // i32 [n_tokens], null where no op reads them
    ggml_tensor* temperatures = nullptr;  // f32 [n_tokens], factors of queries, null where queries have none
    ggml_tensor* out_ids = nullptr;       // i32 [n_outputs], null when every token is wanted
    ggml_tensor* states_from =
        nullptr;  // i32 [n_seqs], slots that recurrent layers read, null where the graph has none
    ggml_tensor* states_to =
        nullptr;  // i64 [n_seqs · n_states], slots that they write: all last states, then those before
    ggml_tensor* result = nullptr;  // f32 [n_vocab or n_embd, n_outputs], null when n_outputs = 0
    ggml_tensor* states = nullptr;  // f32 [n_embd, n_tokens] of all tokens, null where they are not asked for
    ReferenceInputs reference;
    ReferenceInputs ring_reference;         // for layers whose middle is in the ring
    std::vector<ReferenceInputs> evicting;  // one per layer if some layers evict, each with its own slots
    std::vector<AttentionNode> attention;   // one per layer of the model; nodes point into it
    std::vector<AttentionNode> writers;     // with exact rows: where the layer's rows go in the cache
    std::vector<DeltaNetNode> delta_nets;   // one per layer of the model where some are single nodes
    Roles roles;
};

// What a lazily prefilled prompt attends to: the exact rows of one layer.
struct ExactRows {
    KvCache* cache = nullptr;  // one layer
    BatchSlots batch;          // the ubatch's slots in it
    LayerCacheSpec spec;       // layout of its rows
};

// What a graph computes for the wanted tokens: logits, or the hidden states after the last norm, from which logits are made.
enum class Result { logits, states };

struct GraphShape {
    int n_tokens = 1;
    int n_seqs = 1;    // with recurrent layers: sequences, of as many tokens each
    int n_states = 1;  // with recurrent layers: states that are kept of a sequence, after each of its last tokens
    int n_outputs = 1;
    Result result = Result::logits;
    bool all_states = false;  // beside the result, of every token
    int n_threads = 1;
    bool fused = true;
    bool on_gpu = false;
    bool concurrent = false;   // there: K, V and Q are computed beside each other (gpu.h)
    bool recorded = false;     // and the graph is recorded
    int n_slots = 0;           // reference only: slots in use over all regions
    int n_ring_slots = 0;      // the same with the ring in place of the middle, if there is one
    int n_evicting_slots = 0;  // the same in the layer that has most, under eviction
    int n_exact = 0;           // slots in use of the exact windows
    bool to_middle = true;     // with exact windows of full rows: some token goes to the middle
    bool latents = true;       // the middle holds tokens
    bool ring = true;          // the ring holds tokens
    bool apart = false;        // tokens read the slots of their own sequences alone (Apart), in the middle
    bool ring_apart = false;   // and in the ring
    int first_layer = 0;       // first layer of the graph
    int end_layer = -1;        // one past the last layer; -1: all layers

    bool operator==(const GraphShape&) const = default;
};

// states: of the graph's recurrent layers; null where the model has none.
std::unique_ptr<Graph> build_graph(const Model& model, KvCache& cache, const Ropes& ropes,
                                   const GraphConstants& constants, const StateTensors* states, const BatchSlots& batch,
                                   const GraphShape& shape, const ExactRows* exact = nullptr);

}  // namespace lkv
