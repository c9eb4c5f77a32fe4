#include "runtime/cuda/own_products.h"

#include <map>

#include "ggml-impl.h"
#include "runtime/branches.h"

namespace lkv::cuda {
namespace {

// How many nodes read each tensor, through views too.
std::map<const ggml_tensor*, int> uses_in(ggml_cgraph* graph) {
    std::map<const ggml_tensor*, int> uses;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        if (is_view(node)) continue;
        for (const ggml_tensor* src : node->src) {
            if (src != nullptr) uses[owner_of(src)]++;
        }
    }
    return uses;
}

}  // namespace

bool is_rotation(const ggml_tensor* node) {
    return node->op == GGML_OP_MUL_MAT && ggml_get_op_params_i32(node, 1) == GGML_HINT_SRC0_IS_HADAMARD;
}

void OwnProducts::prepare(const Graph& graph, bool small) {
    positions_ = graph.positions;
    turned_.clear();
    read_otherwise_.clear();
    products_.clear();
    heads_.clear();
    swaps_.clear();
    for (const FactorProduct& of : graph.roles.products) {
        products_.insert(of.product);
        find_heads(of);
    }
    if (small) find_turned(graph.nodes);
}

std::optional<ProductArgs> OwnProducts::product_of(const ggml_tensor* node) const {
    if (!products_.contains(node)) return std::nullopt;
    const ggml_tensor* const w = node->src[0];
    const ggml_tensor* const x = node->src[1];
    const int64_t columns = x->ne[1] * x->ne[2] / w->ne[2];
    const bool taken = w->type == GGML_TYPE_F16 && x->type == GGML_TYPE_F32 && ggml_is_contiguous(x) &&
                       ggml_is_contiguous(node) && x->ne[3] == 1 && w->ne[0] % 8 == 0 && w->nb[1] % 16 == 0 &&
                       w->nb[2] % 16 == 0 && reinterpret_cast<uintptr_t>(w->data) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(x->data) % 16 == 0 && columns <= product_columns &&
                       product_shared_bytes(w->ne[0], columns) <= device_.shared_bytes;
    if (!taken) return std::nullopt;
    ProductArgs args{};
    args.w = static_cast<const uint16_t*>(w->data);
    args.x = static_cast<const float*>(x->data);
    args.y = static_cast<float*>(node->data);
    args.w_row = static_cast<int64_t>(w->nb[1] / sizeof(uint16_t));
    args.w_matrix = static_cast<int64_t>(w->nb[2] / sizeof(uint16_t));
    args.n_in = static_cast<int32_t>(w->ne[0]);
    args.n_out = static_cast<int32_t>(w->ne[1]);
    args.n_matrices = static_cast<int32_t>(w->ne[2]);
    args.n_columns = static_cast<int32_t>(columns);
    const ggml_tensor* const rope = owner_of(x);
    if (turned_.contains(rope)) {
        args.x = static_cast<const float*>(rope->src[0]->data);
        args.turn = *turn_of(rope);
    }
    return args;
}

// 48 tokens of a default file took 6 launches a layer here.
void OwnProducts::find_heads(const FactorProduct& of) {
    const ggml_tensor* const w = of.product->src[0];
    // x is read when the copy may be gone
    const bool taken =
        of.x != nullptr && (owner_of(of.x)->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 && ggml_is_contiguous(of.x) &&
        of.x->type == GGML_TYPE_F32 && w->type == GGML_TYPE_F16 && w->ne[0] % heads_product_step == 0 &&
        w->nb[1] % 16 == 0 && w->nb[2] % 16 == 0 && reinterpret_cast<uintptr_t>(w->data) % 16 == 0 &&
        reinterpret_cast<uintptr_t>(of.x->data) % 16 == 0 && reinterpret_cast<uintptr_t>(of.result->data) % 16 == 0;
    if (!taken) return;
    heads_[of.product] = of;
    swaps_.insert({of.product->src[1], of.result});
}

std::optional<HeadsProductArgs> OwnProducts::heads_product_of(const ggml_tensor* node) const {
    const auto found = heads_.find(node);
    if (found == heads_.end()) return std::nullopt;
    const ggml_tensor* const w = node->src[0];
    const ggml_tensor* const x = found->second.x;
    HeadsProductArgs args{};
    args.w = static_cast<const uint16_t*>(w->data);
    args.x = static_cast<const float*>(x->data);
    args.y = static_cast<float*>(found->second.result->data);
    args.w_row = static_cast<int64_t>(w->nb[1] / sizeof(uint16_t));
    args.w_matrix = static_cast<int64_t>(w->nb[2] / sizeof(uint16_t));
    args.n_in = static_cast<int32_t>(w->ne[0]);
    args.n_out = static_cast<int32_t>(w->ne[1]);
    args.n_matrices = static_cast<int32_t>(w->ne[2]);
    args.heads_of_matrix = static_cast<int32_t>(x->ne[1] / w->ne[2]);
    args.n_tokens = static_cast<int32_t>(x->ne[2]);
    return args;
}

std::optional<RopeTurn> OwnProducts::turn_of(const ggml_tensor* rope) const {
    if (rope->op != GGML_OP_ROPE || rope->src[1] != positions_) return std::nullopt;
    const RopeTables* const tables = layers_.rope_of(rope->src[2]);
    const ggml_tensor* const from = rope->src[0];
    const int32_t mode = ggml_get_op_params_i32(rope, 2);
    const bool taken = tables != nullptr && rope->ne[2] == 1 && rope->ne[3] == 1 && from->type == GGML_TYPE_F32 &&
                       ggml_is_contiguous(from) && reinterpret_cast<uintptr_t>(from->data) % 16 == 0 &&
                       rope->ne[0] % 4 == 0 && rope->ne[0] <= max_turned && tables->n_rot <= max_rot &&
                       mode == (tables->neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL);
    if (!taken) return std::nullopt;
    return RopeTurn{tables->phases.as<uint64_t>(), inputs_.q_pos(), static_cast<int32_t>(rope->ne[0]), tables->n_rot,
                    tables->neox ? 1 : 0,          tables->mscale};
}

const ggml_tensor* OwnProducts::rope_of(const ggml_tensor* product) const {
    const ggml_tensor* const x = product->src[1];
    const ggml_tensor* const rope = owner_of(x);
    const bool whole = x->data == rope->data && ggml_nelements(x) == ggml_nelements(rope) && turn_of(rope);
    const bool of_heads =
        is_rotation(product) ? rope->ne[0] % x->ne[0] == 0 && x->ne[0] % 4 == 0 : x->ne[0] % rope->ne[0] == 0;
    return whole && of_heads ? rope : nullptr;
}

std::optional<TurnArgs> OwnProducts::turning(const ggml_tensor* node) const {
    const ggml_tensor* const rope = is_rotation(node) ? rope_of(node) : node;
    if (rope == nullptr || (rope != node && !turned_.contains(rope))) return std::nullopt;
    const std::optional<RopeTurn> turn = turn_of(rope);
    const bool taken = turn && ggml_is_contiguous(node) && reinterpret_cast<uintptr_t>(node->data) % 16 == 0;
    if (!taken) return std::nullopt;
    return TurnArgs{*turn, static_cast<const float*>(rope->src[0]->data), static_cast<float*>(node->data),
                    static_cast<int32_t>(rope->ne[1]), rope == node ? 0 : static_cast<int32_t>(node->ne[0])};
}

// A launch less on the way to K and to the queries: 8B, rotated 64 at depth 0 322 to 329 tokens/s without, 325 to 335 with it.
void OwnProducts::find_turned(ggml_cgraph* graph) {
    std::map<const ggml_tensor*, int> uses = uses_in(graph);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        if (is_view(node)) continue;
        const ggml_tensor* const rope = is_rotation(node) || product_of(node) ? rope_of(node) : nullptr;
        if (rope != nullptr) {
            turned_.insert(rope);
            uses[rope]--;
        }
    }
    for (const ggml_tensor* rope : turned_) {
        if (uses[rope] > 0) read_otherwise_.insert(rope);
    }
}

}  // namespace lkv::cuda
