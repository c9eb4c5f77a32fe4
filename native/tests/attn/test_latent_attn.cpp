// The CPU kernel against the contract in double, over paths, groups, ranks, formats, regions, batches and threads.
#include <array>
#include <limits>
#include <vector>

#include "attn/attn_matrix.h"
#include "check.h"
#include "ops/cpu/codes/code_scores.h"
#include "ops/cpu/codes/codes.h"
#include "ops/cpu/latent_attn.h"

namespace {

using lkv::test::AttnCase;
using lkv::test::AttnShape;
using lkv::test::Perturb;
using lkv::test::relative_error;

constexpr double rounding = 2e-5;
constexpr double integers = 2e-4;  // where weights, or queries that are bytes already, meet codes as integers

double tolerance_of(const lkv::LatentAttnParams& p) {
    const auto coded = [](const lkv::RowLayout& layout) {
        return std::any_of(layout.groups, layout.groups + layout.n_groups,
                           [&](const lkv::GroupLayout& group) { return lkv::is_coded(layout, group); });
    };
    return std::any_of(p.regions, p.regions + p.n_regions,
                       [&](const lkv::RegionView& region) { return coded(region.k) || coded(region.v); })
               ? integers
               : rounding;
}

// Planned for n_planned threads, run with n_run. Everything the kernel may not read holds NaN.
std::vector<float> run(AttnCase& c, int n_planned, int n_run) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    constexpr float guard = 12345.0f;
    const lkv::LatentAttnPlan plan = lkv::latent_attn_plan(c.params, n_planned);
    std::vector<float> scratch(plan.scratch_floats + 64, nan);
    std::fill(scratch.end() - 64, scratch.end(), guard);
    std::vector<float> out(static_cast<size_t>(c.n_out()), nan);
    c.params.out = out.data();
    for (int i = n_run - 1; i >= 0; i--) lkv::latent_attn_partial(c.params, plan, scratch.data(), i, n_run);
    const std::array problems{lkv::PartialAttn{c.params, plan, scratch.data()}};
    for (int i = 0; i < n_run; i++) lkv::latent_attn_combine(problems, i, n_run);
    for (size_t i = scratch.size() - 64; i < scratch.size(); i++) CHECK(scratch[i] == guard);
    return out;
}

void compare(const AttnShape& shape) {
    AttnCase c(shape);
    const std::vector<double> want = c.oracle();
    const double tolerance = tolerance_of(c.params);
    for (const auto& [planned, threads] : {std::pair{1, 1}, {2, 2}, {5, 5}, {5, 2}, {2, 5}}) {
        const double error = relative_error(run(c, planned, threads), want);
        CHECK_MSG(error <= tolerance, shape.name + ", threads " + std::to_string(planned) + "/" +
                                          std::to_string(threads) + ": relative error " + std::to_string(error));
    }
    const std::vector<float> got = run(c, 2, 2);
    for (const Perturb perturb : {Perturb::score, Perturb::value}) {
        CHECK_MSG(relative_error(got, c.oracle(perturb)) > tolerance, shape.name + ": a term 1 % off goes unseen");
    }
}

void beside() {
    for (const auto& [full, latents] : lkv::test::shapes_beside()) {
        lkv::test::Beside c{AttnCase(full), AttnCase(latents)};
        const lkv::LatentAttnPlan plans[] = {lkv::latent_attn_plan(c.full.params, 2),
                                             lkv::latent_attn_plan(c.latents.params, 2)};
        std::vector<float> scratch[] = {std::vector<float>(plans[0].scratch_floats),
                                        std::vector<float>(plans[1].scratch_floats)};
        std::vector<float> out(static_cast<size_t>(c.full.n_out()), NAN);
        c.full.params.out = out.data();
        for (int i = 0; i < 2; i++) {
            lkv::latent_attn_partial(c.full.params, plans[0], scratch[0].data(), i, 2);
            lkv::latent_attn_partial(c.latents.params, plans[1], scratch[1].data(), i, 2);
        }
        const std::array problems{lkv::PartialAttn{c.full.params, plans[0], scratch[0].data()},
                                  lkv::PartialAttn{c.latents.params, plans[1], scratch[1].data()}};
        for (int i = 0; i < 2; i++) lkv::latent_attn_combine(problems, i, 2);
        const double error = relative_error(out, c.oracle());
        const double tolerance = tolerance_of(c.latents.params);
        CHECK_MSG(error <= tolerance, full.name + ": relative error " + std::to_string(error));
        if (latents.n_past > 0) CHECK_MSG(relative_error(out, c.oracle(Perturb::score)) > tolerance, full.name);
    }
}

// A logit without a value, of a problem alone and of two with one softmax: as if the latter had a token more.
void sinks() {
    lkv::test::masks([](AttnShape s) {
        s.name += ", sinks";
        s.sinks = true;
        compare(s);
        AttnCase c(s);
        AttnShape without = s;
        without.sinks = false;
        CHECK_MSG(relative_error(run(c, 2, 2), AttnCase(without).oracle()) > integers, s.name);
    });
}

// Queries as bytes: a fraction of what codes of 4 bits lose.
void queries_in_bytes() {
    std::vector<float> q(100);
    for (size_t c = 0; c < q.size(); c++) q[c] = std::sin(static_cast<float>(c * c));
    std::vector<int32_t> n(q.size());
    const float step = lkv::round_query<4>(q, n.data());
    for (size_t c = 0; c < q.size(); c++) {
        CHECK(std::abs(n[c]) <= lkv::byte_query);
        CHECK(std::fabs(static_cast<float>(n[c]) * step - q[c]) <= 0.501f * step);
    }
    CHECK(step < 1.0f / 126.0f);
    for (const auto& segments : {std::vector<lkv::SegmentSpec>{{lkv::Format::q4, 64}, {lkv::Format::q1, 64}},
                                 std::vector<lkv::SegmentSpec>{{lkv::Format::q8, 32}, {lkv::Format::q2, 96}},
                                 std::vector<lkv::SegmentSpec>{{lkv::Format::n8, 32}, {lkv::Format::n2, 96}}}) {
        AttnShape s;
        s.name = "queries in bytes";
        s.k_group = s.n_kv;
        s.k_ranks = {128};
        s.k_segments = segments;
        s.any_query = true;
        AttnCase c(s);
        const double error = relative_error(run(c, 2, 2), c.oracle());
        CHECK_MSG(error > integers && error <= 0.04, s.name + ": relative error " + std::to_string(error));
    }
}

// A query that sees nothing gets zeros, whatever the cache holds.
void nothing_visible() {
    for (const int n_tokens : {1, 140}) {
        AttnShape s;
        s.n_tokens = n_tokens;
        AttnCase c(s);
        std::vector<int32_t> other(static_cast<size_t>(c.params.n_tokens), 5);
        c.params.q_seq = other.data();
        for (const float x : run(c, 2, 2)) CHECK(x == 0.0f);
    }
}

// Scores far outside exp's range, and weights that underflow.
void extreme_scores() {
    AttnShape s;
    s.name = "scores in the thousands";
    s.n_tokens = 5;
    AttnCase c(s);
    std::vector<float> q(c.params.q, c.params.q + int64_t{c.params.n_tokens} * c.params.n_head * c.params.q_width);
    for (float& x : q) x *= 1000.0f;
    c.params.q = q.data();
    CHECK_MSG(relative_error(run(c, 2, 2), c.oracle()) <= 1e-3, s.name);  // f32 rounding of scores near 10^4
}

void refusals() {
    AttnShape s;
    AttnCase c(s);
    c.params.k_group = 3;
    CHECK_THROWS(lkv::latent_attn_plan(c.params, 1), "expected a k_group that divides n_kv = 2; got 3");
    c.params.k_group = 2;
    CHECK_THROWS(lkv::latent_attn_plan(c.params, 1), "expected 1 groups in a K row; got 2");
    c.params.k_group = 1;
    c.params.q_width = 48;
    CHECK_THROWS(lkv::latent_attn_plan(c.params, 1), "expected at most 48 channels in a group of a K row; got 64");
    c.params.q_width = 64;
    const lkv::RowPlan in_token_blocks = lkv::RowPlan::uniform(2, 64, lkv::Format::c4);
    c.params.regions[0].v = in_token_blocks.view();
    CHECK_THROWS(lkv::latent_attn_plan(c.params, 1), "[latent_attn] expected single rows of V; got blocks");
}

}  // namespace

int main() {
    lkv::test::paths_and_shapes(compare);
    lkv::test::wide_heads(compare);
    lkv::test::formats(compare);
    lkv::test::scaled_rows(compare);
    lkv::test::regions(compare);
    lkv::test::masks(compare);
    lkv::test::blocks(compare);
    sinks();
    beside();
    queries_in_bytes();
    nothing_visible();
    extreme_scores();
    refusals();
    return lkv::test::report("latent_attn");
}
