#include "graph/attention_branch.h"

namespace lkv {
ReferenceInputs& reference_inputs(const GraphSources& from, Graph& graph, int il) {
    if (from.exact == nullptr && from.cache.placement().evicts(il)) return graph.evicting[static_cast<size_t>(il)];
    return from.exact == nullptr && from.cache.placement().in_ring(il) ? graph.ring_reference : graph.reference;
}

void AttentionBranch::describe(LatentAttnParams& p, int il) const {
    p.n_head = h_.heads_of(il).n_head;
    p.n_kv = h_.heads_of(il).n_kv;
    p.head_dim = h_.has_mla() ? spec_of(il).mla_rank() : h_.heads_of(il).head_dim;
    p.k_group = p.v_group = 1;
    p.scale = h_.attention_scale(il);
    p.softcap = h_.block.attention_softcap;
    p.window = h_.block.layers[static_cast<size_t>(il)].window;
    const LayerWeights& layer = from_.model.layers()[static_cast<size_t>(il)];
    p.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
    p.sink_values = layer.sink_values.empty() ? nullptr : layer.sink_values.data();
    p.alibi_slopes = from_.constants.alibi_slopes.empty() ? nullptr : from_.constants.alibi_slopes.data();
}

void AttentionBranch::describe_rebuild(LatentAttnParams& p, int il) const {
    const LayerWeights& layer = weights_of(il);
    p.k_bias = layer.k_bias.empty() ? nullptr : layer.k_bias.data();
    p.k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
    p.k_norm_eps = h_.norm_eps;
    const Rope& rope = from_.ropes.of(il);
    p.rope_freqs = rope.rotates() ? rope.freqs.data() : nullptr;
    p.rope_mscale = rope.mscale;
    p.n_rot = h_.heads_of(il).n_rot;
    p.rope_neox = h_.block.rope_pairing == RopePairing::neox;
}

void AttentionBranch::describe_full(LatentAttnParams& p, const LayerCacheSpec& spec, int il) const {
    describe(p, il);
    p.q_width = p.head_dim;
    if (spec.k_path == KPath::rebuild || spec.key_of_value()) {
        p.k_raw = true;
        p.k_rank_max = p.head_dim;
        describe_rebuild(p, il);
    }
}

void AttentionBranch::describe_latents(LatentAttnParams& p, const LayerCacheSpec& spec, Route::Keys keys,
                                       int il) const {
    const LayerWeights& layer = weights_of(il);
    describe(p, il);
    p.k_group = spec.k.group;
    p.v_group = spec.v.group;
    const bool of_value = spec.rebuilds_key_of_value();
    if (keys != Route::Keys::stored) {
        p.k_group = (of_value ? spec.v : spec.k).group;
        p.k_b = (of_value ? layer.v_b : layer.k_b).data();
        p.k_rank_max = (of_value ? spec.v : spec.k).rank_max();
    }
    if (keys == Route::Keys::rebuilt) describe_rebuild(p, il);
    if (spec.v_path == VPath::latent && !spec.is_mla()) {
        p.v_b = layer.v_b.data();
        p.v_rank_max = spec.v.rank_max();
    }
}

// kv: the layer whose rows are read. split: exact windows hold full rows, and are a problem of their own.
AttentionNode& AttentionBranch::attention_node(int il, int kv, const Route& route, const Queries& q, bool split) {
    const ExactRows* const exact = from_.exact;
    const LayerCacheSpec& spec = exact != nullptr ? exact->spec : spec_of(kv);
    AttentionNode& node = graph_.attention[static_cast<size_t>(il)];
    node.cache = exact != nullptr ? exact->cache : &from_.cache;
    node.batch = exact != nullptr ? &exact->batch : &from_.batch;
    node.layer = kv;
    node.row_layer = exact != nullptr ? 0 : kv;
    node.on_gpu = from_.shape.on_gpu;
    if (route.rotates_results) node.v_hadamard = static_cast<int>(from_.constants.hadamard_v->ne[0]);
    if (split) {
        LatentAttnParams& p = node.full.emplace();
        describe_full(p, spec, kv);
        node.list_regions(true, p);
    }
    if (q.latents != nullptr) {
        LatentAttnParams& p = node.latents.emplace();
        describe_latents(p, spec, route.keys, kv);
        p.q_width = static_cast<int32_t>(q.latents->ne[0]);
        node.list_regions(false, p);
    }
    return node;
}

AttentionBranch::Reads AttentionBranch::read_cache(ggml_tensor* q, const Rows& rows, const Route& route, int il) {
    const int kv = h_.rows_of(il);
    const bool split = from_.cache.rows().is_full(0, kv);
    Queries queries{split ? q : nullptr, nullptr};
    if (!split || (from_.cache.placement().in_ring(kv) ? from_.shape.ring : from_.shape.latents)) {
        queries.latents = route.projects ? projections_.project(q, weights_of(kv)) : q;
    }
    AttentionNode& node = attention_node(il, kv, route, queries, split);
    ggml_tensor*& stored = stored_[static_cast<size_t>(kv)];
    if (kv == il) stored = store_rows(ctx_, node, rows.full, rows.latents);
    return {node, queries, stored};
}

// A lazy prefill attends to rows before compression, and writes both these and the cache's.
AttentionBranch::Reads AttentionBranch::read_exact(ggml_tensor* q, const Rows& rows, const Heads& heads,
                                                   const Route& route, int il) {
    AttentionNode& writer = graph_.writers[static_cast<size_t>(il)];
    writer.cache = &from_.cache;
    writer.batch = &from_.batch;
    writer.layer = writer.row_layer = il;
    writer.on_gpu = from_.shape.on_gpu;
    graph_.roles.stored_rotations.clear();  // two stores read them
    ggml_build_forward_expand(graph_.nodes, store_rows(ctx_, writer, rows.full, rows.latents));
    const Queries queries{nullptr, route.projects ? projections_.project(q, weights_of(il)) : q};
    AttentionNode& node = attention_node(il, il, route, queries, false);
    return {node, queries, store_rows(ctx_, node, std::nullopt, projections_.exact_rows(*rows.latents, heads, il))};
}

AttentionBranch::Attended AttentionBranch::attended(const Reads& reads, int il) {
    const GraphShape& shape = from_.shape;
    const bool evicts = from_.exact == nullptr && from_.cache.placement().evicts(il);
    ggml_tensor* out = nullptr;
    ggml_tensor* masses = nullptr;
    if (shape.fused) {
        out = latent_attn(ctx_, reads.node, reads.q, reads.stored, shape.n_threads);
        if (evicts) masses = attn_mass(ctx_, reads.node, reads.q, shape.on_gpu ? out : reads.stored, shape.n_threads);
    } else {
        ggml_tensor* const factors = from_.constants.rope_factors[from_.ropes.of_layer[static_cast<size_t>(il)]];
        out = latent_attn_reference(ctx_, reads.node, from_.model, from_.ropes.of(il), factors,
                                    reference_inputs(from_, graph_, h_.rows_of(il)), reads.q, reads.stored,
                                    evicts ? &masses : nullptr);
    }
    if (evicts && !shape.on_gpu) masses = store_masses(ctx_, reads.node, masses);
    return {out, masses};
}

// x [head_dim, n_head, n_tokens] times the gate of each number, or of each head.
ggml_tensor* AttentionBranch::gated(ggml_tensor* x, ggml_tensor* gate) const {
    const bool of_heads = ggml_nelements(gate) == x->ne[1] * x->ne[2];
    gate = ggml_cont_3d(ctx_, gate, of_heads ? 1 : x->ne[0], x->ne[1], x->ne[2]);
    return ggml_mul(ctx_, x, h_.block.gate == Gate::softplus ? ggml_softplus(ctx_, gate) : ggml_sigmoid(ctx_, gate));
}

ggml_tensor* AttentionBranch::output(ggml_tensor* x, ggml_tensor* gate, const Route& route, int il) const {
    const LayerWeights& layer = weights_of(il);
    const HeadShape& heads = h_.heads_of(il);
    const int64_t hd = h_.has_mla() ? h_.mla.n_value : heads.head_dim;
    const int64_t n_tokens = x->ne[2];
    const int kv = h_.rows_of(il);
    if (spec_of(kv).v_path == VPath::full) {
        if (!route.rotates_results) x = ops_.rotate(x, from_.constants.hadamard_v);  // H is its own inverse
    } else if (ggml_tensor* const bias = weights_of(kv).attn_v_bias; bias != nullptr) {
        x = ggml_reshape_4d(ctx_, x, hd, heads.n_head / heads.n_kv, heads.n_kv, n_tokens);
        x = ggml_add(ctx_, x, ggml_reshape_3d(ctx_, bias, hd, 1, heads.n_kv));
    }
    if (h_.has_mla()) x = projections_.mla_values(x, layer);
    if (gate != nullptr) x = gated(ggml_reshape_3d(ctx_, x, hd, heads.n_head, n_tokens), gate);
    return ops_.linear(ggml_reshape_2d(ctx_, x, hd * heads.n_head, n_tokens), layer.attn_output,
                       layer.attn_output_bias);
}

ggml_tensor* AttentionBranch::build(ggml_tensor* x, int il) {
    const bool is_own = h_.makes_rows(il);
    const Route route = route_of(from_, h_.rows_of(il));
    const LayerCacheSpec& spec = spec_of(h_.rows_of(il));
    const bool split = is_own && from_.cache.rows().is_full(0, il);
    ops_.held(x);
    const Heads heads = projections_.heads(x, il);
    const bool full_row = spec.is_mla() && spec.v_path == VPath::full;
    ggml_tensor* const q = spec.k_path == KPath::full ? ops_.held(ops_.rotate(heads.q, from_.constants.hadamard_k))
                           : full_row                 ? ops_.held(ops_.rotate(heads.q, from_.constants.hadamard_v))
                                                      : heads.q;
    Rows rows;
    if (split) {
        rows.full = projections_.full_rows(heads, spec);
    }
    if (is_own && (!split || from_.shape.to_middle || from_.exact != nullptr)) {
        rows.latents = projections_.latent_rows(x, heads, weights_of(il), spec);
    }
    const Reads reads = from_.exact != nullptr ? read_exact(q, rows, heads, route, il) : read_cache(q, rows, route, il);
    const bool noted = is_own && from_.shape.on_gpu && from_.shape.fused && from_.exact == nullptr;
    LayerRoles roles = noted ? draw_rows(x, heads, rows) : LayerRoles{};
    drawn({reads.stored});  // rows are written even where no output follows
    const Attended by = attended(reads, il);
    const bool is_read = il != h_.n_layer - 1 || from_.shape.n_outputs > 0;
    if (noted && is_read) {
        draw_attention(roles, reads, by.out);
        graph_.roles.layers.push_back(roles);
    }
    drawn({by.masses});  // which on a GPU follow from what attention leaves
    return output(by.out, heads.gate, route, il);
}

int AttentionBranch::drawn(std::initializer_list<ggml_tensor*> tensors) const {
    for (ggml_tensor* const tensor : tensors) {
        if (tensor != nullptr) ggml_build_forward_expand(graph_.nodes, tensor);
    }
    return ggml_graph_n_nodes(graph_.nodes);
}

LayerRoles AttentionBranch::draw_rows(ggml_tensor* x, const Heads& heads, const Rows& rows) const {
    const auto k_of = [](const std::optional<BatchRows>& of) { return of && of->k != of->v ? of->k : nullptr; };
    const auto v_of = [](const std::optional<BatchRows>& of) { return of ? of->v : nullptr; };
    const std::vector<LayerRoles>& before = graph_.roles.layers;
    LayerRoles roles;
    roles.ahead = before.empty() ? 0 : before.back().attention + 1;
    roles.input = drawn({});
    for (int i = roles.ahead; i < roles.input; i++) {
        const ggml_op op = ggml_graph_node(graph_.nodes, i)->op;
        if (op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID) roles.ahead = i;
    }
    roles.k = drawn({x, heads.shared});
    roles.v = drawn({k_of(rows.full), k_of(rows.latents)});
    roles.store = drawn({v_of(rows.full), v_of(rows.latents)});
    return roles;
}

void AttentionBranch::draw_attention(LayerRoles& roles, const Reads& reads, ggml_tensor* out) const {
    roles.latent_q = drawn({reads.q.full != nullptr ? reads.q.full : reads.q.latents});
    const bool turns =
        roles.latent_q > roles.store + 1 && ggml_graph_node(graph_.nodes, roles.latent_q - 1)->op == GGML_OP_ROPE;
    roles.rope = turns ? roles.latent_q - 1 : roles.latent_q;
    roles.attention = drawn({reads.q.latents});
    drawn({out});
}

}  // namespace lkv
