#include "runtime/cuda/layer_tables.h"

#include "cache/formats.h"
#include "ops/cuda/shared_plan.h"

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

void attach_region(Layer& layer, const RegionView& view, const Blocks& blocks, const StepInputs& inputs, int r) {
    const RegionTables tables = region_tables(view.k, view.v, blocks.k, blocks.v);
    layer.regions[r] = {view.k_rows,
                        view.v_rows,
                        inputs.pos(r),
                        inputs.seq(r),
                        layer.keep(tables.k_groups),
                        layer.keep(tables.v_groups),
                        layer.keep(tables.chunks),
                        static_cast<uint32_t>(view.k.row_bytes),
                        static_cast<uint32_t>(view.v.row_bytes)};
    RowTarget& target = layer.targets[r];
    target.k_rows = const_cast<uint8_t*>(view.k_rows);
    target.v_rows = const_cast<uint8_t*>(view.v_rows);
    target.k_segments = keep_segments(layer, view.k, target.n_k_segments);
    target.v_segments = keep_segments(layer, view.v, target.n_v_segments);
    target.k_row_bytes = view.k.row_bytes;
    target.v_row_bytes = view.v.row_bytes;
}

// A batch's rows as they come, in f32.
void attach_own(Layer& layer, const LayerCacheSpec& spec, const Blocks& blocks) {
    const auto plan = [](const std::vector<int>& ranks) {
        std::vector<std::vector<SegmentSpec>> groups;
        for (const int rank : ranks) groups.push_back({SegmentSpec{Format::f32, rank}});
        return RowPlan(groups);
    };
    const RowPlan k = plan(spec.k.ranks);
    const RowPlan v = plan(spec.v.ranks);
    const RegionTables tables = region_tables(k.view(), v.view(), blocks.k, blocks.v);
    RegionArgs& own = layer.constant.own;
    own.k_groups = layer.keep(tables.k_groups);
    own.v_groups = layer.keep(tables.v_groups);
    own.chunks = layer.keep(tables.chunks);
}

// B_k, or E_q where keys are expanded.
void attach_keys(Layer& layer, const Model& model, const Rope& rope, const Device& device, const Blocks& blocks,
                 int il) {
    const HParams& h = model.hparams();
    const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
    AttnArgs& a = layer.constant;
    const int rank = spec.k.rank_max();
    const auto pack = [&](const std::vector<int>& dims) {
        return layer.keep(pack_k_b(weights.k_b.data(), h.n_kv, rank, h.head_dim, blocks.k, dims));
    };
    a.k_b_rows = layer.keep(pack_rows(weights.k_b.data(), weights.k_b.size()));
    if (spec.k_path != KPath::rebuild) return;
    a.k_b = pack(dims_in_order(h.head_dim));
    const std::vector<int> by_plane =
        dims_by_plane(h.head_dim, rope.freqs.empty() ? 0 : h.n_rot, h.block.rope_pairing == RopePairing::neox);
    a.k_b_planes = pack(by_plane);
    if (device.specialized && has_specialized_shape(blocks.k, blocks.v)) {
        a.k_b_cores = layer.keep(
            pack_k_b_cores(weights.k_b.data(), h.n_kv, rank, h.head_dim, decode_blocks(blocks.k, blocks.v), by_plane));
    }
    a.k_bias = weights.k_bias.empty() ? nullptr : layer.keep(weights.k_bias);
    a.k_norm = weights.k_norm.empty() ? nullptr : layer.keep(weights.k_norm);
}

}  // namespace

void LayerTables::attach(const Model& model, const KvCache& cache, const Rope& rope, const GraphConstants& constants,
                         const StepInputs& inputs, const Device& device) {
    attach_shared(model, rope, constants, device);
    layers_.resize(static_cast<size_t>(model.hparams().n_layer));
    for (int il = 0; il < size(); il++) attach_layer(model, cache, rope, inputs, device, il);
}

void LayerTables::attach_shared(const Model& model, const Rope& rope, const GraphConstants& constants,
                                const Device& device) {
    const HParams& h = model.hparams();
    if (!constants.alibi_slopes.empty()) slopes_ = DeviceMemory::of(constants.alibi_slopes);
    std::vector<uint64_t> phases;
    if (!rope.freqs.empty()) {
        phases = pack_phases(rope.freqs.data(), static_cast<int>(rope.freqs.size()));
        phases_ = DeviceMemory::of(phases);
        rope_ = {phases_.as<uint64_t>(), h.n_rot, h.block.rope_pairing == RopePairing::neox, rope.mscale};
    }
    if (device.specialized) {
        angles_ = DeviceMemory::of(pack_angles(phases, all_turned_tiles(h.head_dim, phases.empty() ? 0 : h.n_rot)));
        rebuilt_angles_ = DeviceMemory::of(pack_angles(phases, rebuilt_tiles));
    }
    done_ = DeviceMemory::of(std::vector<uint32_t>(static_cast<size_t>(merge_counters(h.n_head, h.n_kv)), 0));
    expanded_ = expanded_region(h.n_kv, h.head_dim, [this]<class T>(const std::vector<T>& host) {
        expanded_tables_.push_back(DeviceMemory::of(host));
        return expanded_tables_.back().template as<T>();
    });
}

void LayerTables::attach_layer(const Model& model, const KvCache& cache, const Rope& rope, const StepInputs& inputs,
                               const Device& device, int il) {
    const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
    Layer& layer = (*this)[il];
    LatentAttnParams p{};
    p.n_regions = cache.n_regions();
    for (int r = 0; r < p.n_regions; r++) p.regions[r] = cache.view(r, il);
    const Blocks blocks{side_blocks(p, &RegionView::k), side_blocks(p, &RegionView::v)};
    for (int r = 0; r < p.n_regions; r++) attach_region(layer, p.regions[r], blocks, inputs, r);
    const RegionView& entered = p.regions[cache.entered_region()];
    layer.fitted = has_format(entered.k, format_is_fitted) || has_format(entered.v, format_is_fitted);
    factors_.insert({weights.attn_k_e, weights.attn_q_e});
    AttnArgs& a = layer.constant;
    if (!weights.k_b.empty()) {
        attach_keys(layer, model, rope, device, blocks, il);
        attach_own(layer, model.cache_spec().layers[static_cast<size_t>(il)], blocks);
        a.phases = phases_.as<uint64_t>();
        a.angles = angles_.as<uint16_t>();
        a.rebuilt_angles = rebuilt_angles_.as<uint16_t>();
    }
    if (!weights.v_b.empty()) a.v_b = layer.keep(pack_rows(weights.v_b.data(), weights.v_b.size()));
    a.expanded = expanded_;
    a.alibi_slopes = slopes_.as<float>();
    a.done = done_.as<uint32_t>();
}

}  // namespace lkv::cuda
