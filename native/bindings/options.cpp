// The options of sessions and samplers, by name: python/latentkv/plan/options.py and sampling/options.py have the same.
#include "bindings.h"
#include "keywords.h"

namespace py = pybind11;

lkv::SessionOptions session_options(const char* function, const py::kwargs& given) {
    lkv::SessionOptions o;
    Keywords keywords(function);
    keywords.field("n_ctx", o.n_ctx);
    keywords.field("n_ubatch", o.n_ubatch);
    keywords.field("n_batch", o.n_batch);
    keywords.field("n_seq_max", o.n_seq_max);
    keywords.field("n_guesses", o.n_guesses);
    keywords.field("n_threads", o.n_threads);
    keywords.field("n_threads_batch", o.n_threads_batch);
    keywords.field("kv", o.kv);
    keywords.field("kv_k", o.kv_k);
    keywords.field("kv_v", o.kv_v);
    keywords.field("k_plan", o.k_plan);
    keywords.field("v_plan", o.v_plan);
    keywords.field("kv_sink", o.kv_sink);
    keywords.field("kv_recent", o.kv_recent);
    keywords.field("kv_rotate", o.kv_rotate);
    keywords.field("sink", o.sink);
    keywords.field("recent", o.recent);
    keywords.field("recent_ratio", o.recent_ratio);
    keywords.field("fixed_window", o.fixed_window);
    keywords.field("kv_read", o.kv_read);
    keywords.field("mtp", o.mtp);
    keywords.field("mtp_path", o.mtp_path);
    keywords.field("evict", o.evict);
    keywords.field("keep_tokens", o.keep_tokens);
    keywords.field("prefill", o.prefill);
    keywords.field("implementation", o.implementation);
    keywords.field("require_fused", o.require_fused);
    keywords.read(given);
    return o;
}

lkv::SamplerOptions sampler_options(const py::kwargs& given) {
    lkv::SamplerOptions o;
    Keywords keywords("Sampler");
    keywords.field("temperature", o.temperature);
    keywords.field("top_k", o.top_k);
    keywords.field("top_p", o.top_p);
    keywords.field("min_p", o.min_p);
    keywords.field("typical_p", o.typical_p);
    keywords.field("repeat_penalty", o.repeat_penalty);
    keywords.field("frequency_penalty", o.frequency_penalty);
    keywords.field("presence_penalty", o.presence_penalty);
    keywords.field("penalty_last_n", o.penalty_last_n);
    keywords.field("mirostat_mode", o.mirostat_mode);
    keywords.field("mirostat_tau", o.mirostat_tau);
    keywords.field("mirostat_eta", o.mirostat_eta);
    keywords.field("top_n_sigma", o.top_n_sigma);
    keywords.field("xtc_probability", o.xtc_probability);
    keywords.field("xtc_threshold", o.xtc_threshold);
    keywords.field("dynatemp_range", o.dynatemp_range);
    keywords.field("dynatemp_exponent", o.dynatemp_exponent);
    keywords.field("dry_multiplier", o.dry_multiplier);
    keywords.field("dry_base", o.dry_base);
    keywords.field("dry_allowed_length", o.dry_allowed_length);
    keywords.field("dry_penalty_last_n", o.dry_penalty_last_n);
    keywords.field("dry_sequence_breakers", o.dry_sequence_breakers);
    keywords.field("min_keep", o.min_keep);
    keywords.field("infill", o.infill);
    keywords.field("seed", o.seed);
    keywords.field("logit_bias", o.logit_bias);
    keywords.other("matcher");
    keywords.read(given);
    return o;
}
