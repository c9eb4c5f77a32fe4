#include "runtime/branches.h"

#include <bit>
#include <cstdint>
#include <optional>
#include <unordered_map>

#include "graph/ggml_entry.h"

namespace lkv {

bool is_view(const ggml_tensor* node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

namespace {

constexpr uint8_t to_k = 1;
constexpr uint8_t to_v = 2;
constexpr uint8_t to_q = 4;

// As latent_attn of a graph for the GPU makes it: [queries, stored rows, K, V, then more of both].
bool is_attention(const ggml_tensor* node) {
    return node->op == GGML_OP_CUSTOM && node->src[3] != nullptr && node->src[1]->op == GGML_OP_CUSTOM &&
           node->src[1]->src[0] == node->src[2] && node->src[1]->src[1] == node->src[3];
}

bool overlap(const ggml_tensor* a, const ggml_tensor* b) {
    const auto* const a0 = static_cast<const char*>(a->data);
    const auto* const b0 = static_cast<const char*>(b->data);
    return a0 < b0 + ggml_nbytes(b) && b0 < a0 + ggml_nbytes(a);
}

struct Memory {
    std::vector<const ggml_tensor*> read;
    std::vector<const ggml_tensor*> written;
};

Memory memory_of(ggml_cgraph* graph, int first, int end, const ggml_tensor* result) {
    Memory memory;
    if (result != nullptr) memory.read.push_back(result);
    for (int i = first; i < end; i++) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        if (is_view(node)) {
            continue;
        }
        memory.written.push_back(node);
        for (const ggml_tensor* src : node->src) {
            if (src != nullptr) {
                memory.read.push_back(src);
            }
        }
    }
    return memory;
}

// a writes nothing that b reads or writes
bool spares(const Memory& a, const Memory& b) {
    for (const ggml_tensor* written : a.written) {
        for (const auto* list : {&b.read, &b.written}) {
            for (const ggml_tensor* other : *list) {
                if (overlap(written, other)) {
                    return false;
                }
            }
        }
    }
    return true;
}

// By node: which of K, V and the queries it leads to.
using Leads = std::unordered_map<const ggml_tensor*, uint8_t>;

Leads leads_of(ggml_cgraph* graph, int begin, const ggml_tensor* rows, int attention) {
    const ggml_tensor* const attend = ggml_graph_node(graph, attention);
    Leads leads;
    for (int s = 0; s < GGML_MAX_SRC; s++) {
        if (rows->src[s] == nullptr) continue;
        const bool is_k = s % 2 == 0 && rows->src[s] != rows->src[s + 1];  // and no row of V alone
        leads[rows->src[s]] |= is_k ? to_k : to_v;
    }
    leads[attend->src[0]] |= to_q;
    leads[last_queries(attend)] |= to_q;
    for (int i = attention - 1; i >= begin; i--) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        const uint8_t to = leads[node];
        for (const ggml_tensor* src : node->src) {
            if (src != nullptr) {
                leads[src] |= to;
            }
        }
    }
    return leads;
}

// Whether no branch reads or writes what another writes.
bool run_apart(ggml_cgraph* graph, const Branches& b) {
    const ggml_tensor* const rows = ggml_graph_node(graph, b.store);
    const Memory k = memory_of(graph, b.k, b.v, rows->src[0] == rows->src[1] ? nullptr : rows->src[0]);
    const Memory v = memory_of(graph, b.v, b.store, rows->src[1]);
    const Memory q = memory_of(graph, b.store + 1, b.attention, last_queries(ggml_graph_node(graph, b.attention)));
    return spares(k, v) && spares(k, q) && spares(v, k) && spares(v, q) && spares(q, k) && spares(q, v);
}

// Nodes [begin, attention] of the graph, with one store among them.
std::optional<Branches> branches_of(ggml_cgraph* graph, int begin, int store, int attention) {
    const ggml_tensor* const attend = ggml_graph_node(graph, attention);
    Leads leads = leads_of(graph, begin, ggml_graph_node(graph, store), attention);
    Branches b{begin, begin, begin, store, attention, attention, attention};
    const auto leads_to = [&](int i, uint8_t one) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        return is_view(node) || leads[node] == one;
    };
    const auto shared = [&](int i) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        return is_view(node) || std::popcount(leads[node]) != 1;
    };
    int product = begin;
    for (; b.k < store && shared(b.k); b.k++) {
        const ggml_op op = ggml_graph_node(graph, b.k)->op;
        if (op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID) product = b.k;
        if (op == GGML_OP_RMS_NORM || op == GGML_OP_NORM) b.ahead = product;
    }
    b.v = b.k;
    while (b.v < store && leads_to(b.v, to_k)) b.v++;
    for (int i = b.v; i < store; i++) {
        if (!leads_to(i, to_v)) {
            return std::nullopt;
        }
    }
    b.latent_q = store + 1;
    for (int i = store + 1; i < attention; i++) {
        if (!leads_to(i, to_q)) {
            return std::nullopt;
        }
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        if (node->data == attend->src[0]->data && (node == attend->src[0] || node == attend->src[0]->view_src)) {
            b.latent_q = i + 1;
        }
    }
    b.rope = b.latent_q;
    if (b.latent_q > store + 1 && ggml_graph_node(graph, b.latent_q - 1)->op == GGML_OP_ROPE) b.rope--;
    return run_apart(graph, b) ? std::optional(b) : std::nullopt;
}

}  // namespace

std::vector<Branches> find_branches(ggml_cgraph* graph) {
    std::vector<Branches> layers;
    std::unordered_map<const ggml_tensor*, int> customs;
    int begin = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_CUSTOM) {
            customs[node] = i;
        }
        if (!is_attention(node)) {
            continue;
        }
        // a layer that reads another's rows makes no K and V beside its queries
        if (const int store = customs.at(node->src[1]); store >= begin) {
            if (const std::optional<Branches> layer = branches_of(graph, begin, store, i)) layers.push_back(*layer);
        }
        begin = i + 1;
    }
    return layers;
}

}  // namespace lkv
