#include "runtime/branches.h"

#include <algorithm>
#include <iterator>

#include "graph/ggml_entry.h"

namespace lkv {

bool is_view(const ggml_tensor* node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

namespace {

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

// Whether no branch reads or writes what another writes.
bool run_apart(ggml_cgraph* graph, const LayerRoles& b) {
    const ggml_tensor* const rows = ggml_graph_node(graph, b.store);
    const Memory k = memory_of(graph, b.k, b.v, rows->src[0] == rows->src[1] ? nullptr : rows->src[0]);
    const Memory v = memory_of(graph, b.v, b.store, rows->src[1]);
    const Memory q = memory_of(graph, b.store + 1, b.attention, last_queries(ggml_graph_node(graph, b.attention)));
    return spares(k, v) && spares(k, q) && spares(v, k) && spares(v, q) && spares(q, k) && spares(q, v);
}

}  // namespace

std::vector<LayerRoles> concurrent_layers(ggml_cgraph* graph, std::span<const LayerRoles> layers) {
    std::vector<LayerRoles> found;
    std::copy_if(layers.begin(), layers.end(), std::back_inserter(found),
                 [graph](const LayerRoles& layer) { return run_apart(graph, layer); });
    return found;
}

}  // namespace lkv
