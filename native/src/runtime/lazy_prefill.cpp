#include "runtime/lazy_prefill.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "runtime/session.h"

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
    const RowLayout& layout = cache.k_layout(cache.n_regions() - 1, layer);
    return in_blocks(layout) ? n_tokens * static_cast<size_t>(layout.width) * sizeof(float) : 0;
}

}  // namespace

std::string lazy_obstacle(const Model& model) {
    const HParams& h = model.hparams();
    for (int il = 0; il < h.n_layer; il++) {
        const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
        const bool projected = spec.k_path == KPath::rebuild || spec.k_path == KPath::absorbed;
        for (const bool value_side : {false, true}) {
            const TensorSpec& tensor = value_side ? spec.v : spec.k;
            if ((value_side ? spec.v_path == VPath::latent : projected) && !tensor.encoded &&
                is_cut(tensor, h.head_dim)) {
                return concat("layer ", il, " has ", tensor.rank_sum(), " of ", h.width_kv(), " dimensions of ",
                              value_side ? 'V' : 'K', " and its exact values are not in the file");
            }
        }
    }
    return {};
}

LayerCacheSpec exact_layer_spec(const Model& model, int layer) {
    const HParams& h = model.hparams();
    LayerCacheSpec spec = model.cache_spec().layers[static_cast<size_t>(layer)];
    if (spec.k.encoded) {
        spec.k_path = KPath::full;
        spec.k = TensorSpec::full(h.n_kv, h.head_dim);
    }
    if (spec.v.encoded) {
        spec.v_path = VPath::full;
        spec.v = TensorSpec::full(h.n_kv, h.head_dim);
    }
    spec.keeps_exact = true;  // its window is not looked at, see exact_cache()
    spec.k = uncut(std::move(spec.k));
    spec.v = uncut(std::move(spec.v));
    return spec;
}

KvCache exact_cache(const Model& model, const LayerCacheSpec& spec, int n_tokens, bool allocate) {
    HParams one_layer = model.hparams();
    one_layer.n_layer = 1;
    one_layer.block.layers.clear();  // the prompt's rows are all here, whatever window the layer has
    CacheSpec file;
    file.layers = {spec};
    KvCacheOptions options;
    options.n_ctx = n_tokens;
    options.n_seq_max = max_sequences;
    options.k_format = options.v_format = Format::f32;
    return KvCache(one_layer, file, options, allocate);
}

size_t lazy_prefill_bytes(const Model& model, const KvCache& cache) {
    const int n_tokens = cache.options().n_ctx;
    size_t rows = 0;
    for (int il = 0; il < model.hparams().n_layer; il++) {
        const size_t exact = exact_cache(model, exact_layer_spec(model, il), n_tokens, false).bytes().total();
        rows = std::max(rows, exact + staged_bytes(cache, il, static_cast<size_t>(n_tokens)));
    }
    return rows + hidden_bytes(model, static_cast<size_t>(n_tokens));
}

std::vector<float> stage_k_rows(const KvCache& cache, int layer, size_t n_tokens) {
    return std::vector<float>(staged_bytes(cache, layer, n_tokens) / sizeof(float));
}

void write_staged_blocks(KvCache& cache, int layer, std::span<const SlotRef> targets, std::span<const float> staged) {
    const int middle = cache.n_regions() - 1;
    const RowLayout& layout = cache.k_layout(middle, layer);
    const auto width = static_cast<size_t>(layout.width);
    std::unordered_map<int, std::vector<size_t>> blocks;  // first slot -> its tokens, by slot: sequences may interleave
    for (size_t i = 0; i < targets.size() && !staged.empty(); i++) {
        if (targets[i].region == middle) {
            const int at = targets[i].slot % block_slots;
            std::vector<size_t>& tokens = blocks[targets[i].slot - at];
            tokens.resize(block_slots);
            tokens[static_cast<size_t>(at)] = i;
        }
    }
    std::vector<float> rows(block_slots * width);
    for (const auto& [first, tokens] : blocks) {
        for (size_t n = 0; n < tokens.size(); n++) {
            std::copy_n(staged.begin() + static_cast<ptrdiff_t>(tokens[n] * width), width,
                        rows.begin() + static_cast<ptrdiff_t>(n * width));
        }
        write_block(layout, rows.data(), cache.k_row(middle, layer, first));
    }
}

bool Session::starts_sequences(std::span<const int32_t> seq) const {
    uint64_t seen = 0;
    for (const int32_t s : seq) {
        const uint64_t bit = uint64_t{1} << s;
        if ((seen & bit) == 0 && cache_.seq_pos_max(s) >= 0) {
            return false;
        }
        seen |= bit;
    }
    return seen != 0;
}

void Session::prefill_lazily(std::span<const int32_t> tokens, std::span<const int32_t> pos,
                             std::span<const int32_t> seq, std::span<const uint8_t> output, const LogitsRoom& room,
                             const std::function<void()>& between_ubatches) {
    const HParams& h = model_->hparams();
    const auto width = static_cast<size_t>(h.n_embd);
    const auto n_ubatch = static_cast<size_t>(cache_.options().n_ubatch);
    Part& part = parts_.front();  // of all layers
    const std::vector<SlotRef> targets = cache_.claim_settled(pos, seq);
    try {
        std::vector<float> hidden(tokens.size() * width);  // [n_tokens, n_embd] between two layers
        for (int il = 0; il < h.n_layer; il++) {
            ExactRows exact;
            exact.spec = exact_layer_spec(*model_, il);
            KvCache rows = exact_cache(*model_, exact.spec, static_cast<int>(tokens.size()));
            BatchSlots batch;
            const std::vector<SlotRef> slots = rows.claim(pos, seq);
            exact.cache = &rows;
            exact.batch = &batch;
            std::vector<float> staged = stage_k_rows(cache_, il, tokens.size());
            const size_t k_width = staged.size() / tokens.size();
            prefill_bytes_ = std::max(prefill_bytes_, rows.bytes().total() + hidden_bytes(*model_, tokens.size()) +
                                                          staged.size() * sizeof(float));
            part.graph.reset();  // it would read the rows of the layer before
            for (size_t first = 0; first < tokens.size(); first += n_ubatch) {
                const size_t n = std::min(n_ubatch, tokens.size() - first);
                const auto from = static_cast<ptrdiff_t>(first);
                const auto end = static_cast<ptrdiff_t>(first + n);
                batch_.pos.assign(pos.begin() + from, pos.begin() + end);
                batch_.seq.assign(seq.begin() + from, seq.begin() + end);
                batch_.slots.assign(targets.begin() + from, targets.begin() + end);
                batch_.k_staged = staged.empty() ? nullptr : staged.data() + first * k_width;
                batch = batch_;
                batch.slots.assign(slots.begin() + from, slots.begin() + end);
                const std::vector<int32_t> out_ids = wanted(output.subspan(first, n));

                GraphShape shape = graph_shape(n, out_ids.size(), rows);
                shape.first_layer = il;
                shape.end_layer = il + 1;
                prepare_graph(part, shape, &exact);
                float* const states = hidden.data() + first * width;
                if (part.graph->hidden_in != nullptr) {
                    ggml_backend_tensor_set(part.graph->hidden_in, states, 0, n * width * sizeof(float));
                }
                compute(part, tokens.subspan(first, n), pos.subspan(first, n), out_ids, rows, batch);
                if (part.graph->hidden_out != nullptr) {
                    ggml_backend_tensor_get(part.graph->hidden_out, states, 0, n * width * sizeof(float));
                }
                if (part.graph->logits != nullptr) {
                    ggml_backend_tensor_get(part.graph->logits, room(out_ids.size()), 0,
                                            ggml_nbytes(part.graph->logits));
                }
                if (between_ubatches) {
                    between_ubatches();
                }
            }
            part.graph.reset();
            write_staged_blocks(cache_, il, targets, staged);
        }
    } catch (...) {
        // no layer, no token: half a prompt would be a cache that no one can use
        part.graph.reset();
        for (const SlotRef& to : targets) {
            cache_.release(to);
        }
        throw;
    }
}

}  // namespace lkv
