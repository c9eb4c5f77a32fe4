#include "graph/projections.h"

namespace lkv {
namespace {

bool raw_keys(const LayerCacheSpec& spec) {
    return spec.k_path == KPath::rebuild || spec.k_path == KPath::absorbed || spec.key_of_value();
}

}  // namespace

ggml_tensor* Projections::rope(ggml_tensor* x, int il) const {
    const Rope& rope = ropes_.of(il);
    if (!rope.rotates()) return x;
    // held: a GPU's products with E_q and E_k apply RoPE themselves
    ops_.held(x);
    const int mode = h_.block.rope_pairing == RopePairing::neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL;
    return ggml_rope_ext(ctx_, x, positions_, constants_.rope_factors[ropes_.of_layer[static_cast<size_t>(il)]],
                         h_.heads_of(il).n_rot, mode, 0, rope.base, 1.0F, 0.0F, rope.mscale, 32.0F, 1.0F);
}

ggml_tensor* Projections::tempered(ggml_tensor* q) const {
    if (temperatures_ == nullptr) return q;
    return ops_.held(ggml_mul(ctx_, q, ggml_reshape_3d(ctx_, temperatures_, 1, 1, temperatures_->ne[0])));
}

ggml_tensor* Projections::project(ggml_tensor* q, const LayerWeights& layer) const {
    // heads of one KV head share its E_q; a GPU reads them where they are
    ops_.kept(q);
    return ops_.held(heads_product(ctx_, layer.attn_q_e, q, held(), roles_.products));
}

ggml_tensor* Projections::encode(ggml_tensor* x, ggml_tensor* e, const TensorSpec& spec) const {
    return lkv::encode(ctx_, e, x, spec, held(), roles_.products);
}

Heads Projections::packed(ggml_tensor* x, const LayerWeights& layer, const HeadShape& shape) const {
    ggml_tensor* const qkv = ops_.held(ops_.clamp(ops_.linear(x, layer.attn_qkv, layer.attn_qkv_bias)));
    const auto width = static_cast<size_t>(shape.head_dim) * sizeof(float);
    const auto cut = [&](int64_t heads, int64_t first) {
        return ops_.held(ggml_cont(ctx_, ggml_view_3d(ctx_, qkv, shape.head_dim, heads, x->ne[1], width, qkv->nb[1],
                                                      static_cast<size_t>(first) * width)));
    };
    return {cut(shape.n_head, 0), cut(shape.n_kv, shape.n_head), cut(shape.n_kv, shape.n_head + shape.n_kv), nullptr,
            qkv};
}

// Queries, and what their projection makes beside them: per head Q and then the gate.
void Projections::cut_gate(ggml_tensor* both, const HeadShape& shape, Heads& heads) const {
    const size_t width = static_cast<size_t>(shape.head_dim) * sizeof(float);
    const auto half = [&](size_t first) {
        return ggml_view_3d(ctx_, both, shape.head_dim, shape.n_head, both->ne[1], 2 * width, both->nb[1], first);
    };
    heads.q = ops_.held(ggml_cont(ctx_, half(0)));
    heads.gate = half(width);
}

Heads Projections::apart(ggml_tensor* x, const LayerWeights& layer, const LayerCacheSpec& spec,
                         const HeadShape& shape) const {
    const auto project = [&](ggml_tensor* weight, ggml_tensor* bias, int64_t n_heads) {
        if (weight == nullptr) return weight;
        ggml_tensor* const y = ops_.held(ops_.clamp(ops_.linear(x, weight, bias)));
        return ggml_reshape_3d(ctx_, y, shape.head_dim, n_heads, x->ne[1]);
    };
    // after a norm over all heads the bias of raw keys is added later
    ggml_tensor* const raw_bias = layer.attn_k_norm_whole != nullptr ? nullptr : layer.attn_k_e_bias;
    ggml_tensor* const k_bias = raw_keys(spec) ? raw_bias : layer.attn_k_bias;
    Heads found;
    if (h_.block.output_gate) {
        cut_gate(ops_.held(ops_.linear(x, layer.attn_q, layer.attn_q_bias)), shape, found);
    } else {
        found.q = project(layer.attn_q, layer.attn_q_bias, shape.n_head);
    }
    if (layer.value_of_key) {
        found.v = found.shared = project(layer.attn_k, nullptr, shape.n_kv);
        found.k = with_bias(found.v, k_bias);
        return found;
    }
    found.k = project(layer.attn_k, k_bias, shape.n_kv);
    // a latent's bias is added once, to the output; that of what is encoded, after a norm
    ggml_tensor* const v_bias = spec.v_path == VPath::latent ? layer.attn_v_e_bias : layer.attn_v_bias;
    found.v = project(layer.attn_v, h_.block.value_norm ? nullptr : v_bias, shape.n_kv);
    return found;
}

Heads Projections::heads(ggml_tensor* x, int il) const {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = model_.cache_spec().layers[static_cast<size_t>(il)];
    if (h_.has_mla()) return mla_heads(x, layer, spec, il);
    const bool raw = raw_keys(spec);
    Heads found =
        layer.attn_qkv != nullptr ? packed(x, layer, h_.heads_of(il)) : apart(x, layer, spec, h_.heads_of(il));
    if (layer.attn_gate != nullptr) found.gate = ggml_mul_mat(ctx_, layer.attn_gate, x);
    if (layer.attn_q_norm_whole != nullptr) {
        found.q = normed_whole(found.q, layer.attn_q_norm_whole, nullptr);
    }
    if (found.k != nullptr && layer.attn_k_norm_whole != nullptr) {
        found.k = normed_whole(found.k, layer.attn_k_norm_whole, raw ? layer.attn_k_e_bias : nullptr);
    }
    if (found.v != nullptr && h_.block.value_norm) {
        found.v = with_bias(ops_.held(ggml_rms_norm(ctx_, found.v, h_.norm_eps)), layer.attn_v_e_bias);
    }
    if (layer.attn_q_norm != nullptr) {
        found.q = head_norm(found.q, layer.attn_q_norm);
    }
    found.q = tempered(found.q);
    found.q = ops_.held(rope(found.q, il));
    if (h_.block.norm_after_rope && layer.attn_k_norm != nullptr) {
        // RoPE leaves the mean square as it is. The weight of the keys' norm multiplies queries, which scores cannot tell apart.
        found.q = ops_.held(ggml_mul(ctx_, ggml_mul(ctx_, found.q, layer.attn_q_norm), layer.attn_k_norm));
    }
    if (found.k != nullptr && !raw) {
        found.k = finished(found.k, il);
    }
    return found;
}

ggml_tensor* Projections::head_norm(ggml_tensor* x, ggml_tensor* weight) const {
    return h_.block.norm_after_rope ? ggml_rms_norm(ctx_, x, h_.norm_eps) : ops_.norm(x, weight, nullptr);
}

ggml_tensor* Projections::with_bias(ggml_tensor* x, ggml_tensor* bias) const {
    return bias == nullptr ? x : ops_.held(ggml_add(ctx_, x, ggml_reshape_2d(ctx_, bias, x->ne[0], x->ne[1])));
}

ggml_tensor* Projections::normed_whole(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const {
    ggml_tensor* const rows = ggml_reshape_2d(ctx_, x, x->ne[0] * x->ne[1], x->ne[2]);
    return ggml_reshape_3d(ctx_, ops_.held(ops_.norm(rows, weight, bias)), x->ne[0], x->ne[1], x->ne[2]);
}

ggml_tensor* Projections::finished(ggml_tensor* k, int il) const {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    if (layer.attn_k_norm != nullptr) {
        k = head_norm(k, layer.attn_k_norm);
    }
    return ops_.held(rope(k, il));
}

BatchRows Projections::full_rows(const Heads& heads, const LayerCacheSpec& spec) const {
    ggml_tensor* const k =
        spec.k_path == KPath::full ? ops_.held(ops_.rotate(heads.k, constants_.hadamard_k)) : heads.k;
    ggml_tensor* const v = spec.v_path == VPath::full ? rotated_values(heads.v, spec) : heads.v;
    const BatchRows rows{ops_.as_rows(k, k->ne[2]), ops_.as_rows(v, v->ne[2])};
    return {spec.key_of_value() ? rows.v : rows.k, rows.v};
}

ggml_tensor* Projections::rotated_values(ggml_tensor* v, const LayerCacheSpec& spec) const {
    ggml_tensor* const rotated = ops_.held(ops_.rotate(v, constants_.hadamard_v));
    if (rotated != v && !spec.key_of_value()) roles_.stored_rotations.push_back(rotated->view_src);
    return rotated;
}

BatchRows Projections::exact_rows(const BatchRows& latents, const Heads& heads, int il) const {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = model_.cache_spec().layers[static_cast<size_t>(il)];
    BatchRows rows = latents;
    if (spec.k.encoded || spec.key_of_value()) {
        ggml_tensor* k = heads.k;
        if (spec.k_path == KPath::rebuild) {
            if (layer.attn_k_bias != nullptr) {
                k = ggml_add(ctx_, k, ggml_reshape_2d(ctx_, layer.attn_k_bias, k->ne[0], k->ne[1]));
            }
            k = finished(k, il);
        } else if (spec.key_of_value()) {
            k = finished(k, il);
        }
        rows.k = ops_.as_rows(k, k->ne[2]);
    }
    if (spec.v.encoded) {
        rows.v = ops_.as_rows(heads.v, heads.v->ne[2]);
    }
    return rows;
}

BatchRows Projections::latent_rows(ggml_tensor* x, const Heads& heads, const LayerWeights& layer,
                                   const LayerCacheSpec& spec) const {
    const auto encoded = [&](ggml_tensor* whole, ggml_tensor* e, ggml_tensor* a, ggml_tensor* bias,
                             const TensorSpec& side) {
        return side.encoded ? encode(whole, e, side) : ops_.held(ops_.linear(x, a, bias));
    };
    ggml_tensor* const k = spec.key_of_value() ? nullptr
                           : spec.k_path == KPath::full
                               ? ops_.held(ops_.rotate(heads.k, constants_.hadamard_k))
                               : encoded(heads.k, layer.attn_k_e, layer.attn_k_a, layer.attn_k_a_bias, spec.k);
    ggml_tensor* const v = spec.v_path == VPath::full ? rotated_values(heads.v, spec)
                           : spec.is_mla()
                               ? heads.v
                               : encoded(heads.v, layer.attn_v_e, layer.attn_v_a, layer.attn_v_a_bias, spec.v);
    // a store node has two sources; of keys that V's rows make it writes nothing
    ggml_tensor* const v_rows = ops_.as_rows(v, x->ne[1]);
    return {k == nullptr ? v_rows : ops_.as_rows(k, x->ne[1]), v_rows};
}

// Multi-head latent attention as attention of one KV head: queries are taken to the cached latent, and what they read of it to values.
Heads Projections::mla_heads(ggml_tensor* x, const LayerWeights& layer, const LayerCacheSpec& spec, int il) const {
    const MlaWeights& w = layer.mla;
    const MlaSizes& sizes = h_.mla;
    const int64_t n_tokens = x->ne[1];
    const Held held = this->held();
    const auto product = [&](ggml_tensor* of, ggml_tensor* weight) { return held(ops_.linear(of, weight, nullptr)); };
    const auto normed = [&](ggml_tensor* of, ggml_tensor* weight) { return held(ops_.norm(of, weight, nullptr)); };
    // channels `first` and on of every vector of `of`, as many as n
    const auto cut = [&](ggml_tensor* of, int64_t n, int64_t first) {
        return ggml_view_3d(ctx_, of, n, of->ne[1], n_tokens, of->nb[1], of->nb[2],
                            static_cast<size_t>(first) * sizeof(float));
    };
    ggml_tensor* const row = ggml_reshape_3d(ctx_, product(x, w.kv_a), sizes.row(), 1, n_tokens);
    ggml_tensor* const k_rot = held(rope(cut(row, sizes.n_rot, sizes.kv_rank), il));
    ggml_tensor* latent = with_bias(normed(cut(row, sizes.kv_rank, 0), w.kv_a_norm), layer.attn_v_e_bias);
    if (spec.v_path == VPath::latent) {  // of all tokens in one product
        latent = product(ggml_reshape_2d(ctx_, latent, sizes.kv_rank, n_tokens), layer.attn_v_e);
        roles_.products.push_back({nullptr, latent, nullptr});
        latent = ggml_reshape_3d(ctx_, latent, latent->ne[0], 1, n_tokens);
    }
    Heads found;
    found.v = held(ggml_concat(ctx_, k_rot, latent, 0));

    ggml_tensor* q = w.q != nullptr ? product(x, w.q) : product(normed(product(x, w.q_a), w.q_a_norm), w.q_b);
    q = ggml_reshape_3d(ctx_, q, sizes.query(), h_.n_head, n_tokens);
    ggml_tensor* const q_rot = held(rope(cut(q, sizes.n_rot, sizes.n_key), il));
    ggml_tensor* const q_key = ggml_permute(ctx_, cut(q, sizes.n_key, 0), 0, 2, 1, 3);  // [n_key, n_tokens, n_head]
    ggml_tensor* const absorbed = held(swapped(ctx_, held(ggml_mul_mat(ctx_, w.k_b, q_key))));
    found.q = tempered(held(ggml_concat(ctx_, q_rot, absorbed, 0)));
    return found;
}

ggml_tensor* Projections::mla_values(ggml_tensor* x, const LayerWeights& layer) const {
    ggml_tensor* const values = ggml_mul_mat(ctx_, layer.mla.v_b, swapped(ctx_, x));  // [n_value, n_tokens, n_head]
    return swapped(ctx_, values);
}

}  // namespace lkv
