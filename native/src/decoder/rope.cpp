#include "decoder/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <tuple>

#include "base/error.h"
#include "ggml.h"

namespace lkv {
namespace {

std::vector<double> read_factors(const GgufFile& file, const char* name, int n) {
    const TensorInfo* info = file.find_tensor(name);
    if (info == nullptr) {
        return {};
    }
    if (info->type != GGML_TYPE_F32 || info->ne[0] != n || info->bytes != static_cast<size_t>(n) * sizeof(float)) {
        fail(name, "expected a vector of ", n, " f32 values; got ", info->ne[0], " of type ",
             ggml_type_name(info->type));
    }
    std::vector<float> raw(static_cast<size_t>(n));
    std::memcpy(raw.data(), info->data, info->bytes);
    const auto bad = std::find_if(raw.begin(), raw.end(), [](float f) { return !(std::isfinite(f) && f > 0.0F); });
    if (bad != raw.end()) {
        fail(name, "expected finite divisors above 0; got ", *bad);
    }
    return {raw.begin(), raw.end()};
}

// YaRN, Peng et al. 2023, eq. 17-23: below `low` rotations interpolate, above `high` extrapolate, a ramp between.
double yarn_extrapolation(int i, int n_rot, double base, double n_ctx_orig, double beta_fast, double beta_slow,
                          bool truncate) {
    const auto dim = [&](double rotations) {
        return n_rot * std::log(n_ctx_orig / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
    };
    const double first = dim(beta_fast);
    const double last = dim(beta_slow);
    const double low = std::max(0.0, truncate ? std::floor(first) : first);
    const double high = std::min(n_rot - 1.0, truncate ? std::ceil(last) : last);
    return 1.0 - std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
}

// What the file says of every layer that does not do without.
struct Scaling {
    std::string_view type = "none";
    double factor = 1.0;
    double n_ctx_orig = 0;
    double attn_factor = 1.0;
    double log_multiplier = 0.0;  // of YaRN, the model's mscale_all_dim, with MLA a tenth of it; 0: none
    double dynamic = 0.0;
    double beta_fast = 32.0;
    double beta_slow = 1.0;
};

// Divisors of the frequencies of heads that have n_half planes; empty: none.
std::vector<double> read_divisors(const GgufFile& file, const Scaling& s, int n_half, int n_ctx) {
    std::vector<double> divisors = read_factors(file, "rope_freqs.weight", n_half);
    if (!divisors.empty()) return divisors;
    const bool is_long = n_ctx > s.n_ctx_orig;
    return read_factors(file, is_long ? "rope_factors_long.weight" : "rope_factors_short.weight", n_half);
}

// As libllama reads it: without a type it is linear; of both keys of the factor the older one, rope.scale_linear, comes second; 0 means 1.
double read_factor(const GgufFile& file, const std::string& rope) {
    const std::string key = rope + (file.has(rope + "scaling.factor") ? "scaling.factor" : "scale_linear");
    return file.find_f32(key).value_or(0.0F) == 0.0F ? 1.0 : read_float(file, key, 1e-3F, 1e6F, 1.0F);
}

Scaling read_scaling(const GgufFile& file, const HParams& hparams) {
    const std::string prefix = hparams.architecture + ".rope.scaling.";
    Scaling s;
    s.type = file.find_string(prefix + "type").value_or("linear");
    if (s.type != "none" && s.type != "linear" && s.type != "yarn" && s.type != "longrope") {
        fail("rope", "expected rope.scaling.type none, linear, yarn or longrope", "; got ", quoted(s.type));
    }
    s.factor = s.type == "none" ? 1.0 : read_factor(file, hparams.architecture + ".rope.");
    const std::string orig_key = prefix + "original_context_length";
    s.n_ctx_orig = file.find_u32(orig_key).value_or(static_cast<uint32_t>(hparams.n_ctx_train));
    if (s.n_ctx_orig < 1) {
        fail(orig_key, "expected a number of tokens from 1; got ", s.n_ctx_orig);
    }
    s.attn_factor = read_float(file, prefix + "attn_factor", 1e-3F, 1e3F, 1.0F);
    s.dynamic = read_float(file, std::string(key::rope_dynamic_factor), 1e-3F, 1e6F, 0.0F);
    if (s.type == "yarn") {
        s.beta_fast = read_float(file, prefix + "yarn_beta_fast", 1e-3F, 1e6F, 32.0F);
        s.beta_slow = read_float(file, prefix + "yarn_beta_slow", 1e-3F, 1e6F, 1.0F);
        s.log_multiplier = read_float(file, prefix + "yarn_log_multiplier", 0.0F, 1e3F, 0.0F);
    }
    return s;
}

Rope make_rope(double base, int n_rot, const Scaling& s, const std::vector<double>& divisors, const HParams& hparams,
               int n_ctx) {
    const int n_half = n_rot / 2;
    if (s.dynamic > 0 && n_ctx > hparams.n_ctx_train) {
        const double n = n_rot;
        base *= std::pow(s.dynamic * n_ctx / hparams.n_ctx_train - (s.dynamic - 1.0), n / (n - 2.0));
    }
    Rope rope;
    rope.base = static_cast<float>(base);
    rope.mscale = static_cast<float>(s.attn_factor);
    rope.freqs.resize(static_cast<size_t>(n_half));
    int widest = n_rot;
    for (const HeadShape& heads : hparams.heads) widest = std::max(widest, heads.head_dim);
    rope.ggml_factors.resize(static_cast<size_t>(widest / 2), 1.0F);
    for (int i = 0; i < n_half; i++) {
        const size_t at = static_cast<size_t>(i);
        const double plain = std::pow(base, -2.0 * i / n_rot);
        double freq = divisors.empty() ? plain : plain / divisors[at];
        double keep = 0.0;
        if (s.type == "yarn") {
            keep =
                yarn_extrapolation(i, n_rot, base, s.n_ctx_orig, s.beta_fast, s.beta_slow, hparams.block.yarn_truncate);
        }
        freq = freq / s.factor * (1.0 - keep) + freq * keep;
        rope.freqs[at] = static_cast<float>(freq);
        // ggml divides its own f32 base power; hand it the ratio so that both see the same frequency
        rope.ggml_factors[at] = static_cast<float>(plain / freq);
    }
    if (s.type == "yarn") {
        // the multiplier takes growth from keys; with MLA all of it, and gives it to scores
        const bool grows = s.factor > 1.0 && !(hparams.has_mla() && s.log_multiplier > 0.0);
        const double growth = grows ? 0.1 * std::log(s.factor) : 0.0;
        rope.mscale = static_cast<float>(s.attn_factor * (1.0 + growth) / (1.0 + s.log_multiplier * growth));
    }
    return rope;
}

}  // namespace

// As libllama has it: without a multiplier scores grow as keys do, beside these.
float read_mla_scale(const GgufFile& file, const HParams& hparams) {
    const double plain = 1.0 / std::sqrt(static_cast<double>(hparams.mla.query()));
    const Scaling s = read_scaling(file, hparams);
    if (s.type != "yarn") return static_cast<float>(plain);
    const double multiplier = s.log_multiplier > 0.0 ? s.log_multiplier : 0.1;
    const double growth = s.attn_factor * (s.factor > 1.0 ? 1.0 + multiplier * std::log(s.factor) : 1.0);
    return static_cast<float>(plain * growth * growth);
}

Ropes read_ropes(const GgufFile& file, const HParams& hparams, int n_ctx) {
    const bool is_rotary = hparams.block.position == Position::rope;
    const Scaling scaling = is_rotary ? read_scaling(file, hparams) : Scaling{};
    Ropes ropes;
    using Kind = std::tuple<float, bool, int>;
    std::vector<Kind> kinds;  // one a table
    for (int il = 0; il < hparams.n_layer; il++) {
        const LayerAttention& layer = hparams.block.layers[static_cast<size_t>(il)];
        const int n_rot = hparams.heads_of(il).n_rot;
        const Kind kind{layer.rope_base, layer.rope_scaled, n_rot};
        const auto found = std::find(kinds.begin(), kinds.end(), kind);
        ropes.of_layer.push_back(static_cast<size_t>(found - kinds.begin()));
        if (found != kinds.end()) continue;
        kinds.push_back(kind);
        if (!is_rotary || layer.rope_base <= 0.0F) {
            ropes.tables.emplace_back();
        } else if (layer.rope_scaled) {
            const std::vector<double> divisors = read_divisors(file, scaling, n_rot / 2, n_ctx);
            ropes.tables.push_back(make_rope(layer.rope_base, n_rot, scaling, divisors, hparams, n_ctx));
        } else {
            ropes.tables.push_back(make_rope(layer.rope_base, n_rot, {}, {}, hparams, n_ctx));
        }
    }
    return ropes;
}

}  // namespace lkv
