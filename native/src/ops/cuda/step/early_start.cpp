#include "ops/cuda/step/early_start.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace lkv::cuda {

// Dependencies with ports came with CUDA 12.3, under names of their own before 13.
#if CUDART_VERSION >= 12030

namespace {

#if CUDART_VERSION >= 13000
const auto get_edges = cudaGraphGetEdges;
const auto add_edges = cudaGraphAddDependencies;
const auto remove_edges = cudaGraphRemoveDependencies;
#else
const auto get_edges = cudaGraphGetEdges_v2;
const auto add_edges = cudaGraphAddDependencies_v2;
const auto remove_edges = cudaGraphRemoveDependencies_v2;
#endif

cudaError_t nodes_of(cudaGraph_t graph, std::vector<cudaGraphNode_t>& nodes) {
    size_t n = 0;
    const cudaError_t error = cudaGraphGetNodes(graph, nullptr, &n);
    if (error != cudaSuccess) return error;
    nodes.resize(n);
    return cudaGraphGetNodes(graph, nodes.data(), &n);
}

// Which nodes come before which, a bit each.
class Order {
public:
    Order(const std::vector<cudaGraphNode_t>& nodes, const Edges& edges)
        : words_((nodes.size() + 63) / 64), into_(nodes.size()), before_(nodes.size() * words_) {
        for (size_t i = 0; i < nodes.size(); i++) index_[nodes[i]] = i;
        std::vector<std::vector<size_t>> out(nodes.size());
        std::vector<size_t> missing(nodes.size());  // dependencies that have not been added up
        for (size_t e = 0; e < edges.from.size(); e++) {
            const size_t from = index_.at(edges.from[e]);
            const size_t to = index_.at(edges.to[e]);
            into_[to].push_back(from);
            out[from].push_back(to);
            missing[to]++;
        }
        std::vector<size_t> ready;
        for (size_t i = 0; i < nodes.size(); i++) {
            if (missing[i] == 0) ready.push_back(i);
        }
        while (!ready.empty()) {
            const size_t from = ready.back();
            ready.pop_back();
            for (const size_t to : out[from]) {
                for (size_t w = 0; w < words_; w++) before_[to * words_ + w] |= before_[from * words_ + w];
                before_[to * words_ + from / 64] |= uint64_t{1} << from % 64;
                if (--missing[to] == 0) ready.push_back(to);
            }
        }
    }
    // Whether `to` depends on something else that comes after `from`.
    bool implies(cudaGraphNode_t from, cudaGraphNode_t to) const {
        const size_t first = index_.at(from);
        for (const size_t other : into_[index_.at(to)]) {
            if (before_[other * words_ + first / 64] >> first % 64 & 1) return true;
        }
        return false;
    }

private:
    size_t words_;
    std::unordered_map<cudaGraphNode_t, size_t> index_;
    std::vector<std::vector<size_t>> into_;
    std::vector<uint64_t> before_;
};

// Whether a kernel's thread blocks may be placed before those of another that has begun to be. Smaller numbers go first.
cudaError_t overtakes(cudaGraphNode_t to, cudaGraphNode_t from, bool& result) {
    cudaLaunchAttributeValue of_to{};
    cudaLaunchAttributeValue of_from{};
    cudaError_t error = cudaGraphKernelNodeGetAttribute(to, cudaLaunchAttributePriority, &of_to);
    if (error == cudaSuccess) error = cudaGraphKernelNodeGetAttribute(from, cudaLaunchAttributePriority, &of_from);
    result = of_to.priority < of_from.priority;
    return error;
}

}  // namespace

cudaError_t edges_of(cudaGraph_t graph, Edges& edges) {
    size_t n = 0;
    const cudaError_t error = get_edges(graph, nullptr, nullptr, nullptr, &n);
    if (error != cudaSuccess) return error;
    edges.from.resize(n);
    edges.to.resize(n);
    edges.data.resize(n);
    return get_edges(graph, edges.from.data(), edges.to.data(), edges.data.data(), &n);
}

cudaError_t start_early(cudaGraph_t recorded) {
    std::vector<cudaGraphNode_t> nodes;
    Edges edges;
    cudaError_t error = nodes_of(recorded, nodes);
    if (error == cudaSuccess) error = edges_of(recorded, edges);
    if (error != cudaSuccess) return error;
    const Order order(nodes, edges);
    for (size_t e = 0; e < edges.from.size() && error == cudaSuccess; e++) {
        const cudaGraphEdgeData& as_recorded = edges.data[e];
        const bool implied = order.implies(edges.from[e], edges.to[e]);
        // Where all that a kernel waits for by itself has begun, all that this waits for has: nothing that it keeps out of a
        // multiprocessor by being there early is waited for. Of a kernel of higher priority CUDA does not promise to keep that order.
        if (!implied) {
            if (as_recorded.type != cudaGraphDependencyTypeProgrammatic) continue;
            bool out_of_order = false;
            error = overtakes(edges.to[e], edges.from[e], out_of_order);
            if (error != cudaSuccess || out_of_order) continue;
        }
        error = remove_edges(recorded, &edges.from[e], &edges.to[e], &as_recorded, 1);
        if (implied || error != cudaSuccess) continue;
        cudaGraphEdgeData as_begun = as_recorded;
        as_begun.from_port = cudaGraphKernelNodePortLaunchCompletion;
        error = add_edges(recorded, &edges.from[e], &edges.to[e], &as_begun, 1);
    }
    return error;
}

#else

cudaError_t start_early(cudaGraph_t) { return cudaSuccess; }

#endif

}  // namespace lkv::cuda
