#include "ops/cpu/rebuild.h"

#include <algorithm>
#include <cmath>

#include "base/vmath.h"

namespace lkv {

namespace {

constexpr int panels_per_tile = tile_slots / panel_width;

// k: one panel, [head_dim][16]. Columns are slots, so a norm over head_dim needs no reduction across lanes.
void add_bias(const float* bias, int head_dim, float* k) {
    for (int d = 0; d < head_dim; d++, k += panel_width) {
        for (int v = 0; v < panel_width; v += lanes) store8(k + v, load8(k + v) + splat(bias[d]));
    }
}

void rms_norm(const float* weight, float eps, int head_dim, float* k) {
    for (int v = 0; v < panel_width; v += lanes) {
        f32x8 power{};
        for (int d = 0; d < head_dim; d++) {
            const f32x8 x = load8(k + d * panel_width + v);
            power = fma8(x, x, power);
        }
        f32x8 inverse{};
        for (int i = 0; i < lanes; i++) inverse[i] = 1.0f / std::sqrt(power[i] / static_cast<float>(head_dim) + eps);
        for (int d = 0; d < head_dim; d++) {
            float* x = k + d * panel_width + v;
            store8(x, load8(x) * inverse * splat(weight[d]));
        }
    }
}

// cos, sin: plane 0 of this panel's slots; planes are 64 floats apart.
void rotate(const float* cos, const float* sin, int n_rot, bool neox, float* k) {
    const int n_planes = n_rot / 2;
    for (int i = 0; i < n_planes; i++) {
        float* x = k + (neox ? i : 2 * i) * panel_width;
        float* y = k + (neox ? i + n_planes : 2 * i + 1) * panel_width;
        for (int v = 0; v < panel_width; v += lanes) {
            const f32x8 c = load8(cos + i * tile_slots + v);
            const f32x8 s = load8(sin + i * tile_slots + v);
            const f32x8 x0 = load8(x + v);
            const f32x8 y0 = load8(y + v);
            store8(x + v, x0 * c - y0 * s);
            store8(y + v, x0 * s + y0 * c);
        }
    }
}

}  // namespace

void rope_tile(const LatentAttnParams& p, const int32_t* positions, float* out) {
    const int n_planes = p.n_rot / 2;
    float* cos = out;
    float* sin = out + n_planes * tile_slots;
    for (int s = 0; s < tile_slots; s += lanes) {
        f64x8 position;
        for (int i = 0; i < lanes; i++) position[i] = positions[s + i];
        for (int i = 0; i < n_planes; i++) {
            constexpr double quarters_per_radian = 0.636619772367581343;  // 2/π
            const SinCos v = sincos8(position, p.rope_freqs[i] * quarters_per_radian);
            store8(cos + i * tile_slots + s, v.cos * splat(p.rope_mscale));
            store8(sin + i * tile_slots + s, v.sin * splat(p.rope_mscale));
        }
    }
}

void rebuild_k(const LatentAttnParams& p, int head, int kept, const float* latent, const float* rope, float* k,
               const float** a, float** c) {
    const int head_dim = p.head_dim;
    if (p.k_b == nullptr) {
        std::copy_n(latent, ptrdiff_t{head_dim} * tile_slots, k);
    } else {
        const float* b = p.k_b + ptrdiff_t{head} * p.k_rank_max * head_dim;
        for (int d = 0; d < head_dim; d++) {
            a[d] = b + d;
            c[d] = k + d * panel_width;
        }
        const Panels z{latent, panel_width, ptrdiff_t{kept} * panel_width};
        multiply(head_dim, tile_slots, kept, a, head_dim, z, c, head_dim * panel_width, false);
    }

    for (int panel = 0; panel < panels_per_tile; panel++, k += head_dim * panel_width) {
        if (p.k_bias != nullptr) add_bias(p.k_bias + ptrdiff_t{head} * head_dim, head_dim, k);
        if (p.k_norm != nullptr) rms_norm(p.k_norm, p.k_norm_eps, head_dim, k);
        if (p.rope_freqs != nullptr) {
            const float* cos = rope + panel * panel_width;
            rotate(cos, cos + p.n_rot / 2 * tile_slots, p.n_rot, p.rope_neox, k);
        }
    }
}

void rebuild_v(const LatentAttnParams& p, int head, int kept, const float* latent, float* v, const float** a,
               float** c) {
    const int head_dim = p.head_dim;
    constexpr int panel = tile_slots * panel_width;
    if (head_dim % panel_width != 0) std::fill_n(v + head_dim / panel_width * panel, panel, 0.0f);
    for (int s = 0; s < tile_slots; s++) {
        a[s] = latent + ptrdiff_t{s / panel_width} * kept * panel_width + s % panel_width;
        c[s] = v + s * panel_width;
    }
    const Panels b{p.v_b + ptrdiff_t{head} * p.v_rank_max * head_dim, head_dim, panel_width};
    multiply(tile_slots, head_dim, kept, a, panel_width, b, c, panel, false);
}

}  // namespace lkv
