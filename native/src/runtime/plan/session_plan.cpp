#include "runtime/plan/session_plan.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>
#include <map>

#include "base/cores.h"
#include "base/error.h"
#include "cache/evict/policies.h"
#include "devices/gpus.h"
#include "model/mtp.h"
#include "runtime/lazy_prefill.h"
#include "runtime/plan/forecast.h"

namespace lkv {
namespace {

// in_token_blocks: whether the rows may lie in token blocks, as those of the middle's K may alone.
std::optional<Format> parse_kv(const char* flag, const std::string& name, bool in_token_blocks) {
    if (name.empty()) {
        return std::nullopt;
    }
    const auto format = parse_format(name);
    if (!format || *format == Format::none) {
        std::string known;
        for (const Format each : all_formats) {
            if (format_in_token_blocks(each) && !in_token_blocks) continue;
            known += known.empty() ? "" : " ";
            known += format_name(each);
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

int thread_count(const char* flag, int wanted) {
    return wanted == 0 ? usable_cores() : check_range(flag, wanted, 1, 512);
}

bool is_fused(const SessionOptions& options) {
    if (options.implementation != "fused" && options.implementation != "reference") {
        fail("implementation", "expected fused or reference; got ", quoted(options.implementation));
    }
    return options.implementation == "fused";
}

// Tokens that each layer keeps of a sequence, sinks and recent ones among them.
EvictOptions parse_evict(const SessionOptions& options, const KvCacheOptions& cache) {
    if (!options.evicts()) {
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

void set_sizes(const Model& model, const SessionOptions& options, KvCacheOptions& cache) {
    cache.n_ctx = options.n_ctx == 0 ? model.hparams().n_ctx_train : check_range("n_ctx", options.n_ctx, 1, 1 << 28);
    cache.n_seq_max = check_range("n_seq_max", options.n_seq_max, 1, max_sequences);
    cache.n_guesses =
        std::max(check_range("n_guesses", options.n_guesses, 0, most_guesses), options.mtp ? mtp_guesses : 0);
    cache.runs = model.runs();
}

void set_exact_tokens(const CacheSpec& spec, const SessionOptions& options, KvCacheOptions& cache) {
    cache.sink = options.sink < 0 ? spec.sink : check_range("sink", options.sink, 0, 1 << 16);
    if (!(options.recent_ratio <= 1.0)) {
        fail("recent_ratio", "expected a ratio from 0 to 1; got ", options.recent_ratio);
    }
    const bool own_window = options.recent >= 0 || options.recent_ratio >= 0;
    cache.recent =
        options.recent < 0 ? (own_window ? 0 : spec.recent) : check_range("recent", options.recent, 0, 1 << 20);
    cache.recent_ratio = own_window ? std::max(0.0, options.recent_ratio) : static_cast<double>(spec.recent_ratio);
    cache.fixed_window = options.fixed_window;
    const auto sink = parse_kv("kv_sink", options.kv_sink, false);
    const auto recent = parse_kv("kv_recent", options.kv_recent, false);
    cache.sink_format = {sink.value_or(spec.sink_format), sink.has_value()};
    cache.recent_format = {recent.value_or(spec.recent_format), recent.has_value()};
}

void set_formats(const SessionOptions& options, KvCacheOptions& cache) {
    const auto chosen = parse_kv("kv", options.kv, true);
    const auto k_chosen = parse_kv("kv_k", options.kv_k, true);
    const auto v_chosen = parse_kv("kv_v", options.kv_v, false);
    cache.k_format = k_chosen ? k_chosen : chosen;
    cache.v_format = v_chosen ? v_chosen : chosen;
    cache.k_plan = parse_plan("k_plan", options.k_plan);
    cache.v_plan = parse_plan("v_plan", options.v_plan);
}

void set_read(const SessionOptions& options, KvCacheOptions& cache) {
    if (options.kv_read == 0) return;
    const int least = std::max(512, cache.window(cache.n_ctx));
    if (options.kv_read < least) {
        fail("kv_read", "expected all (0), or at least ", least, " tokens, as many as the exact window has; got ",
             options.kv_read);
    }
    if (options.evicts()) {
        fail("kv_read", "expected all beside --evict, which has chosen already; got ", options.kv_read);
    }
    const auto& runs = cache.runs;
    if (!is_fused(options) || runs.empty() ||
        !std::all_of(runs.begin(), runs.end(), [](const LayerRun& run) { return run.on_gpu(); })) {
        fail("kv_read", "expected all where layers are on the CPU, which reads every row; got ", options.kv_read,
             "; use -ngl 99");
    }
    cache.kv_read = options.kv_read;
}

KvCacheOptions cache_options(const Model& model, const SessionOptions& options) {
    KvCacheOptions cache;
    set_sizes(model, options, cache);
    set_exact_tokens(model.cache_spec(), options, cache);
    cache.evict = parse_evict(options, cache);
    set_formats(options, cache);
    set_read(options, cache);
    return cache;
}

// Prefill is lazy where the options or the file ask for it, but not beside eviction or on several devices: options that ask for it
// there are refused, and a file that does is prefilled eagerly, with a warning.
Prefill choose_prefill(const Model& model, const SessionOptions& options, std::vector<std::string>& warnings) {
    const bool asked = !options.prefill.empty();
    Prefill prefill = model.cache_spec().prefill;
    if (asked) {
        const auto word = schema::parse<Prefill>(schema::prefill_words, options.prefill);
        if (!word) {
            fail("prefill", "expected eager or lazy; got ", quoted(options.prefill));
        }
        prefill = *word;
    }
    if (prefill == Prefill::eager) return prefill;
    if (options.evicts()) {
        const std::string wanted =
            concat("expected eager beside --evict ", options.evict, ", as a prompt is cut while it comes");
        if (asked) fail("prefill", wanted, "; got lazy");
        warnings.push_back(
            concat("[prefill] ", wanted, "; got lazy, by the file: prompts are compressed as they come"));
        prefill = Prefill::eager;
    } else if (!model.on_one_device()) {
        const std::string runs = runs_text(model.runs());
        const std::string hint = "; use -ngl 0, or 99 with --split-mode none";
        if (asked)
            fail("prefill", "expected all layers on one device for lazy; got ", runs, hint, ", or --prefill eager");
        warnings.push_back(concat("[prefill] expected all layers on one device for lazy, by the file; got ", runs,
                                  ": prompts are compressed as they come", hint));
        prefill = Prefill::eager;
    }
    const bool recurrent = model.hparams().is_recurrent();
    if (recurrent && !asked && prefill == Prefill::lazy) {
        warnings.push_back(
            "[prefill] expected eager, as some layers are recurrent; got lazy, by the file: prompts are compressed as "
            "they come");
        prefill = Prefill::eager;
    }
    if (const std::string obstacle = prefill == Prefill::lazy ? lazy_obstacle(model) : ""; !obstacle.empty()) {
        fail("prefill", "expected eager, as ", obstacle, "; got lazy");
    }
    return prefill;
}

void warn_of_context(const CacheSpec& spec, const KvCacheOptions& cache, std::vector<std::string>& warnings) {
    // sequences of one cache share its context
    if (spec.fitted_context > 0 && cache.n_ctx / cache.n_seq_max > spec.fitted_context) {
        warnings.push_back(concat("[context] expected at most ", spec.fitted_context,
                                  " positions, the context this file's K basis was fitted for; got n_ctx ",
                                  cache.n_ctx));
    }
}

void warn_of_window(const CacheSpec& spec, const KvCacheOptions& cache, std::vector<std::string>& warnings) {
    KvCacheOptions fitted;
    fitted.sink = spec.sink;
    fitted.recent = spec.recent;
    fitted.recent_ratio = static_cast<double>(spec.recent_ratio);
    if (cache.window(cache.n_ctx) < fitted.window(cache.n_ctx)) {
        warnings.push_back(concat("[recent] expected at least ", fitted.window(cache.n_ctx),
                                  " recent tokens, the window this file's plan was fitted for; got ",
                                  cache.window(cache.n_ctx)));
    }
}

// Whether what the plan takes is free on its GPUs, and as much as is left alone.
bool has_room(const Model& model, const SessionPlan& plan, const FreeOnGpu& free) {
    const Forecast found = forecast(model, plan);
    const auto to_come = model.describe_only() ? model.resident_bytes() : std::vector<size_t>(model.runs().size(), 0);
    std::map<int, size_t> needed;
    for (size_t i = 0; i < model.runs().size(); i++) {
        const size_t bytes = to_come[i] + found.cache.runs[i] + found.compute[i];
        if (model.runs()[i].on_gpu()) needed[model.runs()[i].gpu] += bytes;
    }
    return std::all_of(needed.begin(), needed.end(),
                       [&](const auto& of) { return of.second + found.cache.cells + left_alone <= free(of.first); });
}

}  // namespace

SessionPlan resolve(const Model& model, const SessionOptions& options, const FreeOnGpu& free) {
    SessionPlan plan;
    std::vector<std::string> of_prefill;
    if (options.evicts() && model.hparams().shares_rows()) {
        fail("evict",
             "expected a model whose layers have K and V of their own; got one where layers share them; leave ",
             "out --evict");
    }
    if (options.evicts() && model.hparams().is_recurrent()) {
        fail("evict", "expected a model whose layers all attend, as recurrent layers evict nothing; got one with ",
             "recurrent layers; leave out --evict");
    }
    plan.fused = is_fused(options);
    plan.kv_rotate = options.kv_rotate;
    plan.prefill = choose_prefill(model, options, of_prefill);
    plan.n_threads = thread_count("n_threads", options.n_threads);
    plan.n_threads_batch =
        options.n_threads_batch == 0 ? plan.n_threads : thread_count("n_threads_batch", options.n_threads_batch);
    plan.cache = cache_options(model, options);
    const Ubatches::Asked asked{check_range("n_ubatch", options.n_ubatch, 0, 1 << 16),
                                check_range("n_batch", options.n_batch, 0, INT_MAX)};
    const auto has_memory = [&, with = plan](const Ubatches& ubatches) mutable {
        with.cache.ubatches = ubatches;
        return free == nullptr || has_room(model, with, free);
    };
    plan.cache.ubatches = Ubatches::of(asked, model.hparams(), model.cache_spec(), plan.cache, has_memory);
    warn_of_context(model.cache_spec(), plan.cache, plan.warnings);
    warn_of_window(model.cache_spec(), plan.cache, plan.warnings);
    plan.warnings.insert(plan.warnings.end(), of_prefill.begin(), of_prefill.end());
    return plan;
}

void require_runnable(const Model& model, const SessionOptions& options) {
    if (model.describe_only()) {
        fail("session", "expected a model to run; got one opened with describe_only");
    }
    if (options.require_fused) {
        const char* const where = model.gpu_asked() ? "the GPU" : "the CPU";
        if (!is_fused(options)) {
            fail("require_fused", "expected fused attention on ", where,
                 "; got stock ggml operations; leave out --implementation reference");
        }
        if (model.gpu_asked() && !model.on_gpu()) {
            fail("require_fused", "expected fused attention on the GPU, as -ngl / n_gpu_layers asks; got the CPU (",
                 model.gpu_absent(), "); use -ngl 0");
        }
    }
    if (!is_fused(options) && model.on_gpu()) {
        fail("implementation", "expected fused on a GPU; got reference; use -ngl 0");
    }
}

}  // namespace lkv
