// What the slots of a layer gather, on a GPU, against the contract in double.
#include <array>
#include <cstdlib>
#include <span>
#include <vector>

#include "attn/attn_matrix.h"
#include "check.h"
#include "cuda/cuda_case.h"
#include "ops/cuda/mass/mass.h"

namespace {

using lkv::test::AttnCase;
using lkv::test::AttnShape;
using lkv::test::cuda_check;
using lkv::test::DeviceBuffer;
using lkv::test::DeviceCase;
using lkv::test::Perturb;
using lkv::test::query_weights;
using lkv::test::relative_error;

constexpr double rounded_tolerance = 1.2e-3;  // rows are rounded to f16, and so are factors of rebuilt keys
constexpr double scaled_tolerance = 4e-3;     // and the offset of codes that a row's scale makes (test_cuda_attn.cpp)

double tolerance_of(const lkv::LatentAttnParams& p) {
    bool is_scaled = false;
    for (int r = 0; r < p.n_regions; r++) is_scaled = is_scaled || lkv::has_group_scales(p.regions[r].k);
    return is_scaled ? scaled_tolerance : rounded_tolerance;
}
constexpr int layer = 3;

// Masses of problems with one softmax. n_parts: 0: as planned
std::vector<float> run(std::span<AttnCase*> cases, const std::vector<lkv::QueryWeight>& weights, bool has_noise,
                       int n_parts = 0) {
    const lkv::cuda::Device& device = lkv::test::device_limits();
    lkv::cuda::MassArgs args{};
    std::vector<DeviceCase> problems;
    std::vector<DeviceBuffer> masses;
    problems.reserve(cases.size());
    int capacity = 0;
    for (AttnCase* of : cases) {
        const lkv::LatentAttnParams& p = of->params;
        problems.emplace_back(p, device);
        for (int r = 0; r < p.n_regions; r++) {
            const auto n = static_cast<size_t>(p.regions[r].n_slots);
            masses.emplace_back(std::vector<float>(n, NAN));
            args.mass[args.n_problems][r] = masses.back().as<float>();
            capacity += p.regions[r].n_slots;
        }
        args.problems[args.n_problems++] = problems.back().args;
    }
    std::vector<lkv::cuda::QueryMass> queries;
    for (const lkv::QueryWeight& of : weights) queries.push_back({of.weight, 1.0f / of.temperature});
    const DeviceBuffer device_weights(queries);
    args.weights = device_weights.as<lkv::cuda::QueryMass>();
    const lkv::LatentAttnParams& p = cases.front()->params;
    args.sinks = problems.front().keep(p.sinks, static_cast<size_t>(p.n_head));
    args.has_noise = has_noise ? 1 : 0;
    args.layer = layer;
    lkv::cuda::plan_masses(args, capacity, device);
    if (n_parts > 0) args.n_parts = n_parts;
    const DeviceBuffer parts(std::vector<uint8_t>(lkv::cuda::mass_part_bytes(args), 0xff));
    args.parts = parts.as<float2>();
    cuda_check(lkv::cuda::add_up_masses(args, nullptr), "adding up masses");
    cuda_check(cudaDeviceSynchronize(), "masses");
    std::vector<float> all;
    for (const DeviceBuffer& of : masses) {
        const auto some = of.download<float>();
        all.insert(all.end(), some.begin(), some.end());
    }
    return all;
}

void compare(const AttnShape& shape) {
    AttnCase c(shape);
    const double tolerance = tolerance_of(c.params);
    std::array cases{&c};
    for (const bool has_noise : {false, true}) {
        const std::vector<lkv::QueryWeight> weights = query_weights(c.params.n_tokens, has_noise);
        const std::vector<double> want = c.masses(weights, has_noise, layer);
        const std::vector<float> got = run(cases, weights, has_noise);
        const double error = relative_error(got, want);
        CHECK_MSG(error <= tolerance, shape.name + ": relative error " + std::to_string(error));
        for (const Perturb perturb : {Perturb::score, Perturb::value}) {
            // over many queries a score that is off averages out, as roundings do
            CHECK_MSG(relative_error(got, c.masses(weights, has_noise, layer, perturb)) > 2 * error,
                      shape.name + ": a term 1 % off goes unseen");
        }
        CHECK_MSG(relative_error(got, c.masses(weights, !has_noise, layer)) > tolerance, shape.name + ": no noise");
    }
    const std::vector<lkv::QueryWeight> weights = query_weights(c.params.n_tokens, false);
    CHECK_MSG(relative_error(run(cases, weights, false, 3), c.masses(weights, false, layer)) <= tolerance,
              shape.name + ": three parts");
}

// Wider latents than a tile of 16 slots has room for.
void wide() {
    AttnShape s;
    s.name = "one latent of 1536 channels";
    s.n_kv = 4;
    s.k_group = 4;
    s.k_ranks = {1536};
    s.n_past = 40;
    s.v_latent = true;
    s.v_group = 4;
    s.v_ranks = {64};
    compare(s);
}

// Full rows of exact windows and latents: the softmax of the two, where every query spreads a mass of 1 a head.
void beside(int every) {
    int i = 0;
    for (const auto& [full, latents] : lkv::test::shapes_beside()) {
        if (i++ % every != 0) continue;
        AttnCase a(full);
        AttnCase b(latents);
        const std::vector<lkv::QueryWeight> weights(static_cast<size_t>(a.params.n_tokens), {1.0f, 1.0f});
        std::array cases{&a, &b};
        const std::vector<float> got = run(cases, weights, false);
        double sum = 0.0;
        for (const float mass : got) sum += double{mass};
        const int rows = a.params.n_tokens * a.params.n_head;
        CHECK_MSG(std::abs(sum - rows) < 1e-4 * rows, full.name + ": " + std::to_string(sum));
        const std::vector<float> alone = run(std::span(cases).first(1), weights, false);
        if (latents.n_past > 0 && full.n_past > 0) {
            CHECK_MSG(relative_error(std::vector(got.begin(), got.begin() + static_cast<ptrdiff_t>(alone.size())),
                                     std::vector<double>(alone.begin(), alone.end())) > 0.01,
                      full.name);
        }
    }
}

}  // namespace

// [every nth case]
int main(int argc, char** argv) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::printf("cuda_mass: skipped: no CUDA device\n");
        return 77;
    }
    const int every = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    int i = 0;
    const auto some = [&](const AttnShape& shape) {
        if (i++ % every == 0) compare(shape);
    };
    lkv::test::paths_and_shapes(some);
    lkv::test::regions(some);
    lkv::test::formats(some);
    lkv::test::masks(some);
    lkv::test::masks([&](AttnShape s) {
        s.name += ", sinks";
        s.sinks = true;
        some(s);
    });
    wide();
    beside(every);
    return lkv::test::report("cuda_mass");
}
