#include "runtime/session.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "base/cores.h"
#include "base/error.h"
#include "base/log.h"
#include "cache/evict/policies.h"
#include "cache/state/reader.h"
#include "cache/state/writer.h"
#include "runtime/lazy_prefill.h"

namespace lkv {
namespace {

constexpr int longest_exact_ubatch = 128;
constexpr int least_evicting_ubatch = 16;

// in_blocks: whether the rows may be of blocks of tokens, which are the middle's K alone.
std::optional<Format> parse_kv(const char* flag, const std::string& name, bool in_blocks) {
    if (name.empty()) {
        return std::nullopt;
    }
    const auto format = parse_format(name);
    if (!format || *format == Format::none) {
        std::string known;
        for (int f = 1; f < n_formats; f++) {
            if (format_in_blocks(static_cast<Format>(f)) && !in_blocks) continue;
            known += known.empty() ? "" : " ";
            known += format_name(static_cast<Format>(f));
        }
        fail(flag, "expected one of ", known, "; got ", quoted(name));
    }
    return format;
}

std::vector<Format> parse_plan(const char* flag, const std::vector<std::string>& names) {
    std::vector<Format> plan;
    plan.reserve(names.size());
    for (const std::string& name : names) {
        const auto format = parse_format(name);
        if (!format) {
            fail(flag, "expected known row formats (docs/gguf.md); got ", quoted(name));
        }
        plan.push_back(*format);
    }
    return plan;
}

int check_range(const char* flag, int value, int low, int high) {
    if (value < low || value > high) {
        fail(flag, "expected a value from ", low, " to ", high, "; got ", value);
    }
    return value;
}

bool evicts(const SessionOptions& options) { return !options.evict.empty() && options.evict != "none"; }

// Tokens that each layer keeps of a sequence; those of a ubatch come into as many of their slots as a quarter at most.
EvictOptions parse_evict(const SessionOptions& options, const KvCacheOptions& cache) {
    if (!evicts(options)) {
        if (!options.keep_tokens.empty()) {
            fail("keep_tokens", "expected a policy beside it, --evict h2o; got none");
        }
        return {};
    }
    EvictOptions evict;
    evict.policy = find_policy(options.evict);
    if (evict.policy == nullptr) {
        std::string known;
        for (const EvictPolicy* policy : evict_policies) known += std::string(policy->name) + " ";
        fail("evict", "expected one of ", known, "none; got ", quoted(options.evict));
    }
    const std::string& text = options.keep_tokens;
    const bool share = !text.empty() && text.back() == '%';
    double number = 0;
    const char* const end = text.data() + text.size() - (share ? 1 : 0);
    const auto [parsed, error] = std::from_chars(text.data(), end, number);
    const bool whole = share ? number <= 100.0 : number <= 1 << 28 && number == std::floor(number);
    if (text.empty() || error != std::errc() || parsed != end || !(number > 0.0) || !whole) {
        fail("keep_tokens", "expected a number of tokens, or a share of the context up to 100%, beside --evict ",
             options.evict, "; got ", text.empty() ? "none" : quoted(text));
    }
    evict.keep = static_cast<int>(share ? std::ceil(number / 100.0 * cache.n_ctx / cache.n_seq_max) : number);
    return evict;
}

int thread_count(const char* flag, int wanted) {
    return wanted == 0 ? usable_cores() : check_range(flag, wanted, 1, 512);
}

// A row's stored formats for which `holds` does.
template <typename Holds>
bool any_format(const RowLayout& row, Holds holds) {
    for (int g = 0; g < row.n_groups; g++) {
        for (int s = 0; s < row.groups[g].n_segments; s++) {
            if (holds(static_cast<Format>(row.segments[row.groups[g].first_segment + s].format))) {
                return true;
            }
        }
    }
    return false;
}

// Whether `full` rows of this side are stored rotated: they are quantized, and no scale belongs to a channel alone. There a
// rotation would hand every channel the spread of the widest ones.
bool rotates_full(const Model& model, const KvCache& cache, bool value_side) {
    bool quantized = false;
    for (int il = 0; il < model.hparams().n_layer; il++) {
        const LayerCacheSpec& spec = model.cache_spec().layers[static_cast<size_t>(il)];
        const bool full = value_side ? spec.v_path == VPath::full : spec.k_path == KPath::full;
        for (int r = 0; full && r < cache.placement().n_regions(); r++) {
            const RowLayout& row = value_side ? cache.rows().v_layout(r, il) : cache.rows().k_layout(r, il);
            if (in_blocks(row)) {
                return false;
            }
            quantized = quantized || any_format(row, format_is_quantized);
        }
    }
    return quantized;
}

// What a state lost on its way here. Who takes finer rows alone says so himself.
std::string told(std::string lost, Accept accept) {
    if (accept == Accept::any && !lost.empty()) {
        log(LogLevel::warning, "[state] expected the rows of this session; got others, coded anew: ", lost);
    }
    return lost;
}

// Errors: Error where no session can run so, before anything of one is allocated.
std::shared_ptr<const Model> runnable(std::shared_ptr<const Model> model, const SessionOptions& options) {
    if (model->describe_only()) {
        fail("session", "expected a model to run; got one opened with describe_only");
    }
    if (options.require_fused) {
        const char* const where = model->gpu_asked() ? "the GPU" : "the CPU";
        if (!options.fused) {
            fail("require_fused", "expected fused attention on ", where,
                 "; got stock ggml operations; leave out --implementation reference");
        }
        if (model->gpu_asked() && !model->on_gpu()) {
            fail("require_fused", "expected fused attention on the GPU, as -ngl / n_gpu_layers asks; got the CPU (",
                 model->gpu_absent(), "); use -ngl 0");
        }
    }
    model->warn_if_gpu_absent();
    return model;
}

}  // namespace

// Whether tokens of a long ubatch may attend to each other's rows before these are stored: on a GPU, where exact rows are full ones.
bool sees_own_rows(const Model& model, const KvCacheOptions& cache) {
    return model.n_host_layers() == 0 && cache.recent <= longest_exact_ubatch && cache.recent_ratio == 0 &&
           std::all_of(model.cache_spec().layers.begin(), model.cache_spec().layers.end(),
                       [](const LayerCacheSpec& layer) { return layer.exact_is_full(); });
}

KvCacheOptions cache_options(const Model& model, const SessionOptions& options) {
    const CacheSpec& spec = model.cache_spec();
    KvCacheOptions cache;
    cache.n_ctx = options.n_ctx == 0 ? model.hparams().n_ctx_train : check_range("n_ctx", options.n_ctx, 1, 1 << 28);
    cache.n_ubatch = std::min(check_range("n_ubatch", options.n_ubatch, 1, 1 << 16), cache.n_ctx);
    cache.n_seq_max = check_range("n_seq_max", options.n_seq_max, 1, max_sequences);
    cache.runs = model.runs();
    cache.sink = options.sink < 0 ? spec.sink : check_range("sink", options.sink, 0, 1 << 16);
    if (!(options.recent_ratio <= 1.0)) {
        fail("recent_ratio", "expected a ratio from 0 to 1; got ", options.recent_ratio);
    }
    const bool own_window = options.recent >= 0 || options.recent_ratio >= 0;
    cache.recent =
        options.recent < 0 ? (own_window ? 0 : spec.recent) : check_range("recent", options.recent, 0, 1 << 20);
    cache.recent_ratio = own_window ? std::max(0.0, options.recent_ratio) : static_cast<double>(spec.recent_ratio);
    const auto sink = parse_kv("kv_sink", options.kv_sink, false);
    const auto recent = parse_kv("kv_recent", options.kv_recent, false);
    cache.sink_format = {sink.value_or(spec.sink_format), sink.has_value()};
    cache.recent_format = {recent.value_or(spec.recent_format), recent.has_value()};
    if (cache.keeps_recent()) {
        // a ubatch enters the recent region whole before the rest is demoted: 512 exact tokens more would cost 1.6 % of an
        // f16 cache at 32K, half the budget that an exact window is for
        cache.exact_ubatch = std::min(cache.n_ubatch, longest_exact_ubatch);
        if (!sees_own_rows(model, cache) || evicts(options)) cache.n_ubatch = cache.exact_ubatch;
    }
    cache.evict = parse_evict(options, cache);
    if (cache.evict.policy != nullptr) {
        cache.n_ubatch = std::min(cache.n_ubatch, std::max(least_evicting_ubatch, cache.evict_budget() / 4));
        cache.exact_ubatch = std::min(cache.exact_ubatch, cache.n_ubatch);
    }
    const auto chosen = parse_kv("kv", options.kv, true);
    const auto k_chosen = parse_kv("kv_k", options.kv_k, true);
    const auto v_chosen = parse_kv("kv_v", options.kv_v, false);
    cache.k_format = k_chosen ? k_chosen : chosen;
    cache.v_format = v_chosen ? v_chosen : chosen;
    cache.k_plan = parse_plan("k_plan", options.k_plan);
    cache.v_plan = parse_plan("v_plan", options.v_plan);
    return cache;
}

Prefill prefill_option(const Model& model, const SessionOptions& options) {
    Prefill prefill = model.cache_spec().prefill;
    if (!options.prefill.empty()) {
        const auto word = schema::parse<Prefill>(schema::prefill_words, options.prefill);
        if (!word) {
            fail("prefill", "expected eager or lazy; got ", quoted(options.prefill));
        }
        prefill = *word;
    }
    if (prefill == Prefill::lazy) {
        if (evicts(options) && !options.prefill.empty()) {
            fail("prefill", "expected eager beside --evict ", options.evict, ", as a prompt is cut while it comes; ",
                 "got lazy");
        }
        if (!model.on_one_device() && !options.prefill.empty()) {
            fail("prefill", "expected all layers on one device for lazy; got ", runs_text(model.runs()),
                 "; use -ngl 0, or 99 with --split-mode none, or --prefill eager");
        }
        if (const std::string obstacle = lazy_obstacle(model); !obstacle.empty()) {
            fail("prefill", "expected eager, as ", obstacle, "; got lazy");
        }
    }
    return prefill;
}

// A file that asks for it is prefilled eagerly under eviction, and where layers are on several devices.
static bool prefills_lazily(const Model& model, const SessionOptions& options) {
    return prefill_option(model, options) == Prefill::lazy && !evicts(options) && model.on_one_device();
}

size_t forecast_prefill_bytes(const Model& model, const SessionOptions& options) {
    if (!prefills_lazily(model, options)) {
        return 0;
    }
    return lazy_prefill_bytes(model,
                              KvCache(model.hparams(), model.cache_spec(), cache_options(model, options), false));
}

std::vector<size_t> forecast_compute_bytes(const Model& model, const SessionOptions& options) {
    const KvCacheOptions kv = cache_options(model, options);
    KvCache cache(model.hparams(), model.cache_spec(), kv, false);
    const Ropes ropes = read_ropes(model.file(), model.hparams(), kv.n_ctx);
    const GraphConstants constants =
        make_graph_constants(model.hparams(), ropes, rotates_full(model, cache, false),
                             rotates_full(model, cache, true), ggml_backend_cpu_buffer_type());
    const BatchSlots batch;
    const auto reserve = [&](const GraphShape& shape, const ExactRows* exact = nullptr) {
        const std::unique_ptr<Graph> graph = build_graph(model, cache, ropes, constants, batch, shape, exact);
        const ggml_gallocr_ptr allocator(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
        size_t bytes = 0;
        ggml_gallocr_reserve_n_size(allocator.get(), graph->nodes, nullptr, nullptr, &bytes);
        return bytes;
    };
    GraphShape shape;
    shape.n_tokens = kv.n_ubatch;
    shape.n_threads = thread_count("n_threads_batch", options.n_threads_batch);
    std::vector<size_t> most;
    for (const LayerRun& run : model.runs()) {
        shape.on_gpu = run.on_gpu();
        shape.first_layer = run.first_layer;
        shape.end_layer = run.end_layer;
        shape.n_tokens = kv.n_ubatch;
        most.push_back(reserve(shape));
        if (!run.on_gpu()) continue;
        // K, V and Q of every layer keep their memory in a small batch: more than a ubatch's graph where ubatches are short
        shape.n_tokens = std::min(small_batch, shape.n_tokens);
        most.back() = std::max(most.back(), reserve(shape));
    }
    shape.n_tokens = kv.n_ubatch;
    for (int il = 0; prefills_lazily(model, options) && il < model.hparams().n_layer; il++) {
        shape.first_layer = il;
        shape.end_layer = il + 1;
        ExactRows exact;
        exact.spec = exact_layer_spec(model, il);
        KvCache rows = exact_cache(model, exact.spec, kv.n_ctx, kv, false);
        exact.cache = &rows;
        exact.batch = batch;
        most.front() = std::max(most.front(), reserve(shape, &exact));
    }
    return most;
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options)
    : model_(runnable(std::move(model), options)),
      fused_(options.fused),
      prefill_(prefill_option(*model_, options)),
      n_threads_(thread_count("n_threads", options.n_threads)),
      n_threads_batch_(options.n_threads_batch == 0 ? n_threads_
                                                    : thread_count("n_threads_batch", options.n_threads_batch)),
      parts_(open_parts(model_->runs())),
      cache_(model_->hparams(), model_->cache_spec(), cache_options(*model_, options), true, devices_of(parts_)),
      ropes_(read_ropes(model_->file(), model_->hparams(), cache_.options().n_ctx)) {
    if (!fused_ && model_->on_gpu()) {
        fail("implementation", "expected fused on a GPU; got reference; use -ngl 0");
    }
    attach_parts(options.kv_rotate);
    const CacheSpec& spec = model_->cache_spec();
    const int n_ctx = cache_.options().n_ctx;
    // sequences of one cache share its context
    if (spec.fitted_context > 0 && n_ctx / cache_.options().n_seq_max > spec.fitted_context) {
        log(LogLevel::warning, "[context] expected at most ", spec.fitted_context,
            " positions, the context this file's K basis was fitted for; got n_ctx ", n_ctx);
    }
    KvCacheOptions fitted;
    fitted.sink = spec.sink;
    fitted.recent = spec.recent;
    fitted.recent_ratio = static_cast<double>(spec.recent_ratio);
    if (cache_.options().window(n_ctx) < fitted.window(n_ctx)) {
        log(LogLevel::warning, "[recent] expected at least ", fitted.window(n_ctx),
            " recent tokens, the window this file's plan was fitted for; got ", cache_.options().window(n_ctx));
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(std::max(n_threads_, n_threads_batch_));
    threadpool_.reset(ggml_threadpool_new(&params));
    backend_.reset(ggml_backend_cpu_init());
    if (threadpool_ == nullptr || backend_ == nullptr) {
        fail("threads", "expected a pool of ", params.n_threads, " threads; got none from the system");
    }
    ggml_backend_cpu_set_threadpool(backend_.get(), threadpool_.get());
    ggml_backend_cpu_set_n_threads(backend_.get(), n_threads_);  // a state may need latents before any graph has run
    if (!parts_.front().on_gpu()) {
        encoder_.emplace(*model_, backend_.get());
        cache_.rows().set_encoder(&*encoder_);
    }
    if (!model_->on_one_device() && prefill_ == Prefill::lazy) {
        log(LogLevel::warning, "[prefill] expected all layers on one device for lazy, by the file; got ",
            runs_text(model_->runs()),
            ": prompts are compressed as they come; use -ngl 0, or 99 with --split-mode none");
        prefill_ = Prefill::eager;
    }

    if (cache_.placement().eviction() != nullptr && prefill_ == Prefill::lazy) {
        log(LogLevel::warning, "[prefill] expected eager beside --evict ", options.evict,
            ", as a prompt is cut while it comes; got lazy, by the file: prompts are compressed as they come");
        prefill_ = Prefill::eager;
    }

    const KvBytes bytes = cache_.bytes();
    log(LogLevel::info, "kv: ", n_ctx, " cells, K ", bytes.k >> 10, " KiB, V ", bytes.v >> 10, " KiB, ",
        static_cast<int>(100.0 * bytes.per_token / bytes.f16_per_token + 0.5), " % of f16 per token, rotated rows: K ",
        (rotated() & 1U) != 0 ? "yes" : "no", ", V ", (rotated() & 2U) != 0 ? "yes" : "no");
    log(LogLevel::info, "latent_attn: ", implementation());
}

void Session::attach_parts(bool kv_rotate) {
    const bool rotate_k = kv_rotate && rotates_full(*model_, cache_, false);
    const bool rotate_v = kv_rotate && rotates_full(*model_, cache_, true);
    for (Part& part : parts_) {
        ggml_backend_buffer_type_t const where = model_->memory(part.run);
        part.constants = make_graph_constants(model_->hparams(), ropes_, rotate_k, rotate_v, where);
        part.allocator.reset(ggml_gallocr_new(where));
        if (part.on_gpu()) part.gpu->attach(*model_, cache_, ropes_, part.constants, part.run);
    }
}

std::string Session::implementation() const {
    if (model_->on_gpu()) {
        const std::string fused = "fused cuda, " + parts_.back().gpu->name();
        return model_->on_one_device() ? fused : fused + "; " + runs_text(model_->runs());
    }
    if (!fused_) return "reference, stock ggml ops (fused cpu: not asked for)";
    return model_->gpu_asked() ? "fused cpu (cuda: " + model_->gpu_absent() + ")" : "fused cpu";
}

void Session::check_batch(std::span<const int32_t> tokens, std::span<const int32_t> pos,
                          std::span<const int32_t> seq) const {
    const HParams& h = model_->hparams();
    std::vector<int32_t> last(static_cast<size_t>(cache_.options().n_seq_max), -2);  // -2: not looked up yet
    for (size_t i = 0; i < tokens.size(); i++) {
        if (tokens[i] < 0 || tokens[i] >= h.n_vocab) {
            fail("decode", "expected tokens from 0 to ", h.n_vocab - 1, "; got ", tokens[i]);
        }
        cache_.placement().check_seq(seq[i]);
        int32_t& previous = last[static_cast<size_t>(seq[i])];
        if (previous == -2) {
            previous = cache_.placement().last(seq[i]);
        }
        if (pos[i] <= previous) {
            fail("decode", "expected a position above ", previous, ", the last of sequence ", seq[i], "; got ", pos[i]);
        }
        if (h.block.position == Position::learned && pos[i] >= h.n_ctx_train) {
            fail("context", "expected positions below ", h.n_ctx_train, ", the learned ones; got ", pos[i]);
        }
        previous = pos[i];
    }
    cache_.placement().check_room(tokens.size());
}

void Session::decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                     std::span<const uint8_t> output, float* logits, const std::function<void()>& between_ubatches) {
    const auto room = [&logits, width = static_cast<size_t>(model_->hparams().n_vocab)](size_t n) {
        return std::exchange(logits, logits + n * width);
    };
    decode(tokens, pos, seq, output, room, between_ubatches);
}

void Session::decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                     std::span<const uint8_t> output, const LogitsRoom& room,
                     const std::function<void()>& between_ubatches, int n_ahead) {
    check_batch(tokens, pos, seq);
    const int n_sure = static_cast<int>(tokens.size()) - n_ahead;
    if (n_ahead < 0 || n_sure < 0) {
        fail("decode", "expected 0 to ", tokens.size(), " guesses among as many tokens; got ", n_ahead);
    }
    if (n_ahead > 0 && cache_.placement().eviction() != nullptr) {
        fail("decode", "expected no guesses under eviction, as they count in what goes; got ", n_ahead,
             "; leave out the draft model or --evict");
    }
    if (n_ahead > 0 && std::any_of(seq.begin(), seq.end(), [&](int32_t s) { return s != seq.front(); })) {
        fail("decode", "expected guesses of one sequence alone; got several sequences");
    }
    if (prefill_ == Prefill::lazy && starts_sequences(seq)) {
        prefill_lazily({tokens, pos, seq, output, room, between_ubatches});
        return;
    }
    for (size_t first = 0, n = 0; first < tokens.size(); first += n) {
        n = next_ubatch(seq.subspan(first));
        const std::vector<int32_t> out_ids = wanted(output.subspan(first, n));
        run_ubatch(tokens.subspan(first, n), pos.subspan(first, n), seq.subspan(first, n), out_ids,
                   room(out_ids.size()));
        cache_.demote(std::max(0, static_cast<int>(first + n) - n_sure));
        if (between_ubatches) {
            between_ubatches();
        }
    }
}

// Tokens of the next ubatch. Longer ones than the recent region takes are of one sequence, whose latest tokens it has room for.
size_t Session::next_ubatch(std::span<const int32_t> seq) const {
    const KvCacheOptions& options = cache_.options();
    const auto of = [&](int limit) { return std::min(static_cast<size_t>(limit), seq.size()); };
    const size_t n = of(options.n_ubatch);
    if (!options.keeps_recent() || n <= static_cast<size_t>(options.exact_ubatch)) return n;
    const bool settles =
        fused_ && cache_.placement().cells(cache_.placement().middle()).block() == 1 &&
        std::all_of(seq.begin(), seq.begin() + static_cast<ptrdiff_t>(n), [&](int32_t s) { return s == seq.front(); });
    return settles ? n : of(options.exact_ubatch);
}

std::vector<int32_t> Session::wanted(std::span<const uint8_t> output) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < output.size(); i++) {
        if (output[i] != 0) {
            ids.push_back(static_cast<int32_t>(i));
        }
    }
    return ids;
}

GraphShape Session::graph_shape(size_t n_tokens, size_t n_outputs, const KvCache& rows) const {
    GraphShape shape;
    shape.n_tokens = static_cast<int>(n_tokens);
    shape.n_outputs = static_cast<int>(n_outputs);
    shape.n_threads = shape.n_tokens == 1 ? n_threads_ : n_threads_batch_;
    shape.fused = fused_;
    const int middle = rows.placement().middle();
    for (int r = 0; !fused_ && r <= middle; r++) {
        shape.n_slots += rows.placement().cells(r).end();
        if (rows.placement().ring() != nullptr)
            shape.n_ring_slots += (r < middle ? rows.placement().cells(r) : rows.placement().ring()->cells()).end();
        if (r < middle) shape.n_exact += rows.placement().cells(r).end();
    }
    for (int il = 0; !fused_ && rows.placement().eviction() != nullptr && il < model_->hparams().n_layer; il++) {
        if (rows.placement().evicts(il)) {
            shape.n_evicting_slots =
                std::max(shape.n_evicting_slots, shape.n_exact + rows.placement().cells(middle, il).end());
        }
    }
    const bool exact = std::any_of(batch_.slots.begin(), batch_.slots.end(),
                                   [middle](const SlotRef& to) { return to.region < middle; });
    shape.to_middle = !exact || std::any_of(batch_.slots.begin(), batch_.slots.end(),
                                            [middle](const SlotRef& to) { return to.region == middle; });
    shape.latents = rows.placement().cells(middle).end() > 0;
    shape.ring = rows.placement().ring() != nullptr && rows.placement().ring()->cells().end() > 0;
    return shape;
}

void Session::prepare_graph(Part& part, const GraphShape& shape, const ExactRows* exact) {
    if (part.graph != nullptr && shape == part.shape) {
        return;
    }
    part.graph.reset();
    part.graph = build_graph(*model_, cache_, ropes_, part.constants, batch_, shape, exact);
    part.shape = shape;
    if (!quietly([&] { return ggml_gallocr_alloc_graph(part.allocator.get(), part.graph->nodes); })) {
        part.graph.reset();
        fail("memory", "expected compute memory for ", shape.n_tokens, " tokens; got none; lower -ub / n_ubatch");
    }
    if (part.on_gpu()) {
        part.gpu->prepare(*part.graph);
    }
}

void Session::prepare_graphs(const GraphShape& all) {
    for (Part& part : parts_) {
        GraphShape shape = all;
        shape.on_gpu = part.on_gpu();
        shape.first_layer = part.run.first_layer;
        shape.end_layer = part.run.end_layer;
        prepare_graph(part, shape);
    }
}

void Session::run_ubatch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                         std::span<const int32_t> out_ids, float* logits) {
    batch_.pos.assign(pos.begin(), pos.end());
    batch_.seq.assign(seq.begin(), seq.end());
    batch_.own_rows =
        cache_.options().keeps_recent() && tokens.size() > static_cast<size_t>(cache_.options().exact_ubatch);
    batch_.slots = cache_.placement().claim({pos, seq, batch_.own_rows});
    try {
        prepare_graphs(graph_shape(tokens.size(), out_ids.size(), cache_));
        const Part* before = nullptr;
        for (Part& part : parts_) {
            if (before != nullptr) before->hand_to(part);
            compute(part, tokens, pos, out_ids, cache_, batch_);
            before = &part;
        }
        for (const Part& part : parts_) part.get_result(part.graph->logits, logits);
    } catch (...) {
        for (const Part& part : parts_) part.abandon();
        for (const SlotRef& to : batch_.slots) {
            cache_.placement().release(to);
        }
        throw;
    }
    if (cache_.placement().eviction() != nullptr && parts_.front().on_gpu()) {
        parts_.front().gpu->take_masses(cache_);
    }
}

void Session::fill_reference_inputs(const Graph& graph, const KvCache& rows, const BatchSlots& batch) {
    bool filled = false;
    bool ring_filled = false;
    const HParams& h = model_->hparams();
    const int n_layer = &rows == &cache_ ? h.n_layer : 1;
    for (int il = 0; il < n_layer; il++) {
        if (rows.placement().evicts(il)) {
            lkv::fill_reference_inputs(rows, il, batch, h, graph.evicting[static_cast<size_t>(il)]);
        } else if (rows.placement().in_ring(il) && !std::exchange(ring_filled, true)) {
            lkv::fill_reference_inputs(rows, il, batch, h, graph.ring_reference);
        } else if (!rows.placement().in_ring(il) && !std::exchange(filled, true)) {
            lkv::fill_reference_inputs(rows, il, batch, h, graph.reference);
        }
    }
}

void Session::compute(Part& part, std::span<const int32_t> tokens, std::span<const int32_t> pos,
                      std::span<const int32_t> out_ids, const KvCache& rows, const BatchSlots& batch) {
    const Graph& graph = *part.graph;
    if (graph.embeddings != nullptr) {
        hidden_.resize(static_cast<size_t>(ggml_nelements(graph.embeddings)));
        model_->embed(tokens, hidden_.data());
        part.set_input(graph.embeddings, hidden_.data(), hidden_.size() * sizeof(float));
    }
    part.set_input(graph.tokens, tokens.data(), tokens.size_bytes());
    part.set_input(graph.positions, pos.data(), pos.size_bytes());
    part.set_input(graph.out_ids, out_ids.data(), out_ids.size_bytes());
    if (!fused_) {
        fill_reference_inputs(graph, rows, batch);
    }
    if (part.on_gpu()) {
        if (&rows != &cache_) part.gpu->begin(cache_, batch_);
        part.gpu->begin(rows, batch);
    }
    part.compute(backend_.get());
}

void Session::shift(int seq, const Positions& positions, int32_t delta) {
    const HParams& h = model_->hparams();
    for (int il = 0; cache_.placement().eviction() == nullptr && il < h.n_layer; il++) {
        const KPath path = model_->cache_spec().layers[static_cast<size_t>(il)].k_path;
        if (h.block.position == Position::learned) {
            fail("context shift",
                 "expected rotary or ALiBi positions; got learned ones, which live in the hidden states");
        }
        if (h.block.position == Position::rope && path != KPath::rebuild) {
            fail("context shift", "expected K `rebuild` in every layer, whose rows carry no position; got ",
                 path_name(path), " in layer ", il);
        }
    }
    cache_.placement().shift(seq, positions, delta);
}

size_t Session::compute_bytes() const {
    size_t bytes = 0;
    for (const Part& part : parts_) bytes += ggml_gallocr_get_buffer_size(part.allocator.get(), 0);
    return bytes;
}

// A state belongs to weights, whatever file they are in.
// Of the weights, and of whether full rows of K (bit 0) and V (bit 1) are rotated: the same layout, other numbers.
uint64_t Session::fingerprint(unsigned rotated) const { return model_->content_fingerprint() ^ rotated; }

unsigned Session::rotated() const {
    const GraphConstants& constants = parts_.front().constants;
    return (constants.hadamard_k != nullptr ? 1U : 0U) | (constants.hadamard_v != nullptr ? 2U : 0U);
}

std::vector<uint8_t> Session::signed_state(std::vector<uint8_t> rows) const {
    const uint64_t print = fingerprint(rotated());
    const auto* p = reinterpret_cast<const uint8_t*>(&print);
    rows.insert(rows.begin(), p, p + sizeof print);
    return rows;
}

// The rows of a state, and on which sides full ones are rotated otherwise than here.
std::pair<std::span<const uint8_t>, RowTurn> Session::unsigned_state(std::span<const uint8_t> state) const {
    uint64_t print = 0;
    if (state.size() < sizeof print) {
        fail("state", "expected at least ", sizeof print, " bytes; got ", state.size());
    }
    std::copy_n(state.begin(), sizeof print, reinterpret_cast<uint8_t*>(&print));
    const HParams& h = model_->hparams();
    for (unsigned other = 0; other < 4; other++) {
        if (print == fingerprint(other)) {
            return {state.subspan(sizeof print),
                    {other ^ rotated(), {hadamard_block(h, false), hadamard_block(h, true)}}};
        }
    }
    fail("state", "expected a state of ", model_->path(), "; got one of another model");
}

bool Session::can_rotate() const { return rotates_full(*model_, cache_, false) || rotates_full(*model_, cache_, true); }

std::vector<uint8_t> Session::state() const { return signed_state(StateWriter(cache_).all()); }

std::string Session::set_state(std::span<const uint8_t> state, Accept accept) {
    const auto [rows, turned] = unsigned_state(state);
    return told(StateReader(cache_, accept, turned).all(rows), accept);
}

std::vector<uint8_t> Session::seq_state(int seq) const {
    cache_.placement().check_seq(seq);
    return signed_state(StateWriter(cache_).sequence(seq));
}

std::vector<std::vector<uint8_t>> Session::seq_state_parts(int seq, std::span<const int32_t> cuts) const {
    cache_.placement().check_seq(seq);
    auto parts = StateWriter(cache_).sequence(seq, cuts);
    for (std::vector<uint8_t>& part : parts) part = signed_state(std::move(part));
    return parts;
}

std::string Session::set_seq_state(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept) {
    cache_.placement().check_seq(seq);
    std::vector<std::span<const uint8_t>> rows;
    RowTurn turned;
    for (const std::span<const uint8_t> part : parts) {
        const auto [of_part, turned_part] = unsigned_state(part);
        rows.push_back(of_part);
        turned.sides |= turned_part.sides;
        std::copy_n(turned_part.block, 2, turned.block);
    }
    return told(StateReader(cache_, accept, turned).sequence(seq, rows), accept);
}

}  // namespace lkv
