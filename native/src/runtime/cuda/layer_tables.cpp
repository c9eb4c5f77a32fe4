#include "runtime/cuda/layer_tables.h"

#include <algorithm>

#include "cache/formats.h"
#include "ops/cuda/pack.h"

namespace lkv::cuda {
namespace {

const SegmentLayout* keep_segments(Layer& layer, const RowLayout& row, int32_t& n) {
    n = 0;
    for (int g = 0; g < row.n_groups; g++) n += row.groups[g].n_segments;
    return layer.keep(std::vector<SegmentLayout>(row.segments, row.segments + n));
}

// 64-channel blocks of the widest group over all regions.
struct Blocks {
    int k;
    int v;
};

RegionArgs region_args(Layer& layer, const RegionView& view, const Blocks& blocks, const int32_t* pos,
                       const uint64_t* seq) {
    const RegionTables tables = region_tables(view.k, view.v, blocks.k, blocks.v);
    return {view.k_rows,
            view.v_rows,
            pos,
            seq,
            layer.keep(tables.k_groups),
            layer.keep(tables.v_groups),
            layer.keep(tables.chunks),
            view.k_page,
            view.v_page,
            static_cast<uint32_t>(view.k.row_bytes),
            static_cast<uint32_t>(view.v.row_bytes),
            in_token_blocks(view.k) ? token_block_slots : 1};
}

void attach_target(Layer& layer, const RegionView& view, bool full, int r) {
    RowTarget& target = layer.targets[r];
    target.full = full ? 1 : 0;
    target.k_rows = const_cast<uint8_t*>(view.k_rows);
    target.v_rows = const_cast<uint8_t*>(view.v_rows);
    target.k_segments = keep_segments(layer, view.k, target.n_k_segments);
    target.v_segments = keep_segments(layer, view.v, target.n_v_segments);
    target.k_page = view.k_page;
    target.v_page = view.v_page;
    target.k_row_bytes = view.k.row_bytes;
    target.v_row_bytes = view.v.row_bytes;
}

// What makes latents of full rows that leave the recent window.
void attach_encoder(Layer& layer, const Model& model, const RowTarget& from, int il) {
    const HeadShape& heads = model.hparams().heads_of(il);
    const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
    const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
    for (const bool value_side : {false, true}) {
        const TensorSpec& tensor = value_side ? spec.v : spec.k;
        const ggml_tensor* const e = value_side ? weights.attn_v_e : weights.attn_k_e;
        EncodeSide& side = layer.encoders[value_side ? 1 : 0];
        side.rows = value_side ? from.v_rows : from.k_rows;
        side.page = value_side ? from.v_page : from.k_page;
        side.row_bytes = value_side ? from.v_row_bytes : from.k_row_bytes;
        side.segments = value_side ? from.v_segments : from.k_segments;
        side.n_segments = value_side ? from.n_v_segments : from.n_k_segments;
        side.n_in = tensor.group * heads.head_dim;
        side.n_out = tensor.rank_sum();
        side.width = heads.width();
        std::vector<int32_t> columns;
        for (size_t g = 0; g < tensor.ranks.size(); g++) {
            columns.insert(columns.end(), static_cast<size_t>(tensor.ranks[g]), static_cast<int32_t>(g) * side.n_in);
        }
        side.column = layer.keep(columns);
        if (e == nullptr) continue;
        if (e->type == GGML_TYPE_F16) {
            side.e = static_cast<const uint16_t*>(e->data);
        } else {
            const std::vector<float> values = to_floats(e);
            side.e = layer.keep(pack_rows(values.data(), values.size()));
        }
    }
}

RopeTables rope_tables(const HParams& h, const Rope& rope) {
    RopeTables tables;
    if (rope.rotates()) {
        tables.phases = DeviceMemory::of(pack_phases(rope.freqs.data(), static_cast<int>(rope.freqs.size())));
        tables.n_rot = 2 * static_cast<int32_t>(rope.freqs.size());
        tables.neox = h.block.rope_pairing == RopePairing::neox;
        tables.mscale = rope.mscale;
    }
    return tables;
}

// B_k, of keys that V's rows make B_v, or E_q where keys are expanded.
void attach_keys(Layer& layer, const Model& model, const LayerCacheSpec& spec, const RopeTables& rope,
                 const Blocks& blocks, int il) {
    const HeadShape& heads = model.hparams().heads_of(il);
    const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
    Problem& a = layer.latents.constant;
    const std::vector<float>& k_b = spec.key_of_value() ? weights.v_b : weights.k_b;
    a.k_b = layer.keep(pack_rows(k_b.data(), k_b.size()));
    if (spec.k_path != KPath::rebuild && !spec.key_of_value()) return;
    const int rank = spec.key_of_value() ? spec.v.rank_max() : spec.k.rank_max();
    const KeyFactor factor{k_b.data(), heads.n_kv, rank, heads.head_dim, blocks.k, rope.n_rot, rope.neox};
    for (const Kernel* kernel : all_kernels()) {
        if (kernel->pack_keys == nullptr || heads.head_dim > kernel->widest_head) continue;
        const std::vector<uint32_t> packed = kernel->pack_keys(factor);
        if (!packed.empty()) layer.latents.packed[kernel] = layer.keep(packed);
    }
    a.k_bias = weights.k_bias.empty() ? nullptr : layer.keep(weights.k_bias);
    a.k_norm = weights.k_norm.empty() ? nullptr : layer.keep(weights.k_norm);
}

}  // namespace

int most_counters(const HParams& h) {
    int most = 0;
    for (const HeadShape& heads : h.heads) most = std::max(most, merge_counters(heads.n_head, heads.n_kv));
    return most;
}

void LayerTables::attach(const Model& model, const KvCache& cache, const Ropes& ropes, const GraphConstants& constants,
                         const LayerRun& run, const StepInputs& inputs) {
    attach_shared(model, ropes, constants);
    run_ = run;
    layers_.resize(static_cast<size_t>(model.hparams().n_layer));
    size_t slots = 0;  // of the exact windows
    for (int r = 0; r + 1 < cache.placement().n_regions(); r++)
        slots += static_cast<size_t>(cache.placement().cells(r).capacity());
    for (const HeadShape& heads : model.hparams().heads) {
        whole_bytes_ = std::max(whole_bytes_, static_cast<size_t>(heads.width()) * sizeof(uint16_t));
    }
    const auto& specs = model.cache_spec().layers;
    if (std::any_of(specs.begin(), specs.end(), [](const LayerCacheSpec& spec) { return spec.exact_keys_are_raw(); })) {
        finished_ = DeviceMemory(slots * whole_bytes_);
    }
    for (int il = run.first_layer; il < run.end_layer; il++) {
        const auto index = static_cast<size_t>(il);
        if (!specs[index].has_rows()) continue;
        attach_layer(model, cache, specs[index], ropes_[ropes.of_layer[index]], inputs, il, il);
    }
}

void LayerTables::attach_alone(const Model& model, const KvCache& cache, const LayerCacheSpec& spec, int layer,
                               const Ropes& ropes, const GraphConstants& constants, const StepInputs& inputs) {
    attach_shared(model, ropes, constants);
    layers_.resize(1);
    attach_layer(model, cache, spec, ropes_[ropes.of_layer[static_cast<size_t>(layer)]], inputs, layer, 0);
}

void LayerTables::attach_shared(const Model& model, const Ropes& ropes, const GraphConstants& constants) {
    const HParams& h = model.hparams();
    if (!constants.alibi_slopes.empty()) slopes_ = DeviceMemory::of(constants.alibi_slopes);
    rope_factors_.assign(constants.rope_factors.begin(), constants.rope_factors.end());
    for (const Rope& rope : ropes.tables) ropes_.push_back(rope_tables(h, rope));
    done_ = DeviceMemory::of(std::vector<uint32_t>(static_cast<size_t>(most_counters(h)), 0));
}

void LayerTables::attach_layer(const Model& model, const KvCache& cache, const LayerCacheSpec& spec,
                               const RopeTables& rope, const StepInputs& inputs, int il, int row_layer) {
    const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
    Layer& layer = (*this)[row_layer];
    layer.splits = cache.rows().is_full(0, row_layer);
    layer.in_ring = cache.placement().in_ring(row_layer);
    layer.cells = inputs.cells_of(row_layer);
    layer.in_token_blocks = in_token_blocks(cache.rows().k_layout(cache.placement().middle(), row_layer));
    LatentAttnParams p{};
    int first = 0;  // region of the latents
    for (int r = 0; r < cache.placement().n_regions(); r++) {
        const RegionView view = cache.view(r, row_layer);
        RegionView stored =
            view;  // keys that V's rows make are not, and what values are read from may be less than a row
        stored.k = cache.rows().k_layout(r, row_layer);
        stored.v = cache.rows().v_layout(r, row_layer);
        attach_target(layer, stored, cache.rows().is_full(r, row_layer), r);
        if (cache.rows().is_full(r, row_layer)) {
            first = r + 1;
        } else {
            p.regions[p.n_regions++] = view;
        }
    }
    const Blocks blocks{side_blocks(p, &RegionView::k), side_blocks(p, &RegionView::v)};
    for (int r = 0; r < p.n_regions; r++) {
        layer.latents.regions[r] = region_args(layer, p.regions[r], blocks, inputs.pos(first + r, layer.cells),
                                               inputs.seq(first + r, layer.cells));
    }
    const RegionView entered = cache.view(cache.entered_region(), row_layer);
    layer.fitted = has_format(entered.k, format_is_fitted) || has_format(entered.v, format_is_fitted);
    Problem& a = layer.latents.constant;
    if ((!weights.k_b.empty() && spec.k_path != KPath::full) || spec.rebuilds_key_of_value()) {
        attach_keys(layer, model, spec, rope, blocks, il);
        a.phases = rope.phases.as<uint64_t>();
    }
    if (!weights.v_b.empty() && spec.v_path == VPath::latent)
        a.v_b = layer.keep(pack_rows(weights.v_b.data(), weights.v_b.size()));
    layer.middle_alone = first > 0;
    a.n_slots = layer.middle_alone ? inputs.n_middle(layer.cells) : inputs.n_slots(layer.cells);
    if (!weights.sinks.empty()) layer.sinks.logits = layer.keep(weights.sinks);
    if (!weights.sink_values.empty()) layer.sinks.values = layer.keep(weights.sink_values);
    const HeadShape& heads = model.hparams().heads_of(il);
    layer.whole = RowPlan::uniform(heads.n_kv, heads.head_dim, Format::f16);
    const RegionArgs whole = whole_region(heads.n_kv, heads.head_dim,
                                          [&layer]<class T>(const std::vector<T>& host) { return layer.keep(host); });
    attach_common(a, whole, inputs);
    if (layer.splits) attach_full(model, cache, rope, inputs, il);
}

const RopeTables* LayerTables::rope_of(const ggml_tensor* factors) const {
    const auto found = std::find(rope_factors_.begin(), rope_factors_.end(), factors);
    return factors == nullptr || found == rope_factors_.end()
               ? nullptr
               : &ropes_[static_cast<size_t>(found - rope_factors_.begin())];
}

void LayerTables::attach_common(Problem& a, const RegionArgs& whole, const StepInputs& inputs) const {
    a.whole = whole;
    a.alibi_slopes = slopes_.as<float>();
    a.q_pos = inputs.q_pos();
    a.q_seq = inputs.q_seq();
}

void LayerTables::attach_full(const Model& model, const KvCache& cache, const RopeTables& rope,
                              const StepInputs& inputs, int il) {
    const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
    Layer& layer = (*this)[il];
    Problem& a = layer.full.constant;
    attach_common(a, layer.latents.constant.whole, inputs);
    a.n_slots = inputs.n_full();
    a.phases = rope.phases.as<uint64_t>();
    a.k_bias = weights.k_bias.empty() ? nullptr : layer.keep(weights.k_bias);
    a.k_norm = weights.k_norm.empty() ? nullptr : layer.keep(weights.k_norm);
    const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
    layer.full_rows.raw = spec.exact_keys_are_raw();
    const int whole = (model.hparams().heads_of(il).head_dim + 63) / 64;
    uint8_t* to = finished_.as<uint8_t>();
    int r = 0;
    for (; cache.rows().is_full(r, il); r++) {
        RegionView view = cache.view(r, il);
        const RowTarget& target = layer.targets[r];
        if (layer.full_rows.raw) {
            layer.full_rows.regions[r] = {view.k_rows,
                                          view.k_page,
                                          view.k.row_bytes,
                                          spec.key_of_value() ? target.v_segments : target.k_segments,
                                          inputs.pos(r, 0),
                                          to,
                                          cache.placement().cells(r).capacity()};
            view.k = layer.whole.view();
            view.k_rows = to;
            view.k_page = bytes_of_page(view.k.row_bytes);
            to += static_cast<size_t>(cache.placement().cells(r).capacity()) * static_cast<size_t>(view.k.row_bytes);
        }
        layer.full.regions[r] = region_args(layer, view, {whole, whole}, inputs.pos(r, 0), inputs.seq(r, 0));
    }
    layer.full.regions[r] = a.whole;
    layer.full.regions[r].pos = inputs.q_pos();
    layer.full.regions[r].seq = inputs.own_seq();
    attach_encoder(layer, model, layer.targets[cache.entered_region()], il);
}

void LayerTables::describe_full(const Layer& layer, LatentAttnParams& p, bool with_own) const {
    if (layer.full_rows.raw) {
        for (int r = 0; r < p.n_regions; r++) p.regions[r].k = layer.whole.view();
        p.k_raw = false;
    }
    if (with_own) {
        RegionView& own = p.regions[p.n_regions++];
        own = {};
        own.k = own.v = layer.whole.view();
    }
}

void LayerTables::hold_own(int n_tokens) {
    for (DeviceMemory& memory : own_) {
        const size_t bytes = static_cast<size_t>(n_tokens) * whole_bytes_;
        if (bytes > memory.bytes()) memory = DeviceMemory(bytes);
    }
}

}  // namespace lkv::cuda
