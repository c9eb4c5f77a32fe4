#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

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
double yarn_extrapolation(int i, int n_rot, double base, double n_ctx_orig, double beta_fast, double beta_slow) {
    const auto dim = [&](double rotations) {
        return n_rot * std::log(n_ctx_orig / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
    };
    const double low = std::max(0.0, std::floor(dim(beta_fast)));
    const double high = std::min(n_rot - 1.0, std::ceil(dim(beta_slow)));
    return 1.0 - std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
}

}  // namespace

Rope read_rope(const GgufFile& file, const HParams& hparams, int n_ctx) {
    Rope rope;
    if (hparams.block.position != Position::rope) {
        return rope;
    }
    const std::string prefix = hparams.architecture + ".rope.";
    const int n_half = hparams.n_rot / 2;
    const double file_base = read_float(file, prefix + "freq_base", 1.0F, 1e15F, 10000.0F);
    const std::string_view scaling = file.find_string(prefix + "scaling.type").value_or("none");
    // a factor that no scaling uses may be 0
    const bool by_factor = scaling == "linear" || scaling == "yarn";
    const double factor = by_factor ? read_float(file, prefix + "scaling.factor", 1e-3F, 1e6F, 1.0F) : 1.0;
    const std::string orig_key = prefix + "scaling.original_context_length";
    const double n_ctx_orig = file.find_u32(orig_key).value_or(static_cast<uint32_t>(hparams.n_ctx_train));
    if (n_ctx_orig < 1) {
        fail(orig_key, "expected a number of tokens from 1; got ", n_ctx_orig);
    }
    const double attn_factor = read_float(file, prefix + "scaling.attn_factor", 1e-3F, 1e3F, 1.0F);

    double base = file_base;
    const double dynamic = read_float(file, std::string(key::rope_dynamic_factor), 1e-3F, 1e6F, 0.0F);
    if (dynamic > 0 && n_ctx > hparams.n_ctx_train) {
        const double n = hparams.n_rot;
        base *= std::pow(dynamic * n_ctx / hparams.n_ctx_train - (dynamic - 1.0), n / (n - 2.0));
    }

    std::vector<double> divisors = read_factors(file, "rope_freqs.weight", n_half);
    if (divisors.empty()) {
        divisors =
            read_factors(file, n_ctx > n_ctx_orig ? "rope_factors_long.weight" : "rope_factors_short.weight", n_half);
    }
    if (divisors.empty()) {
        divisors.assign(static_cast<size_t>(n_half), 1.0);
    }

    rope.base = static_cast<float>(base);
    rope.mscale = static_cast<float>(attn_factor);
    rope.freqs.resize(static_cast<size_t>(n_half));
    rope.ggml_factors.resize(static_cast<size_t>(n_half));
    for (int i = 0; i < n_half; i++) {
        const size_t at = static_cast<size_t>(i);
        const double plain = std::pow(base, -2.0 * i / hparams.n_rot);
        double freq = plain / divisors[at];
        if (scaling == "linear") {
            freq /= factor;
        } else if (scaling == "yarn") {
            const double beta_fast = read_float(file, prefix + "scaling.yarn_beta_fast", 1e-3F, 1e6F, 32.0F);
            const double beta_slow = read_float(file, prefix + "scaling.yarn_beta_slow", 1e-3F, 1e6F, 1.0F);
            const double keep = yarn_extrapolation(i, hparams.n_rot, base, n_ctx_orig, beta_fast, beta_slow);
            freq = freq / factor * (1.0 - keep) + freq * keep;
        } else if (scaling != "none" && scaling != "longrope") {
            fail("rope", "expected rope.scaling.type none, linear, yarn or longrope", "; got ", quoted(scaling));
        }
        rope.freqs[at] = static_cast<float>(freq);
        // ggml divides its own f32 base power; hand it the ratio so that both see the same frequency
        rope.ggml_factors[at] = static_cast<float>(plain / freq);
    }
    if (scaling == "yarn") {
        rope.mscale = static_cast<float>(attn_factor * (factor <= 1.0 ? 1.0 : 1.0 + 0.1 * std::log(factor)));
    }
    return rope;
}

}  // namespace lkv
