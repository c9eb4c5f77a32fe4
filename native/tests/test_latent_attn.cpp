// The CPU kernel against the contract in double, over paths, groups, ranks, formats, regions, batches and threads.
#include <limits>
#include <vector>

#include "attn_case.h"
#include "check.h"
#include "ops/cpu/latent_attn.h"

namespace {

using lkv::Format;
using lkv::test::AttnCase;
using lkv::test::AttnShape;
using lkv::test::Perturb;
using lkv::test::relative_error;

constexpr double tolerance = 2e-5;

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
    for (int i = 0; i < n_run; i++) lkv::latent_attn_combine(c.params, plan, scratch.data(), i, n_run);
    for (size_t i = scratch.size() - 64; i < scratch.size(); i++) CHECK(scratch[i] == guard);
    return out;
}

void compare(const AttnShape& shape) {
    AttnCase c(shape);
    const std::vector<double> want = c.oracle();
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

struct Path {
    const char* name;
    bool k_rebuild;
    bool k_latent;
    bool v_latent;
};

constexpr Path paths[] = {
    {"full/full", false, false, false},  {"rebuild/latent", true, true, true}, {"rotated/latent", false, true, true},
    {"rebuild/full", true, true, false}, {"full/latent", false, false, true},
};

// Ranks that fall with the group and are no multiple of the 6-row block or the 64-channel merge.
std::vector<int> ragged(int n_groups, int group_width) {
    std::vector<int> ranks;
    for (int g = 0; g < n_groups; g++) ranks.push_back(std::max(16, (group_width * 3 / 4 - 16 * g) / 16 * 16));
    return ranks;
}

void paths_and_shapes() {
    struct Heads {
        int n_kv, rep, head_dim, k_group, v_group;
    };
    constexpr Heads heads[] = {{4, 1, 64, 1, 1}, {4, 4, 64, 4, 4},  {4, 1, 80, 2, 4},
                               {2, 2, 96, 2, 1}, {3, 1, 128, 1, 3}, {2, 3, 40, 1, 2}};
    unsigned seed = 1;
    for (const Path& path : paths) {
        for (const Heads& h : heads) {
            for (const int n_tokens : {1, 3, 64, 130}) {
                AttnShape s;
                s.n_kv = h.n_kv;
                s.rep = h.rep;
                s.head_dim = h.head_dim;
                s.k_group = path.k_latent ? h.k_group : 1;
                s.v_group = path.v_latent ? h.v_group : 1;
                s.k_rebuild = path.k_rebuild;
                s.v_latent = path.v_latent;
                if (path.k_latent) s.k_ranks = ragged(h.n_kv / s.k_group, s.k_group * h.head_dim);
                if (path.v_latent) s.v_ranks = ragged(h.n_kv / s.v_group, s.v_group * h.head_dim);
                s.n_tokens = n_tokens;
                s.n_past = n_tokens == 64 ? 0 : 150;
                s.neox = seed % 2 == 0;
                s.bias = seed % 3 == 0;
                s.norm = seed % 5 == 0;
                s.permute = seed % 2 == 1;
                s.seed = seed++;
                s.name = std::string(path.name) + ", " + std::to_string(h.n_kv) + " x " + std::to_string(h.rep) +
                         " heads of " + std::to_string(h.head_dim) + ", " + std::to_string(n_tokens) + " tokens";
                compare(s);
            }
        }
    }
}

void formats() {
    for (int f = 1; f < lkv::n_formats; f++) {
        const auto format = static_cast<Format>(f);
        for (const int n_tokens : {1, 2, 40}) {
            AttnShape s;
            s.name = std::string(lkv::format_name(format)) + ", " + std::to_string(n_tokens) + " tokens";
            s.k_formats = {format};
            s.v_formats = {format};
            s.n_tokens = n_tokens;
            s.permute = true;
            s.seed = static_cast<unsigned>(f);
            compare(s);
            s.name += ", latent";
            s.k_rebuild = s.v_latent = true;
            s.k_ranks = {64, 32};
            s.v_ranks = {32, 96};
            compare(s);
        }
    }
}

void regions() {
    for (const Path& path : paths) {
        for (const int n_tokens : {1, 70}) {
            AttnShape s;
            s.name = std::string("three regions, ") + path.name + ", " + std::to_string(n_tokens) + " tokens";
            s.n_kv = 4;
            s.k_rebuild = path.k_rebuild;
            s.v_latent = path.v_latent;
            if (path.k_latent) {
                s.k_group = 2;
                s.k_ranks = {96, 64};
            }
            if (path.v_latent) {
                s.v_group = 4;
                s.v_ranks = {208};
            }
            s.k_formats = {Format::f16, Format::f16, Format::q4};
            s.v_formats = {Format::f16, Format::q8, Format::g3};
            s.dropped = 32;
            s.n_tokens = n_tokens;
            s.n_past = 230;
            s.permute = true;
            compare(s);
            AttnShape hollow = s;
            hollow.name += ", one that keeps no channel of a group";
            hollow.dropped = 96;
            compare(hollow);
            s.name += ", one empty";
            s.k_formats = {Format::f16, Format::f16};
            s.v_formats = {Format::f16, Format::f16};
            s.first_pos = 10000;
            AttnCase c(s);
            c.params.regions[0].n_slots = 0;
            CHECK_MSG(relative_error(run(c, 2, 2), c.oracle()) <= tolerance, s.name);
        }
    }
}

void masks() {
    for (const int n_tokens : {1, 9, 100}) {
        for (const Path& path : paths) {
            AttnShape s;
            s.k_rebuild = path.k_rebuild;
            s.v_latent = path.v_latent;
            if (path.k_latent) s.k_ranks = {48, 64};
            if (path.v_latent) s.v_ranks = {64, 48};
            s.n_tokens = n_tokens;
            s.permute = true;
            const std::string name = std::string(path.name) + ", " + std::to_string(n_tokens) + " tokens";
            s.name = "window, " + name;
            s.window = 33;
            compare(s);
            s.window = 0;
            s.name = "ALiBi, " + name;
            s.alibi = true;
            compare(s);
            s.alibi = false;
            s.name = "three sequences, " + name;
            s.n_seq = 3;
            compare(s);
            s.name = "late positions, " + name;
            s.first_pos = 1000000;
            s.n_rot = 32;
            compare(s);
        }
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
}

}  // namespace

int main() {
    paths_and_shapes();
    formats();
    regions();
    masks();
    nothing_visible();
    extreme_scores();
    refusals();
    return lkv::test::report("latent_attn");
}
