// What the slots of a layer gather, on the CPU, against the contract in double.
#include <array>
#include <limits>
#include <vector>

#include "attn/attn_matrix.h"
#include "check.h"
#include "ops/cpu/attn_mass.h"

namespace {

using lkv::test::AttnCase;
using lkv::test::AttnShape;
using lkv::test::Perturb;
using lkv::test::query_weights;
using lkv::test::relative_error;

constexpr double rounding = 2e-5;
constexpr int layer = 3;

// Sums over KV heads, of problems with one softmax. What may not be read holds NaN.
std::vector<float> run(std::span<const lkv::LatentAttnParams> problems, const std::vector<lkv::QueryWeight>& weights,
                       bool has_noise, int n_planned, int n_run) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const lkv::AttnMassParams params{problems, weights.data(), has_noise, layer};
    int most = 0;
    for (const lkv::LatentAttnParams& p : problems) {
        for (int r = 0; r < p.n_regions; r++) most += (p.regions[r].n_slots + 63) / 64 * 64;
    }
    const lkv::AttnMassPlan plan = lkv::attn_mass_plan(params, most + 64, n_planned);
    std::vector<float> scratch(plan.scratch_floats, nan);
    const auto n_slots = static_cast<size_t>(params.n_slots());
    const int n_kv = problems[0].n_kv;
    std::vector<float> by_head(static_cast<size_t>(n_kv) * n_slots, nan);
    for (int i = 0; i < n_run; i++) lkv::attn_mass(params, plan, scratch.data(), by_head.data(), i, n_run);
    std::vector<float> sum(n_slots, 0.0f);
    for (size_t i = 0; i < by_head.size(); i++) sum[i % n_slots] += by_head[i];
    return sum;
}

void compare(const AttnShape& shape) {
    for (const bool has_noise : {false, true}) {
        const AttnCase c(shape);
        const std::vector<lkv::QueryWeight> weights = query_weights(c.params.n_tokens, has_noise);
        const std::span problems(&c.params, 1);
        const std::vector<double> want = c.masses(weights, has_noise, layer);
        for (const auto& [planned, threads] : {std::pair{1, 1}, {3, 3}, {3, 2}, {2, 5}}) {
            const double error = relative_error(run(problems, weights, has_noise, planned, threads), want);
            CHECK_MSG(error <= rounding, shape.name + ": relative error " + std::to_string(error));
        }
        const std::vector<float> got = run(problems, weights, has_noise, 2, 2);
        for (const Perturb perturb : {Perturb::score, Perturb::value}) {
            CHECK_MSG(relative_error(got, c.masses(weights, has_noise, layer, perturb)) > rounding,
                      shape.name + ": a term 1 % off goes unseen");
        }
        CHECK_MSG(relative_error(got, c.masses(weights, !has_noise, layer)) > rounding, shape.name + ": no noise");
    }
}

// Full rows of exact windows and latents: the softmax of the two.
void beside() {
    for (const auto& [full, latents] : lkv::test::shapes_beside()) {
        const AttnCase a(full);
        const AttnCase b(latents);
        const std::vector<lkv::QueryWeight> weights(static_cast<size_t>(a.params.n_tokens), {1.0f, 1.0f});
        const std::array problems{a.params, b.params};
        const std::vector<float> got = run(problems, weights, false, 2, 2);
        double sum = 0.0;
        for (const float mass : got) sum += double{mass};
        const int rows = a.params.n_tokens * a.params.n_head;  // each spreads a mass of 1 over all that it sees
        CHECK_MSG(std::abs(sum - rows) < 1e-4 * rows, full.name + ": " + std::to_string(sum));
        const std::vector<float> alone = run(std::span(&a.params, 1), weights, false, 2, 2);
        if (latents.n_past > 0 && full.n_past > 0) {
            CHECK_MSG(relative_error(std::vector(got.begin(), got.begin() + static_cast<ptrdiff_t>(alone.size())),
                                     std::vector<double>(alone.begin(), alone.end())) > 0.01,
                      full.name);
        }
    }
}

}  // namespace

int main() {
    lkv::test::paths_and_shapes(compare);
    lkv::test::regions(compare);
    lkv::test::masks(compare);
    lkv::test::masks([](AttnShape s) {
        s.name += ", sinks";
        s.sinks = true;
        compare(s);
    });
    beside();
    return lkv::test::report("attn_mass");
}
