#include "runtime/lazy_prefill.h"

#include <algorithm>

#include "base/error.h"

namespace lkv {
namespace {

bool is_cut(const TensorSpec& spec, int head_dim) {
    return std::any_of(spec.ranks.begin(), spec.ranks.end(), [&](int rank) { return rank != spec.group * head_dim; });
}

TensorSpec uncut(TensorSpec spec) {
    for (size_t g = 0; g < spec.ranks.size(); g++) {
        spec.segments[g] = {spec.ranks[g]};
    }
    spec.formats.reset();
    return spec;
}

size_t hidden_bytes(const Model& model, size_t n_tokens) {
    return n_tokens * static_cast<size_t>(model.hparams().n_embd) * sizeof(float);
}

size_t staged_bytes(const KvCache& cache, int layer, size_t n_tokens) {
    const RowLayout& layout = cache.rows().k_layout(cache.placement().middle(), layer);
    return in_token_blocks(layout) ? n_tokens * static_cast<size_t>(layout.width) * sizeof(float) : 0;
}

}  // namespace

std::string lazy_obstacle(const Model& model) {
    const HParams& h = model.hparams();
    if (h.shares_rows()) return "some layers share K and V";
    if (h.is_recurrent()) return "some layers are recurrent";
    if (h.has_mla()) return "keys and values are one row";
    for (int il = 0; il < h.n_layer; il++) {
        const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
        const bool projected = spec.k_path == KPath::rebuild || spec.k_path == KPath::absorbed;
        for (const bool value_side : {false, true}) {
            const TensorSpec& tensor = value_side ? spec.v : spec.k;
            if ((value_side ? spec.v_path == VPath::latent : projected) && !tensor.encoded &&
                is_cut(tensor, h.heads_of(il).head_dim)) {
                return concat("layer ", il, " has ", tensor.rank_sum(), " of ", h.heads_of(il).width(),
                              " dimensions of ", value_side ? 'V' : 'K', " and its exact values are not in the file");
            }
        }
    }
    return {};
}

LayerCacheSpec exact_layer_spec(const Model& model, int layer) {
    const HeadShape& heads = model.hparams().heads_of(layer);
    LayerCacheSpec spec = model.cache_spec().layers[static_cast<size_t>(layer)];
    if (spec.k.encoded || spec.key_of_value()) {
        spec.k_path = KPath::full;
        spec.k = TensorSpec::full(heads.n_kv, heads.head_dim);
    }
    if (spec.v.encoded) {
        spec.v_path = VPath::full;
        spec.v = TensorSpec::full(heads.n_kv, heads.head_dim);
    }
    spec.k = uncut(std::move(spec.k));
    spec.v = uncut(std::move(spec.v));
    return spec;
}

KvCache exact_cache(const Model& model, const LayerCacheSpec& spec, int layer, int n_tokens, const KvCacheOptions& of,
                    bool allocate, CacheDevice* device) {
    HParams one_layer = model.hparams();
    one_layer.n_layer = 1;
    one_layer.heads = {model.hparams().heads_of(layer)};
    one_layer.block.layers.clear();  // the prompt's rows are all here, whatever window the layer has
    CacheSpec file;
    file.layers = {spec};
    KvCacheOptions options;
    options.n_ctx = n_tokens;
    options.ubatches = of.ubatches;
    options.n_seq_max = max_sequences;
    options.k_format = options.v_format = model.on_gpu() ? Format::f16 : Format::f32;
    options.runs = {{model.runs().front().gpu, 0, 1}};
    return KvCache(one_layer, file, options, allocate, {device});
}

size_t lazy_prefill_bytes(const Model& model, const KvCache& cache) {
    const int n_tokens = cache.options().n_ctx;
    size_t rows = 0;
    for (int il = 0; il < model.hparams().n_layer; il++) {
        const size_t exact =
            exact_cache(model, exact_layer_spec(model, il), il, n_tokens, cache.options(), false).bytes().total();
        rows = std::max(rows, exact + staged_bytes(cache, il, static_cast<size_t>(n_tokens)));
    }
    return rows + hidden_bytes(model, static_cast<size_t>(n_tokens));
}

StagedKeys::StagedKeys(KvCache& cache, int layer, size_t n_tokens, CacheDevice* device)
    : cache_(cache),
      device_(device),
      layer_(layer),
      width_(static_cast<size_t>(cache.rows().k_layout(cache.placement().middle(), layer).width)),
      bytes_(staged_bytes(cache, layer, n_tokens)) {
    if (bytes_ == 0) {
        return;
    }
    if (device != nullptr) {
        rows_ = device->allocate(bytes_);
    } else {
        rows_ = std::make_unique<HostStorage>(bytes_);
    }
}

float* StagedKeys::row(size_t token) const {
    return rows_ == nullptr ? nullptr : reinterpret_cast<float*>(rows_->at(0)) + token * width_;
}

void StagedKeys::write(std::span<const SlotRef> targets) {
    if (rows_ == nullptr) {
        return;
    }
    const int middle = cache_.placement().middle();
    std::vector<RowMove> moves;
    for (size_t i = 0; i < targets.size(); i++) {
        if (targets[i].region == middle) moves.push_back({static_cast<int>(i), targets[i].slot, -1});
    }
    // whole blocks, whose sequences may interleave
    std::sort(moves.begin(), moves.end(), [](const RowMove& a, const RowMove& b) { return a.to < b.to; });
    if (device_ != nullptr) {
        device_->write_token_blocks(cache_, layer_, row(0), moves);
        return;
    }
    std::vector<float> block(token_block_slots * width_);
    for (size_t first = 0; first < moves.size(); first += token_block_slots) {
        for (size_t n = 0; n < token_block_slots; n++) {
            std::copy_n(row(static_cast<size_t>(moves[first + n].from)), width_, &block[n * width_]);
        }
        write_token_block(cache_.rows().k_layout(middle, layer_), block.data(),
                          cache_.rows().k_row(middle, layer_, moves[first].to));
    }
}

bool LazyPrefill::starts(std::span<const int32_t> seq) const {
    uint64_t seen = 0;
    for (const int32_t s : seq) {
        if ((seen & bit(s)) == 0 && cache_.placement().last(s) >= 0) {
            return false;
        }
        seen |= bit(s);
    }
    return seen != 0;
}

void LazyPrefill::run(const Prompt& prompt) {
    const std::vector<SlotRef> targets = cache_.claim({prompt.pos, prompt.seq, true});
    const size_t n_tokens = prompt.tokens.size();
    try {
        // [n_tokens, n_embd] between two layers
        std::vector<float> hidden(n_tokens * static_cast<size_t>(model_.hparams().n_embd));
        for (int il = 0; il < model_.hparams().n_layer; il++) {
            ExactRows exact;
            exact.spec = exact_layer_spec(model_, il);
            KvCache rows = exact_cache(model_, exact.spec, il, static_cast<int>(n_tokens), cache_.options(), true,
                                       runner_.device());
            exact.cache = &rows;
            StagedKeys staged(cache_, il, n_tokens, runner_.device());
            bytes_ = std::max(bytes_, rows.bytes().total() + staged.bytes() + hidden_bytes(model_, n_tokens));
            runner_.begin_layer(il, exact);
            run_layer(il, prompt, targets, exact, staged, hidden);
            runner_.end_layer();
            staged.write(targets);
        }
    } catch (...) {
        // no layer, no token: half a prompt would be a cache that no one can use
        runner_.end_layer();
        cache_.placement().take_back(targets);
        throw;
    }
}

void LazyPrefill::run_layer(int il, const Prompt& prompt, std::span<const SlotRef> targets, ExactRows& exact,
                            const StagedKeys& staged, std::span<float> hidden) {
    const auto longest = static_cast<size_t>(cache_.options().ubatches.longest);
    const auto width = static_cast<size_t>(model_.hparams().n_embd);
    const std::vector<SlotRef> slots = exact.cache->placement().claim({prompt.pos, prompt.seq, false});
    for (size_t first = 0; first < prompt.tokens.size(); first += longest) {
        const size_t n = std::min(longest, prompt.tokens.size() - first);
        const auto cut = [&](const auto& whole) { return std::span(whole).subspan(first, n); };
        const std::vector<int32_t> out_ids = wanted(cut(prompt.output));
        exact.batch.slots.assign(cut(slots).begin(), cut(slots).end());
        const Ubatch ubatch{cut(prompt.tokens), cut(prompt.pos), cut(prompt.seq), out_ids, prompt.result};
        runner_.run_layer(il, ubatch, cut(targets), staged.row(first), exact, hidden.data() + first * width,
                          prompt.room);
        if (prompt.between_ubatches) prompt.between_ubatches();
    }
}

}  // namespace lkv
