// Delta nets of a few tokens, against the same in double: ops/cuda/recurrent.
#include "ops/cuda/recurrent/delta_net.h"

#include <cmath>
#include <random>

#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

struct DeltaNetCase {
    int head_dim, n_k, n_v, d_conv, n_seqs, n_each, n_states;
    bool grouped;
    float deviation = 1;  // of what is convolved

    int channels() const { return (2 * n_k + n_v) * head_dim; }
    int n_before() const { return d_conv - 1; }
    int n_slots() const { return n_seqs * (1 + n_states) + 1; }
    // Sequence s reads one slot and writes others, in no order.
    int from(int s) const { return n_slots() - 1 - s; }
    int to(int back, int s) const { return back * n_seqs + s; }
};

struct DeltaNetNumbers {
    std::vector<float> qkv, gate, beta, alpha, kernels, decay, decay_bias, norm, conv, matrices;

    explicit DeltaNetNumbers(const DeltaNetCase& of) {
        std::mt19937 random(7);
        const auto fill = [&](std::vector<float>& x, int64_t n, float mean, float deviation) {
            std::normal_distribution<float> normal(mean, deviation);
            x.resize(static_cast<size_t>(n));
            for (float& each : x) each = normal(random);
        };
        const int64_t n_tokens = of.n_seqs * of.n_each;
        fill(qkv, n_tokens * of.channels(), 0, of.deviation);
        fill(gate, n_tokens * of.n_v * of.head_dim, 0, 1);
        fill(beta, n_tokens * of.n_v * (of.grouped ? 2 : 1), 0, 1);
        fill(alpha, n_tokens * of.n_v, 0, 8);  // beyond where softplus is its argument
        fill(kernels, int64_t{of.channels()} * of.d_conv, 0, 0.5F);
        fill(decay, of.n_v, -0.3F, 0.1F);
        fill(decay_bias, of.n_v, -1, 0.5F);
        fill(norm, of.head_dim, 1, 0.1F);
        fill(conv, int64_t{of.n_slots()} * of.channels() * of.n_before(), 0, of.deviation);
        fill(matrices, int64_t{of.n_slots()} * of.n_v * of.head_dim * of.head_dim, 0, 0.3F);
    }
};

struct DeltaNetResult {
    std::vector<double> out, conv, matrices;
};

double silu_of(double x) { return x / (1.0 + std::exp(-x)); }

// One head of one sequence.
void delta_net_head(const DeltaNetCase& of, const DeltaNetNumbers& x, int s, int v_head, DeltaNetResult& result) {
    const int hd = of.head_dim;
    const int of_k = of.n_v / of.n_k;
    const int k_head = of.grouped ? v_head / of_k : v_head % of.n_k;
    const int first[3] = {k_head * hd, (of.n_k + k_head) * hd, (2 * of.n_k + v_head) * hd};
    const auto state_at = [&](int slot) { return (size_t(slot) * of.n_v + v_head) * hd * hd; };
    std::vector<double> m(x.matrices.begin() + static_cast<ptrdiff_t>(state_at(of.from(s))),
                          x.matrices.begin() + static_cast<ptrdiff_t>(state_at(of.from(s)) + size_t(hd) * hd));
    const auto input = [&](int channel, int t) -> double {  // t < 0: of the state
        if (t < 0) return x.conv[(size_t(of.from(s)) * of.channels() + channel) * of.n_before() + of.n_before() + t];
        return x.qkv[size_t(s * of.n_each + t) * of.channels() + channel];
    };
    for (int t = 0; t < of.n_each; t++) {
        std::vector<double> rows[3];
        for (int part = 0; part < 3; part++) {
            for (int i = 0; i < hd; i++) {
                double sum = 0;
                for (int j = 0; j < of.d_conv; j++) {
                    sum += input(first[part] + i, t - of.n_before() + j) *
                           x.kernels[size_t(first[part] + i) * of.d_conv + j];
                }
                rows[part].push_back(silu_of(sum));
            }
        }
        for (int part = 0; part < 2; part++) {
            double power = 0;
            for (const double each : rows[part]) power += each * each;
            for (double& each : rows[part]) each /= std::sqrt(power + 1e-6);
        }
        const size_t token = size_t(s) * of.n_each + t;
        const size_t both = token * 2 * of.n_v + size_t(k_head) * 2 * of_k + v_head % of_k;
        const double b = of.grouped ? x.beta[both] : x.beta[token * of.n_v + v_head];
        const double a = (of.grouped ? x.beta[both + of_k] : x.alpha[token * of.n_v + v_head]) + x.decay_bias[v_head];
        const double kept = std::exp(std::log1p(std::exp(a)) * x.decay[v_head]);
        std::vector<double> read;
        double power = 0;
        for (int c = 0; c < hd; c++) {
            double learned = 0;
            for (int i = 0; i < hd; i++) learned += m[size_t(c) * hd + i] * rows[1][i];
            const double delta = (rows[2][c] - kept * learned) / (1.0 + std::exp(-b));
            double sum = 0;
            for (int i = 0; i < hd; i++) {
                double& each = m[size_t(c) * hd + i];
                each = kept * each + rows[1][i] * delta;
                sum += each * rows[0][i] / std::sqrt(double(hd));
            }
            read.push_back(sum);
            power += sum * sum;
        }
        for (int c = 0; c < hd; c++) {
            const size_t at = (token * of.n_v + v_head) * hd + c;
            result.out[at] = read[c] / std::sqrt(power / hd + 1e-6) * x.norm[c] * silu_of(x.gate[at]);
        }
        const int back = of.n_each - 1 - t;
        if (back >= of.n_states) continue;
        std::copy(m.begin(), m.end(), result.matrices.begin() + static_cast<ptrdiff_t>(state_at(of.to(back, s))));
        for (int part = 0; part < 3; part++) {
            for (int i = 0; i < hd * of.n_before(); i++) {
                const int channel = first[part] + i / of.n_before();
                const int j = i % of.n_before();
                result.conv[(size_t(of.to(back, s)) * of.channels() + channel) * of.n_before() + j] =
                    input(channel, t - of.n_before() + 1 + j);
            }
        }
    }
}

void delta_nets() {
    for (const DeltaNetCase& of :
         {DeltaNetCase{128, 2, 6, 4, 1, 1, 1, false}, DeltaNetCase{128, 2, 4, 4, 2, 3, 2, true},
          DeltaNetCase{64, 3, 3, 3, 3, 1, 1, false}, DeltaNetCase{64, 1, 4, 2, 1, 8, 8, true},
          DeltaNetCase{32, 2, 4, 4, 2, 5, 1, false}, DeltaNetCase{128, 1, 2, 4, 1, 2, 1, false, 0.002F}}) {
        const DeltaNetNumbers x(of);
        const int64_t n_out = int64_t{of.n_seqs} * of.n_each * of.n_v * of.head_dim;
        DeltaNetResult want{std::vector<double>(static_cast<size_t>(n_out)),
                            {x.conv.begin(), x.conv.end()},
                            {x.matrices.begin(), x.matrices.end()}};
        std::vector<int32_t> from;
        std::vector<int64_t> to;
        for (int s = 0; s < of.n_seqs; s++) {
            from.push_back(of.from(s));
            for (int v = 0; v < of.n_v; v++) delta_net_head(of, x, s, v, want);
        }
        for (int back = 0; back < of.n_states; back++) {
            for (int s = 0; s < of.n_seqs; s++) to.push_back(of.to(back, s));
        }
        const DeviceBuffer qkv(x.qkv), gate(x.gate), beta(x.beta), alpha(x.alpha), kernels(x.kernels), decay(x.decay),
            decay_bias(x.decay_bias), norm(x.norm), conv(x.conv), matrices(x.matrices), read(from), written(to),
            out(static_cast<size_t>(n_out) * sizeof(float));
        cuda::DeltaNetArgs args{};
        args.qkv = qkv.as<float>();
        args.gate = gate.as<float>();
        args.beta = beta.as<float>();
        args.alpha = of.grouped ? args.beta : alpha.as<float>();
        args.kernels = kernels.as<float>();
        args.decay = decay.as<float>();
        args.decay_bias = decay_bias.as<float>();
        args.norm = norm.as<float>();
        args.conv_states = conv.as<float>();
        args.matrices = matrices.as<float>();
        args.from = read.as<int32_t>();
        args.to = written.as<int64_t>();
        args.out = out.as<float>();
        args.qkv_row = of.channels();
        args.gate_row = of.n_v * of.head_dim;
        args.beta_row = of.grouped ? 2 * of.n_v : of.n_v;
        args.alpha_row = args.beta_row;
        args.n_k = of.n_k;
        args.n_v = of.n_v;
        args.head_dim = of.head_dim;
        args.d_conv = of.d_conv;
        args.n_seqs = of.n_seqs;
        args.n_each = of.n_each;
        args.n_states = of.n_states;
        args.grouped = of.grouped ? 1 : 0;
        args.norm_eps = 1e-6F;
        cuda_check(cuda::delta_net(args, nullptr), "delta_net");
        cuda_check(cudaDeviceSynchronize(), "a delta net");
        const std::string name =
            "a delta net of " + std::to_string(of.n_v) + " heads of " + std::to_string(of.head_dim);
        CHECK_MSG(relative_error(out.download<float>(), want.out) < 1e-4, name + ": its output");
        CHECK_MSG(relative_error(matrices.download<float>(), want.matrices) < 1e-5, name + ": its matrices");
        CHECK_MSG(relative_error(conv.download<float>(), want.conv) < 1e-6, name + ": its inputs");
    }
}

}  // namespace

Cases delta_net_cases() { return {{"delta_nets", delta_nets}}; }

}  // namespace lkv::test
