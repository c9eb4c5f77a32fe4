// Speed of the CPU kernel: milliseconds, GB/s of stored rows read, GFLOP/s of the contract's products. A shape is timed
// only after a small copy of it agrees with the oracle.   bench_latent_attn [threads [depth [filter]]]
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "attn/attn_case.h"
#include "check.h"
#include "ops/cpu/latent_attn.h"

namespace {

using lkv::Format;
using lkv::test::AttnCase;
using lkv::test::AttnShape;

class Runner {
public:
    Runner(const AttnShape& shape, int n_threads)
        : case_(shape),
          n_threads_(n_threads),
          plan_(lkv::latent_attn_plan(case_.params, n_threads)),
          scratch_(plan_.scratch_floats, std::numeric_limits<float>::quiet_NaN()),
          out_(static_cast<size_t>(case_.n_out()), std::numeric_limits<float>::quiet_NaN()) {
        case_.params.out = out_.data();
    }

    // Seconds of the fastest of n_repeat calls: other work on the machine only ever adds.
    double run(int n_repeat) {
        double best = std::numeric_limits<double>::infinity();
        std::barrier sync(n_threads_);
        auto work = [&](int ith) {
            for (int i = 0; i < n_repeat; i++) {
                sync.arrive_and_wait();
                const auto begin = std::chrono::steady_clock::now();
                lkv::latent_attn_partial(case_.params, plan_, scratch_.data(), ith, n_threads_);
                sync.arrive_and_wait();
                lkv::latent_attn_combine(std::array{lkv::PartialAttn{case_.params, plan_, scratch_.data()}}, ith,
                                         n_threads_);
                sync.arrive_and_wait();
                if (ith == 0)
                    best =
                        std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
            }
        };
        std::vector<std::thread> others;
        for (int i = 1; i < n_threads_; i++) others.emplace_back(work, i);
        work(0);
        for (std::thread& t : others) t.join();
        return best;
    }

    double error() const { return lkv::test::relative_error(out_, case_.oracle()); }

    double bytes() const {
        double n = 0;
        for (int r = 0; r < case_.params.n_regions; r++) {
            const lkv::RegionView& region = case_.params.regions[r];
            n += 1.0 * region.n_slots * (region.k.row_bytes + region.v.row_bytes);
        }
        return n;
    }

    // Products with K and V for the pairs a causal mask leaves, and rebuilding every K once.
    double flops() const {
        const lkv::LatentAttnParams& p = case_.params;
        double pairs = 0;
        double slots = 0;
        for (int r = 0; r < p.n_regions; r++) slots += p.regions[r].n_slots;
        for (int t = 0; t < p.n_tokens; t++) pairs += p.q_pos[t] + 1;
        double n = 2.0 * pairs * p.n_head * (p.q_width + (p.v_b != nullptr ? p.v_rank_max : p.head_dim));
        if (p.k_b != nullptr) n += 2.0 * slots * p.n_kv * p.k_rank_max * p.head_dim;
        return n;
    }

private:
    AttnCase case_;
    int n_threads_;
    lkv::LatentAttnPlan plan_;
    std::vector<float> scratch_;
    std::vector<float> out_;
};

std::vector<AttnShape> shapes(int depth) {
    std::vector<AttnShape> all;
    for (const int n_tokens : {1, 512}) {
        const std::string tokens = n_tokens == 1 ? "decode " : "prefill ";
        AttnShape s;
        s.n_past = depth;
        s.n_tokens = n_tokens;
        s.n_kv = 8;
        for (const Format f : {Format::f16, Format::q8_0, Format::q4_0, Format::q8, Format::q4, Format::q3, Format::q2,
                               Format::n8, Format::n4, Format::n3, Format::n2}) {
            s.k_formats = s.v_formats = {f};
            s.name = tokens + "full " + lkv::format_name(f) + ", 8 heads of 64";
            all.push_back(s);
        }
        for (const Format f : {Format::q3, Format::c4, Format::c3, Format::c2}) {
            s.k_formats = {f};
            s.v_formats = {lkv::format_of_rows(f)};
            s.name = tokens + "full " + lkv::format_name(f) + ", 8 heads of 64";
            all.push_back(s);
        }
        s.n_kv = 4;
        s.rep = 4;
        for (const Format f : {Format::f16, Format::q8_0, Format::q4, Format::c4}) {
            s.k_formats = {f};
            s.v_formats = {lkv::format_of_rows(f)};
            s.name = tokens + "full " + lkv::format_name(f) + ", 16/4 heads of 64";
            all.push_back(s);
        }
        s.n_kv = 8;
        s.rep = 1;
        s.k_formats = s.v_formats = {Format::q4};
        s.v_latent = true;
        s.k_group = s.v_group = 8;
        s.k_ranks = s.v_ranks = {256};
        s.k_rebuild = true;
        s.name = tokens + "rebuild 256/latent 256 of 512 q4";
        all.push_back(s);
        s.k_formats = {Format::c4};
        s.name = tokens + "rebuild 256/latent 256 of 512 c4";
        all.push_back(s);
        s.k_formats = {Format::q4};
        s.k_rebuild = false;
        s.name = tokens + "rotated 256/latent 256 of 512 q4";
        all.push_back(s);
        // a layer of SmolLM2-135M's default file, and one of the size of an 8B model's
        s.n_kv = s.k_group = s.v_group = 3;
        s.rep = 3;
        s.k_ranks = {128};
        s.v_ranks = {64};
        s.k_rows = {{{{Format::q4, 64}, {Format::q1, 64}}}};
        s.v_rows = {{{{Format::q4, 32}, {Format::q2, 32}}}};
        s.name = tokens + "rotated 128/latent 64 of 192 plan";
        all.push_back(s);
        s.k_rows = {{{{Format::n4, 64}, {Format::n1, 64}}}};
        s.v_rows = {{{{Format::n4, 32}, {Format::n2, 32}}}};
        s.name = tokens + "the same, scaled by the row";
        all.push_back(s);
        s.k_ranks = s.v_ranks = {192};
        s.k_rows = {{{{Format::n6, 32}, {Format::n4, 32}, {Format::n3, 32}, {Format::n2, 32}, {Format::n1, 64}}}};
        s.v_rows = {{{{Format::n6, 32}, {Format::n3, 32}, {Format::n2, 32}, {Format::n1, 96}}}};
        s.name = tokens + "192/192 of 192, a converter's plan";
        all.push_back(s);
        AttnShape full = s;
        full.k_group = full.v_group = 1;
        full.k_ranks = full.v_ranks = {};
        full.v_latent = false;
        full.k_rows = full.v_rows = {};
        full.k_formats = full.v_formats = {Format::f16};
        full.name = tokens + "full f16, 9/3 heads of 64";
        all.push_back(full);
        s.n_kv = 8;
        s.rep = 4;
        s.head_dim = 128;
        s.k_group = s.v_group = 4;
        s.k_ranks = {256, 256};
        s.v_ranks = {128, 128};
        const std::vector<lkv::SegmentSpec> k{{Format::q4, 128}, {Format::q1, 128}};
        const std::vector<lkv::SegmentSpec> v{{Format::q4, 64}, {Format::q2, 64}};
        s.k_rows = {{k, k}};
        s.v_rows = {{v, v}};
        s.name = tokens + "rotated 512/latent 256 of 1024 plan";
        all.push_back(s);
        const std::vector<lkv::SegmentSpec> one_k{{Format::n4, 128}, {Format::n1, 128}};
        const std::vector<lkv::SegmentSpec> one_v{{Format::n4, 64}, {Format::n2, 64}};
        s.k_rows = {{one_k, one_k}};
        s.v_rows = {{one_v, one_v}};
        s.name = tokens + "the same 512/256, scaled by the row";
        all.push_back(s);
        // as many bytes, of the widths that plans with scaled rows have
        const std::vector<lkv::SegmentSpec> six_k{
            {Format::n6, 32}, {Format::n4, 64}, {Format::n3, 32}, {Format::n1, 96}};
        const std::vector<lkv::SegmentSpec> six_v{
            {Format::n6, 32}, {Format::n3, 32}, {Format::n2, 32}, {Format::n1, 32}};
        s.k_rows = {{six_k, six_k}};
        s.v_rows = {{six_v, six_v}};
        s.k_ranks = {224, 224};
        s.name = tokens + "n6 n4 n3 n1/n6 n3 n2 n1";
        all.push_back(s);
    }
    return all;
}

}  // namespace

int main(int argc, char** argv) {
    const int n_threads = argc > 1 ? std::atoi(argv[1]) : 1;
    const int depth = argc > 2 ? std::atoi(argv[2]) : 3500;
    const std::string filter = argc > 3 ? argv[3] : "";
    std::printf("%d threads, depth %d\n%-42s %10s %8s %9s\n", n_threads, depth, "", "ms", "GB/s", "GFLOP/s");
    for (const AttnShape& shape : shapes(depth)) {
        if (shape.name.find(filter) == std::string::npos) continue;
        AttnShape small = shape;
        small.n_past = std::min(depth, 150);
        Runner check(small, n_threads);
        check.run(1);
        if (check.error() > 2e-4) {
            std::fprintf(stderr, "%s: relative error %g against the oracle\n", shape.name.c_str(), check.error());
            return 1;
        }
        Runner runner(shape, n_threads);
        const double s = runner.run(shape.n_tokens == 1 ? 40 : 5);
        std::printf("%-42s %10.3f %8.2f %9.1f\n", shape.name.c_str(), s * 1e3, runner.bytes() / s / 1e9,
                    runner.flops() / s / 1e9);
    }
    return 0;
}
