// The CUDA kernels on the CPU's cases, against the contract in double; rows against the CPU's bytes.
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "attn/attn_matrix.h"
#include "check.h"
#include "cuda/cuda_case.h"
#include "cuda/delta_net_case.h"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/expand/layout.h"
#include "ops/cuda/step/early_start.h"
#include "ops/cuda/step/heads_product.h"
#include "ops/cuda/step/product.h"

namespace {

using lkv::Format;
using lkv::RowLayout;
using lkv::RowPlan;
using lkv::test::AttnCase;
using lkv::test::AttnShape;
using lkv::test::cuda_check;
using lkv::test::DeviceBuffer;
using lkv::test::DeviceCase;
using lkv::test::Perturb;
using lkv::test::relative_error;

// f16 rows enter the products as they are; other rows are rounded to f16 once, rebuilt keys twice more.
constexpr double exact_tolerance = 1e-3;
constexpr double rounded_tolerance = 2.5e-3;
// The offset of codes is made of a row's scale and rounded to f16, where other rows store it: a fiftieth of what codes of 6 bits lose.
constexpr double scaled_tolerance = 4e-3;

constexpr int most_shared = 227 << 10;  // bytes of a thread block, on any GPU

std::map<std::string, double> largest;

double tolerance_of(const AttnShape& s) {
    if (lkv::format_scaled_by_group(s.k_formats.back()) || lkv::format_scaled_by_group(s.v_formats.back())) {
        return scaled_tolerance;
    }
    bool f16 = !s.k_rebuild && !s.v_latent;
    for (const Format f : s.k_formats) f16 = f16 && f == Format::f16;
    for (const Format f : s.v_formats) f16 = f16 && f == Format::f16;
    return f16 ? exact_tolerance : rounded_tolerance;
}

// Shared memory in percent, from the least with which the kernel takes the case to all that there is.
struct Cut {
    const char* name;
    int memory;
    int n_split;  // 0: as planned
};

constexpr Cut cuts[] = {{"planned", 100, 0},
                        {"the smallest tiles, 3 parts", 0, 3},
                        {"smaller tiles, 2 parts", 25, 2},
                        {"a little less memory, one part", 75, 1}};

std::string kernel_of(const DeviceCase& device) { return device.args.kernel->name; }

bool has_kernel(const std::string& name) {
    const auto& all = lkv::cuda::all_kernels();
    return std::any_of(all.begin(), all.end(), [&](const lkv::cuda::Kernel* kernel) { return kernel->name == name; });
}

// The least shared memory with which the same kernel takes the problem.
int least_memory(const lkv::LatentAttnParams& p, lkv::cuda::Device device) {
    int capacity = 0;
    for (int r = 0; r < p.n_regions; r++) capacity += p.regions[r].n_slots;
    const auto kernel = [&](int bytes) -> const lkv::cuda::Kernel* {
        device.shared_bytes = bytes;
        try {
            return lkv::cuda::plan_attention({p, capacity, device}, {}).kernel;
        } catch (const std::invalid_argument&) {
            return nullptr;
        }
    };
    int enough = device.shared_bytes;
    const lkv::cuda::Kernel* const wanted = kernel(enough);
    for (int step = 1 << 17; step >= 1 << 10; step /= 2) {
        if (enough > step && kernel(enough - step) == wanted) enough -= step;
    }
    return enough;
}

void compare(const AttnShape& shape) {
    AttnCase c(shape);
    const lkv::cuda::Device device_of = lkv::test::device_limits();
    const int least = least_memory(c.params, device_of);
    const std::vector<double> want = c.oracle();
    const double tolerance = tolerance_of(shape);
    for (const Cut& cut : cuts) {
        lkv::cuda::Device limits = device_of;
        limits.shared_bytes = least + (device_of.shared_bytes - least) * cut.memory / 100;
        DeviceCase device(c.params, limits);
        if (cut.n_split > 0) {
            // several chunks of the context
            if (device.args.chunk != 0) device.args.chunk = lkv::cuda::chunk_step * cut.n_split;
            device.args.least_tiles = 1;
            device.args.n_split = cut.n_split;
        }
        std::vector<float> got;
        try {
            got = device.run();
        } catch (const std::exception& e) {
            CHECK_MSG(false, shape.name + ", " + cut.name + ": " + e.what());
            continue;
        }
        const double error = relative_error(got, want);
        double& seen = largest[tolerance == exact_tolerance ? "f16 rows, direct" : "other rows and paths"];
        seen = std::max(seen, error);
        CHECK_MSG(error <= tolerance, shape.name + ", " + cut.name + ": relative error " + std::to_string(error));
        if (cut.n_split == 0) {
            CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > tolerance,
                      shape.name + ": scores 1 % off go unseen");
        }
    }
}

// A random row: bits that do not rise along a group, of 8, 4, 2 and 1, or scaled by the row; dropped segments last; windows keep every
// segment.
std::vector<std::vector<lkv::SegmentSpec>> random_row(std::mt19937& random, int n_groups, int rank, bool latent,
                                                      std::optional<Format> whole) {
    using enum Format;
    constexpr Format with_scales[] = {f16, q8, q4, q2, q1, none};
    constexpr Format by_row[] = {n8, n6, n4, n3, n1, none};
    const auto& falling = random() % 3 == 0 ? by_row : with_scales;
    std::vector<std::vector<lkv::SegmentSpec>> groups;
    for (int g = 0; g < n_groups; g++) {
        auto& group = groups.emplace_back();
        size_t at = random() % 4;
        for (int left = rank; left > 0;) {
            const int widest = latent ? std::min(left, 16 << random() % 5) : left;
            const int width = left - widest < 16 ? left : widest;
            group.push_back({whole.value_or(falling[latent ? at : std::min<size_t>(at, 4)]), width});
            left -= width;
            at = std::min(std::size(falling) - 1, at + random() % 3 / 2 + (random() % 6 == 0 ? 1 : 0));
        }
    }
    return groups;
}

// What a file with windows may be opened with: regions that are not there, empty or full, rows of random plans, a few tokens of several
// sequences, holes. The contract in double is the judge, for the kernel as planned.
void random_regions(unsigned seed, int n_cases) {
    std::mt19937 random(seed);
    const auto from = [&](std::initializer_list<int> of) { return *(of.begin() + random() % of.size()); };
    std::map<std::string, int> taken;
    for (int i = 0; i < n_cases; i++) {
        AttnShape s;
        const int kind = static_cast<int>(random() % 5);
        const bool k_latent = kind != 0;
        s.k_rebuild = kind >= 3;
        s.v_latent = kind == 1 || kind == 2 || kind == 4;
        s.head_dim = from({64, 128});
        s.n_kv = from({2, 4});
        s.rep = from({1, 2, 4});
        s.k_group = k_latent ? from({1, 2, s.n_kv}) : 1;
        s.v_group = s.v_latent ? (random() % 4 == 0 ? from({1, 2}) : s.k_group) : 1;
        const auto rank = [&](int group) { return 16 * (1 + static_cast<int>(random() % 8) * group); };
        const int k_rank = k_latent ? std::min(rank(s.k_group), s.k_group * s.head_dim) : s.head_dim;
        const int v_rank = s.v_latent ? std::min(rank(s.v_group), s.v_group * s.head_dim) : s.head_dim;
        if (k_latent) s.k_ranks.assign(static_cast<size_t>(s.n_kv / s.k_group), k_rank);
        if (s.v_latent) s.v_ranks.assign(static_cast<size_t>(s.n_kv / s.v_group), v_rank);
        const int n_regions = from({1, 2, 3, 3});
        s.k_formats.assign(static_cast<size_t>(n_regions), Format::q8);  // not f16: see tolerance_of
        s.v_formats = s.k_formats;
        for (int r = 0; r < n_regions; r++) {
            std::optional<Format> whole;
            if (r + 1 < n_regions) whole = random() % 4 == 0 ? Format::q8 : Format::f16;
            s.k_rows.push_back(random_row(random, s.n_kv / s.k_group, k_rank, k_latent, whole));
            s.v_rows.push_back(random_row(random, s.n_kv / s.v_group, v_rank, s.v_latent, whole));
            s.absent.push_back(r + 1 < n_regions && random() % 3 == 0);
        }
        s.region_tokens = {from({0, 1, 4}), from({0, 1, 20})};
        s.n_tokens = from({1, 1, 1, 2, 3, 5, 8});
        s.n_seq = from({1, 1, 2, 3});
        s.n_past = from({0, 14, 70, 150}) + 7 * s.n_seq;
        s.permute = random() % 2 == 0;
        s.seed = static_cast<unsigned>(random());
        s.name = "random case " + std::to_string(i) + " of seed " + std::to_string(seed);
        const AttnCase c(s);
        DeviceCase device(c.params);
        s.name += ", " + kernel_of(device);
        taken[kernel_of(device)]++;
        const std::vector<float> got = device.run();
        const double error = relative_error(got, c.oracle());
        CHECK_MSG(error <= scaled_tolerance, s.name + ": relative error " + std::to_string(error));
        if (s.n_past >= 70) {
            CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > scaled_tolerance,
                      s.name + ": scores 1 % off go unseen");
        }
    }
    for (const auto& [kernel, n] : taken) std::printf("random cases of %s: %d\n", kernel.c_str(), n);
}

// How an expanding plan expands.
lkv::cuda::ExpandBy expands_by(const lkv::cuda::Plan& plan) {
    return plan.kernel->name == std::string("expand") ? plan.as<lkv::cuda::ExpandPlan>().by
                                                      : plan.as<lkv::cuda::ExpandKeysPlan>().by;
}
void expand_by(lkv::cuda::Plan& plan, lkv::cuda::ExpandBy by) {
    const auto set = [&](auto own) {
        own.by = by;
        plan.keep(own);
    };
    if (plan.kernel->name == std::string("expand")) {
        set(plan.as<lkv::cuda::ExpandPlan>());
    } else {
        set(plan.as<lkv::cuda::ExpandKeysPlan>());
    }
}

// A short case of every kernel.
void samples() {
    struct Sample {
        const char* kernel;
        int n_kv, rep, group, k_rank, v_rank;  // rank 0: full
        bool rebuild;
        Format format;
        int n_tokens = 1, n_past = 150, n_regions = 1;
        int n_split = 0;  // 0: as planned
        int head_dim = 128;
    };
    constexpr Sample all[] = {
        {"decode", 2, 4, 1, 0, 0, false, Format::f16},
        {"decode", 2, 4, 1, 0, 0, false, Format::q4, 1, 200, 3},
        {"decode", 2, 4, 1, 0, 0, false, Format::q8_0, 1, 300},
        {"decode", 3, 2, 1, 0, 0, false, Format::q4_0, 2, 300, 1, 0, 64},  // rows that start on no 16 bytes
        {"decode", 2, 6, 1, 0, 0, false, Format::q4_0, 1, 200, 3},
        {"decode", 2, 1, 1, 0, 0, false, Format::q8_0, 8, 900, 1, 1, 64},
        {"decode", 3, 3, 1, 0, 0, false, Format::q8_0, 1, 100, 1, 0, 96},  // three blocks a head
        {"decode", 1, 4, 1, 0, 0, false, Format::q8_0, 1, 200, 1, 0, 256},
        {"wide", 2, 6, 1, 0, 0, false, Format::q8_0, 3, 200},
        {"wide", 2, 6, 1, 0, 0, false, Format::q4_0, 5, 200, 2},
        {"expand", 2, 13, 1, 0, 0, false, Format::q8_0, 40, 40},
        {"expand", 1, 13, 1, 0, 0, false, Format::q4_0, 40, 140, 3},
        {"prefill", 2, 4, 1, 0, 0, false, Format::q8_0, 40, 40, 1, 0, 96},
        {"prefill", 2, 4, 1, 0, 0, false, Format::q4_0, 40, 40, 1, 0, 32},
        {"decode", 4, 2, 2, 128, 96, false, Format::q5},
        {"decode", 2, 4, 1, 64, 64, true, Format::q4},
        {"decode", 2, 4, 1, 64, 64, true, Format::q8, 1, 1500, 1, 1},
        {"decode", 4, 4, 2, 128, 112, true, Format::f16, 1, 1000, 1, 3},
        {"decode", 2, 4, 2, 176, 256, true, Format::q5, 1, 100, 3},
        {"decode", 4, 4, 4, 256, 256, true, Format::q8, 1, 1060, 1, 3},
        {"decode", 4, 4, 4, 224, 96, true, Format::f16, 1, 200, 3},
        {"mla", 4, 4, 4, 256, 192, false, Format::q4},
        {"wide", 4, 4, 4, 256, 192, false, Format::q3},
        {"mla", 4, 4, 4, 256, 192, false, Format::n4},
        {"mla", 4, 4, 4, 128, 192, false, Format::n6, 1, 300, 1, 1},
        {"mla", 4, 3, 4, 256, 128, false, Format::n3, 2},
        {"mla", 4, 4, 4, 256, 192, false, Format::q4, 3, 300, 1, 2},
        {"mla", 4, 4, 4, 128, 256, false, Format::q2, 8, 200},
        {"wide", 4, 4, 4, 256, 192, false, Format::n5},
        {"expand keys", 4, 4, 4, 320, 384, true, Format::n3},
        {"decode", 2, 4, 1, 0, 0, false, Format::n2, 1, 200, 3},
        {"expand", 1, 13, 1, 0, 0, false, Format::n4, 40, 40},
        {"expand", 2, 4, 1, 64, 64, true, Format::n2, 70, 270},
        {"mla", 2, 5, 2, 64, 512, false, Format::f16},           // eight thread blocks merge a head's parts
        {"mla", 4, 2, 4, 64, 256, false, Format::q8, 2},         // a head has four rows, of two tokens
        {"mla", 4, 3, 4, 64, 256, false, Format::q8, 1, 12000},  // nearly as many parts as there can be
        // many tiles a part
        {"mla", 4, 4, 4, 256, 192, false, Format::q4, 1, 1010, 1, 1},
        {"mla", 4, 2, 4, 320, 512, false, Format::q1, 4, 700, 1, 1},
        {"mla", 8, 1, 8, 512, 640, false, Format::q2, 1, 1100, 1, 1},
        {"mla", 2, 2, 2, 96, 128, false, Format::f16, 1, 500, 1, 1},
        {"wide", 4, 3, 4, 64, 256, false, Format::q5, 1, 12000},
        {"wide", 16, 1, 16, 1280, 1536, false, Format::q8, 1, 70},
        {"direct", 2, 1, 2, 1088, 1088, false, Format::q8, 20, 40},
        {"direct", 2, 4, 1, 64, 64, true, Format::q8, 3, 40, 1, 0, 192},
        {"prefill", 2, 4, 1, 0, 0, false, Format::q4, 40, 40, 1, 0, 80},
        {"prefill", 2, 4, 2, 192, 128, false, Format::f16, 40, 40},
        {"prefill", 8, 1, 8, 768, 832, false, Format::q5, 20, 60},
        {"mla", 4, 2, 4, 256, 192, false, Format::q4, 20, 90},
        {"mla", 8, 1, 8, 224, 256, false, Format::n3, 9, 60},
        {"expand keys", 4, 4, 4, 320, 384, true, Format::q4},
        {"expand keys", 8, 3, 8, 512, 320, true, Format::q8, 2, 300},
        {"expand keys", 2, 4, 2, 192, 128, true, Format::q2, 5, 500},
        {"expand keys", 4, 2, 4, 288, 128, true, Format::f16},
        {"expand", 2, 4, 1, 64, 64, true, Format::q4, 9, 40},
        {"expand", 1, 4, 1, 64, 64, true, Format::q8, 70, 270},
        {"expand", 2, 4, 2, 208, 240, true, Format::q4, 9, 140},  // ranks that are no whole units
    };
    for (const Sample& of : all) {
        AttnShape s;
        s.name = std::string(of.kernel) + ", " + lkv::format_name(of.format) + ", ranks " + std::to_string(of.k_rank) +
                 " and " + std::to_string(of.v_rank) + " of " + std::to_string(of.group) + " heads";
        s.head_dim = of.head_dim;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.rope_base = 5e5;
        s.k_rebuild = of.rebuild;
        s.k_group = s.v_group = of.group;
        if (of.k_rank > 0) s.k_ranks.assign(static_cast<size_t>(of.n_kv / of.group), of.k_rank);
        if (of.v_rank > 0) s.v_ranks.assign(static_cast<size_t>(of.n_kv / of.group), of.v_rank);
        s.v_latent = of.v_rank > 0;
        s.k_formats = s.v_formats = {of.format};
        if (of.n_regions > 1) s.k_formats = s.v_formats = {Format::f16, of.format, of.format};
        s.uniform = of.n_regions == 1;
        s.n_tokens = of.n_tokens;
        s.n_past = of.n_past;
        AttnCase c(s);
        lkv::cuda::Device limits = lkv::test::device_limits();
        DeviceCase device(c.params, limits);
        // where shared memory is small another one may take it, but not the slow one
        const bool expected = kernel_of(device) == of.kernel ||
                              (limits.shared_bytes < 128 * 1024 && kernel_of(device) != std::string("direct"));
        CHECK_MSG(!has_kernel(of.kernel) || expected, s.name + ": planned for " + kernel_of(device));
        if (of.n_split != 0) device.args.n_split = of.n_split;
        const std::vector<float> got = device.run();
        const double error = relative_error(got, c.oracle());
        const double tolerance = tolerance_of(s);
        CHECK_MSG(error <= tolerance, s.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > tolerance, s.name + ": scores 1 % off go unseen");
        if (device.args.chunk == 0) continue;
        const lkv::cuda::ExpandBy planned = expands_by(device.args);
        limits.warpgroups = false;
        DeviceCase other(c.params, limits);
        for (const auto by : {lkv::cuda::ExpandBy::chunks, lkv::cuda::ExpandBy::units}) {
            if (by >= planned || other.args.chunk == 0) continue;
            expand_by(other.args, by);
            CHECK_MSG(relative_error(other.run(), c.oracle()) <= tolerance,
                      s.name + ": expanded by way " + std::to_string(static_cast<int>(by)));
        }
        if (device.args.chunk <= lkv::cuda::chunk_step) continue;
        device.args.chunk = lkv::cuda::chunk_step;  // several chunks
        CHECK_MSG(relative_error(device.run(), c.oracle()) <= tolerance, s.name + ": in several chunks");
    }
}

// Heads of two query heads each that share one latent of K and of V in q4.
AttnShape one_latent(const char* name, int heads, int k_rank, int v_rank, int n_past) {
    AttnShape s;
    s.name = name;
    s.v_latent = true;
    s.n_kv = s.k_group = s.v_group = heads;
    s.rep = 2;
    s.k_ranks = {k_rank};
    s.v_ranks = {v_rank};
    s.k_formats = s.v_formats = {Format::q4};
    s.uniform = true;
    s.n_past = n_past;
    return s;
}

// Chunks of expanded keys add up in the same parts, however many of these each would choose for itself: 8 steps of 32 slots in 7 parts
// are four times two, the 5 steps behind them five.
void uneven_chunks() {
    AttnShape s = one_latent("expanded keys in uneven chunks", 4, 320, 256, 405);
    s.k_rebuild = true;
    AttnCase c(s);
    DeviceCase device(c.params);
    CHECK(kernel_of(device) == "expand keys");
    device.args.chunk = 256;
    device.args.n_split = 7;
    const double error = relative_error(device.run(), c.oracle());
    CHECK_MSG(error <= tolerance_of(s), s.name + ": relative error " + std::to_string(error));
}

// Parts that start late have less work: 42 steps of 32 slots are 13, 13, 8 and 8.
void late_parts() {
    const AttnShape s = one_latent("parts that start late", 2, 96, 64, 1340);
    AttnCase c(s);
    DeviceCase device(c.params);
    CHECK(kernel_of(device) == "mla");
    device.args.n_split = 4;
    auto mla = device.args.as<lkv::cuda::MlaPlan>();
    mla.late_parts = 2;
    device.args.keep(mla);
    const double error = relative_error(device.run(), c.oracle());
    CHECK_MSG(error <= tolerance_of(s), s.name + ": relative error " + std::to_string(error));
}

// Latents beside full rows of exact windows.
void beside() {
    for (const auto& [full, latents] : lkv::test::shapes_beside()) {
        const lkv::test::Beside c{AttnCase(full), AttnCase(latents)};
        DeviceCase of_full(c.full.params);
        DeviceCase of_latents(c.latents.params);
        of_latents.keeps_parts = true;
        const std::vector<float> got = of_latents.run_beside(of_full);
        const double error = relative_error(got, c.oracle());
        const double tolerance = tolerance_of(latents);
        CHECK_MSG(error <= tolerance,
                  full.name + " (" + of_latents.args.kernel->name + "): relative error " + std::to_string(error));
        if (latents.n_past > 0) CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > tolerance, full.name);
    }
}

// Shapes of the models this is for: head_dim 128, grouped queries, wide joint latents.
void wide() {
    struct Wide {
        const char* name;
        int n_kv, rep, k_rank, v_rank, k_group, v_group;
        bool rebuild;
    };
    constexpr Wide cases[] = {
        {"8B full", 8, 4, 0, 0, 1, 1, false},
        {"8B joint rotated", 8, 4, 512, 512, 8, 8, false},
        {"8B joint rotated, wide", 8, 4, 1024, 768, 8, 8, false},
        {"8B rebuild", 8, 4, 256, 256, 4, 4, true},
        {"7B joint rotated", 16, 1, 1280, 2048, 16, 16, false},
        {"7B rebuild joint", 8, 1, 1024, 1024, 8, 8, true},
    };
    for (const Wide& w : cases) {
        for (const Format f : {Format::f16, Format::q4}) {
            for (const int n_tokens : {1, 20, 70}) {
                AttnShape s;
                s.name = std::string(w.name) + ", " + lkv::format_name(f) + ", " + std::to_string(n_tokens) + " tokens";
                s.head_dim = 128;
                s.n_kv = w.n_kv;
                s.rep = w.rep;
                s.k_rebuild = w.rebuild;
                s.k_group = w.k_group;
                s.v_group = w.v_group;
                if (w.k_rank > 0) s.k_ranks.assign(static_cast<size_t>(w.n_kv / w.k_group), w.k_rank);
                if (w.v_rank > 0) s.v_ranks.assign(static_cast<size_t>(w.n_kv / w.v_group), w.v_rank);
                s.v_latent = w.v_rank > 0;
                s.k_formats = s.v_formats = {f};
                s.n_past = 70;
                s.n_tokens = n_tokens;
                compare(s);
                if (!s.v_latent || n_tokens > 20) continue;
                s.name += ", one format a row";
                s.uniform = true;
                compare(s);
            }
        }
    }
}

// Rows of a group that the MLA kernel reads, f16 windows beside them.
struct MlaRows {
    using Row = std::vector<lkv::SegmentSpec>;
    const char* name;
    int n_kv, rep, group;
    Row k, v;
    int n_past = 300, n_tokens = 1, n_seq = 1;
    bool windows = true, permute = false;
    int n_split = 0, window = 0;
    bool alibi = false;
};

void compare_mla(const std::vector<MlaRows>& cases, unsigned seed) {
    using enum Format;
    using Row = MlaRows::Row;
    for (const MlaRows& of : cases) {
        AttnShape s;
        s.name = std::string("mla, ") + of.name;
        s.head_dim = 64;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_group = s.v_group = of.group;
        const auto width = [](const Row& row) {
            int n = 0;
            for (const lkv::SegmentSpec& segment : row) n += segment.width;
            return n;
        };
        s.k_ranks.assign(static_cast<size_t>(of.n_kv / of.group), width(of.k));
        s.v_ranks.assign(static_cast<size_t>(of.n_kv / of.group), width(of.v));
        s.v_latent = true;
        s.k_segments = of.k;
        s.v_segments = of.v;
        s.k_formats = s.v_formats = of.windows ? std::vector{f16, f16, q4} : std::vector{f16};
        s.uniform = true;
        s.n_past = of.n_past;
        s.n_tokens = of.n_tokens;
        s.n_seq = of.n_seq;
        s.permute = of.permute;
        s.window = of.window;
        s.alibi = of.alibi;
        s.seed = seed++;
        const AttnCase c(s);
        DeviceCase device(c.params);
        CHECK_MSG(kernel_of(device) == "mla", s.name + ": planned for " + kernel_of(device));
        if (of.n_split != 0) device.args.n_split = of.n_split;
        const std::vector<float> got = device.run();
        const double error = relative_error(got, c.oracle());
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > rounded_tolerance,
                  s.name + ": scores 1 % off go unseen");
    }
}

// Default plans: K and V in runs of 8, 4, 2 and 1 bits, f16 windows beside them. Every width alone, segments that end within a warp's
// share, groups of several heads, more rows than a thread block has, holes, several sequences, parts of one tile and of many.
void mla() {
    using enum Format;
    const std::vector<MlaRows> cases = {
        {"8 bits", 2, 6, 2, {{q8, 64}}, {{q8, 128}}},
        {"4 bits", 2, 6, 2, {{q4, 64}}, {{q4, 128}}},
        {"2 bits", 2, 6, 2, {{q2, 64}}, {{q2, 128}}},
        {"1 bit", 2, 6, 2, {{q1, 96}}, {{q1, 64}}},
        {"f16", 2, 6, 2, {{f16, 64}}, {{f16, 96}}, 100, 1, 1, false},
        {"four widths",
         4,
         4,
         4,
         {{q8, 32}, {q4, 64}, {q2, 64}, {q1, 96}},
         {{q8, 64}, {q4, 96}, {q2, 32}, {q1, 64}},
         700},
        {"dropped channels", 4, 2, 4, {{q8, 32}, {q4, 32}, {q2, 64}, {none, 64}}, {{q4, 64}, {q1, 96}, {none, 96}}},
        {"segments of 32",
         2,
         8,
         2,
         {{q4, 32}, {q4, 32}, {q2, 32}, {q2, 32}},
         {{q8, 32}, {q4, 32}, {q4, 32}, {q1, 32}, {q1, 32}}},
        {"two groups", 4, 5, 2, {{q8, 32}, {q2, 96}}, {{q4, 64}, {q2, 32}}, 300, 1, 1, true, false, 2},
        {"three tokens, three row blocks", 4, 8, 4, {{q8, 32}, {q4, 96}}, {{q4, 128}, {q2, 64}}, 200, 3},
        {"holes, two sequences",
         4,
         1,
         4,
         {{q8, 64}, {q4, 64}},
         {{q8, 32}, {q4, 64}, {q1, 128}},
         200,
         2,
         2,
         true,
         true,
         3,
         90},
        {"ALiBi, one part", 2, 8, 2, {{q4, 64}, {q2, 64}}, {{q4, 64}, {q2, 64}}, 700, 1, 1, true, true, 1, 0, true},
        {"wide",
         8,
         4,
         8,
         {{q8, 128}, {q4, 256}, {q2, 256}, {q1, 128}},
         {{q8, 64}, {q4, 192}, {q2, 384}, {q1, 384}},
         300,
         1,
         1,
         true,
         false,
         2},
    };
    compare_mla(cases, 900);
}

// The same of rows whose groups have scales: every width in runs of one unit and of several, in K and in V.
void mla_scales() {
    using enum Format;
    const std::vector<MlaRows> cases = {
        {"six widths",
         4,
         4,
         4,
         {{n8, 32}, {n6, 32}, {n4, 64}, {n3, 64}, {n2, 32}, {n1, 96}},
         {{n8, 32}, {n6, 32}, {n4, 64}, {n3, 32}, {n2, 96}, {n1, 64}},
         310},
        {"two units a warp, two sequences with holes, two groups",
         4,
         2,
         2,
         {{n6, 64}, {n3, 96}},
         {{n8, 96}, {n6, 96}, {n4, 96}, {n3, 160}, {n2, 96}, {n1, 64}},
         130,
         2,
         2,
         true,
         true,
         2,
         90},
    };
    compare_mla(cases, 950);
}

// Tokens of several sequences, each of which reads the steps that hold its own: few and many sequences, slots in any order, shared ones,
// sequences that nobody asks about, and one without a token. As many parts as tokens, and more.
void apart() {
    using enum Format;
    struct Batch {
        const char* name;
        int n_kv, rep, group, n_seq, n_past;
        std::vector<int32_t> q_seq;  // in place of one token a sequence
        bool permute = false, shared = false;
        int n_split = 0, window = 0;
    };
    const Batch batches[] = {
        {"two sequences", 4, 2, 4, 2, 300, {}},
        {"eight of 8 rows", 4, 2, 4, 8, 170, {}, false, false, 9},
        {"eight of 20 rows, a part each", 4, 5, 4, 8, 100, {}, false, false, 1},
        {"three of 40 rows, any order", 4, 10, 4, 3, 150, {}, true, false, 7},
        {"five, of which two are asked", 4, 4, 2, 5, 140, {1, 1, 3, 1, 3}, false, false, 6},
        {"one of six, once", 4, 4, 4, 6, 130, {4, 4, 4, 4, 4, 4}, true},
        {"slots that two sequences share, and a window", 4, 4, 4, 4, 200, {}, true, true, 11, 90},
        {"forty of 8 rows", 4, 2, 4, 40, 70, {}, true, false, 60},
        {"twenty that ask one sequence", 2, 3, 2, 20, 40, std::vector<int32_t>(20, 1), true, false, 25},
    };
    unsigned seed = 1700;
    for (const Batch& of : batches) {
        AttnShape s;
        s.name = std::string("apart, ") + of.name;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_group = s.v_group = of.group;
        s.k_ranks.assign(static_cast<size_t>(of.n_kv / of.group), 192);
        s.v_ranks.assign(static_cast<size_t>(of.n_kv / of.group), 224);
        s.v_latent = true;
        s.k_segments = {{q8, 32}, {q4, 64}, {q2, 96}};
        s.v_segments = {{q8, 64}, {q4, 96}, {q1, 64}};
        s.k_formats = s.v_formats = {q4};
        s.uniform = true;
        s.n_seq = of.n_seq;
        s.n_past = of.n_past;
        s.permute = of.permute;
        s.window = of.window;
        s.seed = seed++;
        AttnCase c(s);
        if (!of.q_seq.empty()) c.params.q_seq = of.q_seq.data();
        std::vector<uint64_t> seq(c.params.regions[0].seq, c.params.regions[0].seq + c.params.regions[0].n_slots);
        if (of.shared) {
            for (uint64_t& each : seq) each |= (each & 1) << 2;  // what the first has the third has too
        }
        c.params.regions[0].seq = seq.data();
        DeviceCase device(c.params, lkv::test::device_limits(), true);
        CHECK_MSG(kernel_of(device) == "mla" && device.args.apart > 0, s.name + ": planned otherwise");
        if (of.n_split != 0) device.args.apart = of.n_split;
        const double error = relative_error(device.run(), c.oracle());
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
        DeviceCase together(c.params);
        CHECK_MSG(together.args.apart == 0, s.name + ": apart unasked");
        const double between = relative_error(device.run(), together.run());
        CHECK_MSG(between <= rounded_tolerance, s.name + ": from all slots, " + std::to_string(between));
    }
}

// The same of rows that decode/ takes: full ones in formats that the kernel has code for and others, blocks of tokens with exact windows and
// without, latents; heads of every width, parts of one tile and of several, a part a token.
void rows_apart() {
    using enum Format;
    struct Batch {
        const char* name;
        Format format;
        int head_dim, n_kv, rep, n_seq, n_past;
        std::vector<int32_t> q_seq;  // in place of one token a sequence
        bool permute = false;
        int parts = 0, window = 0;
        bool alibi = false;
        Format v = none;       // another format than K's
        bool windows = false;  // before the middle
        int rank = 0;          // above 0: latents of so many channels
    };
    const Batch batches[] = {
        {"two of 6 rows", f16, 128, 2, 6, 2, 500, {}},
        {"nine of 8 rows", f16, 64, 2, 8, 9, 90, {}, true},
        {"three of 20 rows, in parts", f16, 128, 1, 20, 3, 600, {}, true, 40},
        {"a part each", f16, 128, 2, 2, 5, 130, {}, false, 1},
        {"a window", f16, 64, 2, 4, 3, 300, {}, true, 9, 70},
        {"forty, slopes", f16, 64, 2, 1, 40, 30, {}, true, 60, 0, true},
        {"three of unlike lengths", f16, 64, 2, 4, 3, 700, {0, 2}, false, 12},
        {"six that ask one of three", q8_0, 128, 2, 4, 3, 300, {2, 2, 2, 2, 2, 2}, true},
        {"twelve", q8_0, 64, 2, 6, 12, 60, {}, false, 30},
        {"three in parts", q4_0, 128, 2, 4, 3, 700, {}, true, 20},
        {"wide heads", f16, 256, 1, 4, 3, 300, {}, true},
        {"wide heads", q8_0, 256, 1, 4, 3, 300, {}, true, 7},
        {"four", q4, 128, 2, 4, 4, 150, {}, true},
        {"four", f32, 64, 2, 3, 4, 150, {}},
        {"six", c4, 128, 2, 4, 6, 200, {}, true, 0, 0, false, q4, true},
        {"three of 12 rows, in parts", c3, 64, 1, 12, 3, 500, {}, true, 20, 0, false, q3, true},
        {"twenty and a window", c4, 64, 2, 2, 20, 90, {}, true, 0, 60, false, f16, true},
        {"four that ask one of three", c2, 256, 1, 4, 3, 300, {1, 1, 1, 1}, true, 9, 0, false, q2, false},
        {"exact windows alone", f16, 128, 2, 6, 9, 90, {}, true, 0, 0, false, none, true},
        {"three windows in parts", f16, 64, 2, 4, 3, 500, {0, 2}, true, 12, 0, false, none, true},
        {"windows beside other rows", q8_0, 128, 2, 4, 4, 200, {}, true, 9, 0, false, none, true},
        {"latents that mla/ does not take", q3, 64, 2, 3, 3, 300, {}, true, 9, 0, false, q3, false, 96},
        {"nine such", q6, 128, 2, 4, 9, 80, {}, true, 20, 0, false, q6, false, 64},
    };
    unsigned seed = 2700;
    for (const Batch& of : batches) {
        if (of.format == f16 && of.head_dim == 256 && lkv::test::device_limits().shared_bytes < 128 * 1024) continue;
        AttnShape s;
        s.name = std::string("apart, rows of ") + lkv::format_name(of.format) + ", " + of.name;
        s.head_dim = of.head_dim;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_formats = {of.format};
        s.v_formats = {of.v == none ? of.format : of.v};
        if (of.windows) {
            s.k_formats.insert(s.k_formats.begin(), {f16, f16});
            s.v_formats.insert(s.v_formats.begin(), {f16, f16});
            s.region_tokens = {4, 60};
        }
        if (of.rank > 0) {
            s.v_latent = true;
            s.k_ranks = s.v_ranks = std::vector<int>(static_cast<size_t>(of.n_kv), of.rank);
        }
        s.uniform = true;
        s.n_seq = of.n_seq;
        s.n_past = of.n_past;
        s.permute = of.permute;
        s.window = of.window;
        s.alibi = of.alibi;
        s.seed = seed++;
        AttnCase c(s);
        if (!of.q_seq.empty()) c.params.q_seq = of.q_seq.data();
        DeviceCase device(c.params, lkv::test::device_limits(), true);
        CHECK_MSG(kernel_of(device) == "decode" && device.args.apart > 0,
                  s.name + ": planned for " + kernel_of(device));
        if (of.parts != 0) {
            device.args.apart = device.args.n_split = of.parts;
            device.args.least_tiles = 1;
        }
        const double error = relative_error(device.run(), c.oracle());
        CHECK_MSG(error <= tolerance_of(s), s.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(device.run(), c.oracle(Perturb::score)) > tolerance_of(s),
                  s.name + ": scores 1 % off go unseen");
    }
}

// Latents of several sequences beside their exact windows: each, both or neither of them apart.
void apart_beside() {
    const auto shape = [](const char* name, int n_seq, int n_past) {
        AttnShape s;
        s.name = name;
        s.head_dim = 64;
        s.n_kv = 4;
        s.rep = 3;
        s.n_seq = n_seq;
        s.n_past = n_past;
        s.uniform = s.permute = true;
        s.seed = static_cast<unsigned>(2900 + n_seq);
        return s;
    };
    const auto compare = [](const AttnShape& full, const AttnShape& latents, bool windows, bool middle) {
        const lkv::test::Beside c{AttnCase(full), AttnCase(latents)};
        DeviceCase of_full(c.full.params, lkv::test::device_limits(), windows);
        DeviceCase of_latents(c.latents.params, lkv::test::device_limits(), middle);
        CHECK((of_full.args.apart > 0) == windows && (of_latents.args.apart > 0) == middle);
        // more tokens' keys are rebuilt as full rows first
        CHECK((kernel_of(of_latents) == "expand") == (latents.k_rebuild && latents.n_seq > 3));
        if (full.n_seq == 3 && windows) {
            of_full.args.apart = of_full.args.n_split = 9;
            of_full.args.least_tiles = 1;
        }
        of_latents.keeps_parts = true;
        const std::vector<float> got = of_latents.run_beside(of_full);
        const double error = relative_error(got, c.oracle());
        CHECK_MSG(error <= tolerance_of(latents), latents.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > tolerance_of(latents), latents.name);
    };
    for (const int n_seq : {3, 20}) {
        AttnShape full = shape("windows apart", n_seq, 60 + 7 * n_seq);  // the last is shortest
        AttnShape latents = shape("latents apart", n_seq, 90 + 7 * n_seq);
        full.k_formats = full.v_formats = {Format::f16, Format::f16};
        full.region_tokens = {4, 20};
        latents.k_group = latents.v_group = 4;
        latents.k_ranks = latents.v_ranks = {192};
        latents.v_latent = true;
        latents.k_formats = latents.v_formats = {Format::q4};
        for (const bool windows : {true, false}) {
            for (const bool middle : {true, false}) compare(full, latents, windows, middle);
        }
        latents.name = "rebuilt keys beside windows apart";
        latents.k_rebuild = true;
        for (const bool windows : {true, false}) compare(full, latents, windows, false);
    }
}

// Rows that are keys, and behind their turned channels values: all query heads read one.
void one_row() {
    using enum Format;
    using Row = std::vector<lkv::SegmentSpec>;
    struct Case {
        const char* name;
        const char* kernel;
        int heads, turned;
        std::vector<Row> rows;  // of every region
        int n_tokens = 1, n_past = 150, n_seq = 1, n_split = 0;
        bool small = false;  // a device with 99 KB of shared memory a thread block
        bool apart = false;
    };
    const auto whole = [](Format format) {
        return Row{{format, 64}, {format, 128}, {format, 128}, {format, 128}, {format, 128}};
    };
    const Row plan = {{q8, 64}, {q8, 64}, {q4, 192}, {q2, 96}, {q1, 64}, {none, 96}};
    const Case cases[] = {
        {"f16", "mla", 20, 64, {whole(f16)}, 1, 300},
        {"f16, several tiles a part", "mla", 4, 64, {whole(f16)}, 1, 300, 1, 2},
        {"f16, two tokens, little shared memory", "mla", 10, 64, {whole(f16)}, 2, 120, 1, 2, true},
        {"q8, little shared memory", "mla", 40, 64, {whole(q8)}, 1, 200, 1, 2, true},
        {"q4, many heads", "mla", 70, 64, {whole(q4)}},
        {"a plan behind exact windows", "mla", 16, 64, {whole(f16), whole(f16), plan}, 1, 400, 1, 2},
        {"a plan, eight tokens", "mla", 5, 64, {plan}, 8, 300, 1, 3},
        {"a plan with scales", "mla", 5, 64, {{{n8, 64}, {n4, 192}, {n3, 64}, {n1, 96}}}, 2, 150, 1, 3},
        {"a plan, three sequences", "mla", 5, 64, {plan}, 1, 150, 3, 4, false, true},
        {"f16, three sequences", "mla", 5, 32, {{{f16, 32}, {f16, 96}}}, 1, 150, 3, 4, false, true},
        {"q8_0", "mla", 20, 64, {whole(q8_0)}, 1, 300, 1, 2},
        {"q4_0 beside f16, two tokens", "mla", 16, 64, {whole(f16), whole(f16), whole(q4_0)}, 2, 200},
        {"q8_0, three sequences", "mla", 4, 64, {whole(q8_0)}, 1, 100, 3, 4, false, true},
        {"f16, a prompt", "prefill", 5, 64, {whole(f16)}, 20, 40},
        {"q8_0, a prompt", "prefill", 5, 64, {whole(q8_0)}, 20, 40},
        {"a plan, a prompt", "prefill", 16, 64, {whole(f16), whole(f16), plan}, 12, 90},
        {"q4, a prompt, little shared memory", "prefill", 8, 64, {whole(q4)}, 20, 60, 1, 0, true},
        {"turned channels that are no unit", "direct", 4, 16, {{{q8, 16}, {q8, 272}}}, 3, 60},
    };
    unsigned seed = 2300;
    for (const Case& of : cases) {
        AttnShape s;
        s.name = std::string("one row, ") + of.name;
        int width = 0;
        for (const lkv::SegmentSpec& segment : of.rows.back()) width += segment.width;
        s.n_kv = 1;
        s.rep = of.heads;
        s.key_only = of.turned;
        s.head_dim = width - of.turned;
        s.k_ranks = {width};
        for (const Row& row : of.rows) s.k_rows.push_back({row});
        s.k_formats = s.v_formats = std::vector(of.rows.size(), q8);
        s.n_tokens = of.n_tokens;
        s.n_past = of.n_past;
        s.n_seq = of.n_seq;
        s.permute = of.n_split != 0;
        s.seed = seed++;
        const AttnCase c(s);
        lkv::cuda::Device limits = lkv::test::device_limits();
        if (of.small) limits.shared_bytes = 99 << 10;
        DeviceCase device(c.params, limits, of.apart);
        CHECK_MSG(kernel_of(device) == of.kernel, s.name + ": planned for " + kernel_of(device));
        if (of.n_split != 0) device.args.n_split = of.n_split;
        const double error = relative_error(device.run(), c.oracle());
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(device.run(), c.oracle(Perturb::score)) > rounded_tolerance,
                  s.name + ": scores 1 % off go unseen");
    }
}

// A warm-up on one slot a region leaves nothing behind that the real attention reads, and takes whole groups of K and V.
void warm_ups() {
    struct Shape {
        const char* name;
        int n_kv, rep, rank, group;
        bool rebuild;
    };
    constexpr Shape shapes[] = {{"full rows", 8, 4, 0, 1, false},
                                {"64 channels a head", 8, 4, 64, 1, true},
                                {"128 channels of two heads", 8, 4, 128, 2, true},
                                {"256 channels of four heads", 8, 4, 256, 4, true},
                                {"latents of all heads", 8, 4, 512, 8, false}};
    for (const Shape& of : shapes) {
        AttnShape s;
        s.name = of.name;
        s.head_dim = 128;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_rebuild = of.rebuild;
        s.v_latent = of.rank > 0;
        s.k_group = s.v_group = of.group;
        if (of.rank > 0) s.k_ranks = s.v_ranks = std::vector<int>(static_cast<size_t>(of.n_kv / of.group), of.rank);
        s.k_formats = s.v_formats = {Format::q8};
        s.n_past = 300;
        const AttnCase c(s);
        DeviceCase device(c.params);
        const std::vector<float> want = device.run();
        const auto few = lkv::cuda::warm_up(device.args);
        if (!few) {
            CHECK_MSG(false, s.name + ": no warm-up");
            continue;
        }
        lkv::cuda::Plan args = *few;
        CHECK_MSG(args.items > 0 && of.n_kv / args.unit % args.items == 0 && args.items * args.unit % of.group == 0,
                  s.name + ": " + std::to_string(args.items) + " work items");
        args.n_slots = device.keep(std::vector<int32_t>(lkv::cuda::max_regions, 1));
        cuda_check(lkv::cuda::attend(args, nullptr), "a warm-up");
        cuda_check(cudaDeviceSynchronize(), "a warm-up");
        CHECK_MSG(device.run() == want, s.name + ": another result behind a warm-up");
    }
}

// Regions of which one starts its rows on 16 bytes and one, with more bytes or fewer, does not.
void wide_regions() {
    using enum Format;
    for (const std::vector<Format>& formats :
         {std::vector{q8, q4_0}, {q4_0, q8}, {f16, q8}, {q4, f16}, {q4_0, q4, q8}}) {
        for (const int rank : {512, 2048}) {
            for (const int n_tokens : {1, 3}) {
                AttnShape s;
                s.name = "a latent of " + std::to_string(rank) + " in regions of";
                for (const Format f : formats) s.name += std::string(" ") + lkv::format_name(f);
                s.name += ", " + std::to_string(n_tokens) + " tokens";
                s.n_kv = 4;
                s.rep = 2;
                s.k_group = s.v_group = 4;
                s.k_ranks = s.v_ranks = {rank};
                s.v_latent = true;
                s.k_formats = s.v_formats = formats;
                s.uniform = true;
                s.n_past = 200;
                s.n_tokens = n_tokens;
                compare(s);
            }
        }
    }
}

// Latents of more than 1024 channels: every copy path, holes, regions of different formats, several tokens and sequences.
void wide_latents() {
    struct Wide {
        const char* name;
        int k_rank, v_rank, rep;
        std::vector<Format> formats;  // of the regions
        bool uniform;
        int n_tokens, n_seq, dropped;
    };
    using enum Format;
    const Wide cases[] = {
        {"f16", 2048, 2048, 8, {f16}, true, 1, 1, 0},
        {"q8", 2048, 2048, 8, {q8}, true, 1, 1, 0},
        {"q4", 2048, 2048, 8, {q4}, true, 1, 1, 0},
        {"q5", 2048, 2048, 8, {q5}, true, 1, 1, 0},
        {"f16, two tokens", 2048, 2048, 4, {f16}, true, 2, 1, 0},
        {"q8, two sequences", 2048, 2048, 4, {q8}, true, 1, 2, 0},
        {"q4, four tokens of two sequences", 2048, 1600, 2, {q4}, true, 2, 2, 0},
        {"two formats a row", 2048, 2048, 8, {q4}, false, 1, 1, 0},
        {"f16, odd halves", 1216, 1984, 8, {f16}, true, 1, 1, 0},
        {"q8, odd halves", 1216, 1984, 7, {q8}, true, 1, 1, 0},
        {"f16, K of one block", 64, 2048, 8, {f16}, true, 1, 1, 0},
        {"f16, ragged", 1000, 2000, 3, {f16}, true, 1, 1, 0},
        {"regions of f16", 2048, 2048, 8, {f16, f16, f16}, true, 1, 1, 0},
        {"regions of f16 and q8", 2048, 2048, 8, {f16, q8}, true, 1, 1, 0},
        {"regions of f16, q8 and q4, fewer channels", 2048, 2048, 4, {f16, q8, q4}, true, 2, 1, 64},
    };
    for (const Wide& of : cases) {
        for (const bool permute : {false, true}) {
            AttnShape s;
            s.name = std::string("wide latents, ") + of.name + (permute ? ", holes" : "");
            s.n_kv = 4;
            s.rep = of.rep;
            s.k_group = s.v_group = 4;
            s.k_ranks = {of.k_rank};
            s.v_ranks = {of.v_rank};
            s.v_latent = true;
            s.k_formats = s.v_formats = of.formats;
            s.uniform = of.uniform;
            s.n_tokens = of.n_tokens;
            s.n_seq = of.n_seq;
            s.dropped = of.dropped;
            s.n_past = 150;
            s.permute = permute;
            s.window = permute ? 120 : 0;
            compare(s);
        }
    }
}

// Latents that several heads share and K is rebuilt from: heads side by side in one tile of scores, rows that start on any bytes,
// dimensions that leave a batch of 64 part empty.
void shared_latents() {
    struct Heads {
        int n_kv, rep, head_dim, group, k_rank, v_rank;
    };
    unsigned seed = 200;
    for (const Heads& h : {Heads{8, 4, 128, 4, 256, 256}, Heads{4, 1, 128, 4, 240, 144}, Heads{4, 2, 96, 2, 128, 176},
                           Heads{4, 3, 80, 2, 144, 16}, Heads{2, 1, 256, 1, 192, 256}, Heads{8, 8, 64, 8, 160, 208}}) {
        for (const Format f : {Format::f16, Format::q8, Format::q4, Format::q3}) {
            for (const int n_tokens : {1, 2}) {
                AttnShape s;
                s.name = "K of " + std::to_string(h.k_rank) + " and V of " + std::to_string(h.v_rank) + " for " +
                         std::to_string(h.group) + " x " + std::to_string(h.rep) + " heads of " +
                         std::to_string(h.head_dim) + ", " + lkv::format_name(f) + ", " + std::to_string(n_tokens) +
                         " tokens";
                s.head_dim = h.head_dim;
                s.n_kv = h.n_kv;
                s.rep = h.rep;
                s.k_rebuild = s.v_latent = true;
                s.k_group = s.v_group = h.group;
                s.k_ranks.assign(static_cast<size_t>(h.n_kv / h.group), h.k_rank);
                s.v_ranks.assign(static_cast<size_t>(h.n_kv / h.group), h.v_rank);
                s.k_formats = s.v_formats = {f};
                // exact windows beside it
                if (seed % 3 == 0) s.k_formats = s.v_formats = {Format::f16, Format::f16, f};
                s.bias = seed % 2 == 0;
                s.norm = seed % 5 < 2;
                s.neox = seed % 7 < 4;
                s.permute = seed % 4 == 1;
                s.alibi = seed % 11 == 0;
                s.window = seed % 6 == 0 ? 90 : 0;
                s.n_past = 300;
                s.n_tokens = n_tokens;
                s.seed = seed++;
                compare(s);
            }
        }
    }
}

// Blocks of n values times the orthonormal Hadamard matrix.
std::vector<double> times_hadamard(const std::vector<double>& x, int n) {
    std::vector<double> out(x.size());
    const auto width = static_cast<size_t>(n);
    for (size_t i = 0; i < x.size(); i++) {
        for (size_t j = 0; j < width; j++) {
            const double value = x[i / width * width + j];
            out[i] += std::popcount(i % width & j) % 2 == 0 ? value : -value;
        }
        out[i] /= std::sqrt(static_cast<double>(n));
    }
    return out;
}

// Results that leave times V's Hadamard matrix, of one part and of several.
void rotated_results() {
    struct Heads {
        int head_dim, rep, n_tokens, hadamard;
    };
    for (const Heads& h : {Heads{128, 4, 1, 64}, Heads{64, 6, 1, 64}, Heads{256, 2, 1, 64}, Heads{96, 3, 2, 32},
                           Heads{80, 1, 7, 16}, Heads{64, 8, 8, 64}}) {
        for (const Format format : {Format::q8_0, Format::q4_0, Format::f16}) {
            AttnShape s;
            s.name = "results times a Hadamard matrix of " + std::to_string(h.hadamard) + ", " +
                     std::to_string(h.n_tokens) + " tokens";
            if (format != Format::f16 && h.head_dim % 32 != 0) continue;
            s.head_dim = h.head_dim;
            s.n_kv = 2;
            s.rep = h.rep;
            s.n_tokens = h.n_tokens;
            s.k_formats = s.v_formats = {format};
            s.n_past = 600;
            AttnCase c(s);
            const std::vector<double> want = times_hadamard(c.oracle(), h.hadamard);
            for (const int n_split : {1, 3}) {
                DeviceCase device(c.params);
                device.args.v_hadamard = h.hadamard;
                device.args.least_tiles = 1;
                device.args.n_split = n_split;
                device.keeps_parts = true;
                const double error = relative_error(device.run(), want);
                CHECK_MSG(error <= tolerance_of(s), s.name + ", " + std::to_string(n_split) + " parts, " +
                                                        kernel_of(device) + ": relative error " +
                                                        std::to_string(error));
            }
        }
    }
}

// Parts so long that every buffer is filled and emptied many times.
void long_parts() {
    struct Heads {
        int group, rep, rank;
    };
    for (const Heads& h :
         {Heads{1, 4, 64}, Heads{2, 4, 64}, Heads{1, 8, 128}, Heads{2, 2, 112}, Heads{4, 4, 256}, Heads{1, 1, 208}}) {
        for (const bool permute : {false, true}) {
            AttnShape s;
            s.name = "long parts, latents of " + std::to_string(h.rank) + " for " + std::to_string(h.group) + " x " +
                     std::to_string(h.rep) + " heads" + (permute ? ", slots in any order" : "");
            s.head_dim = 128;
            s.n_kv = 4;
            s.rep = h.rep;
            s.k_rebuild = s.v_latent = true;
            s.k_group = s.v_group = h.group;
            s.k_ranks.assign(static_cast<size_t>(4 / h.group), h.rank);
            s.v_ranks = s.k_ranks;
            s.k_formats = s.v_formats = {permute ? Format::f16 : Format::q4};
            s.uniform = true;
            s.permute = permute;
            s.n_past = 2500;
            compare(s);
        }
    }
}

// Tokens in the case's slots get other positions, of(position); what is returned holds them.
template <class Of>
std::vector<std::vector<int32_t>> move_tokens(AttnCase& c, const Of& of) {
    std::vector<std::vector<int32_t>> moved;
    for (int r = 0; r < c.params.n_regions; r++) {
        lkv::RegionView& region = c.params.regions[r];
        std::vector<int32_t>& to = moved.emplace_back(region.pos, region.pos + region.n_slots);
        for (int32_t& pos : to) pos = pos < 0 ? pos : of(pos);
        region.pos = to.data();
    }
    return moved;
}

// Prefill that expands chunks of the context: what a chunk takes along of positions, sequences, regions and formats.
void expanded() {
    unsigned seed = 300;
    for (const char* const what : {"three regions", "three sequences", "window", "ALiBi", "bias and norm", "full V",
                                   "no RoPE", "wide latents", "partial rotation", "wide heads"}) {
        if (what == std::string("wide heads") && !lkv::test::device_limits().warpgroups) continue;
        const std::string name = what;
        for (const Format f : {Format::f16, Format::q4, Format::q3}) {
            AttnShape s;
            s.name = "expanded, " + name + ", " + lkv::format_name(f);
            s.head_dim = seed % 2 == 0 ? 128 : 80;
            s.n_kv = 4;
            s.rep = 4;
            s.k_rebuild = true;
            s.v_latent = name != "full V";
            s.k_group = 2;
            s.v_group = s.v_latent ? 4 : 1;
            s.k_ranks = {96, 160};
            if (name == "wide latents") {
                s.k_group = 4;
                s.k_ranks = {1040};
            }
            if (name == "wide heads") {
                s.head_dim = 256;
                s.k_ranks = {288, 384};
            }
            if (s.v_latent) s.v_ranks = {name == "wide latents" ? 672 : 208};
            s.k_formats = s.v_formats = {f};
            if (name == "three regions") {
                s.k_formats = s.v_formats = {Format::f16, Format::q8, f};
                s.dropped = 32;
            }
            s.n_seq = name == "three sequences" ? 3 : 1;
            s.window = name == "window" ? 77 : 0;
            s.alibi = name == "ALiBi";
            s.rope = name != "no RoPE" && name != "wide heads";
            s.n_rot = name == "partial rotation" ? 32 : 0;
            s.bias = s.norm = name == "bias and norm";
            s.neox = seed % 3 != 0;
            s.permute = seed % 4 != 0;
            s.n_past = 300;
            s.n_tokens = 64;
            s.seed = seed++;
            CHECK(DeviceCase(AttnCase(s).params).args.chunk != 0);
            compare(s);
            if (f == Format::q3 || !s.v_latent || s.head_dim > 128) continue;
            s.name += ", few rows";
            s.n_tokens = seed % 3 == 0 ? 3 : 1;
            s.k_ranks.assign(s.k_ranks.size(), 272);  // wider than what the decode kernels rebuild
            s.v_ranks.assign(s.v_ranks.size(), 224);
            s.uniform = true;
            s.head_dim = seed % 2 == 0 ? 64 : 96;
            CHECK(kernel_of(DeviceCase(AttnCase(s).params)) == "expand keys");
            compare(s);
        }
    }
}

// Many query rows on full f16 rows by warpgroups: a tile, several, parts of them, tiles that no row or not every row sees, free slots that
// hold NaN; and latents expanded for them, chunk by chunk behind exact windows.
void flash() {
    unsigned seed = 500;
    const auto check = [&](AttnShape s, const char* name) {
        s.name = std::string("flash, ") + name;
        s.seed = seed++;
        if (lkv::test::device_limits().warpgroups) {
            CHECK_MSG(kernel_of(DeviceCase(AttnCase(s).params)) == "flash", s.name + ": another kernel");
        }
        compare(s);
    };
    AttnShape s;
    s.head_dim = 128;
    s.rep = 4;
    s.n_past = 300;
    s.n_tokens = 70;
    check(s, "grouped queries");
    s.alibi = true;
    check(s, "ALiBi");
    s.alibi = false;
    s.window = 77;
    check(s, "a sliding window");
    s.permute = true;
    s.window = 0;
    s.n_past = 100;
    s.n_seq = 3;
    s.n_tokens = 20;
    check(s, "holes and three sequences");
    s.permute = false;
    s.n_past = 150;
    check(s, "tiles of other sequences");
    s.n_tokens = 4;
    check(s, "steps of three sequences");
    s = {};
    s.n_tokens = 140;
    check(s, "heads of 64");
    s.k_formats = s.v_formats = {Format::f16, Format::f16, Format::f16};
    s.head_dim = 128;
    s.rep = 2;
    check(s, "three regions");
    s.empty_first = true;
    check(s, "no first region");
    s = {};
    s.head_dim = 256;
    s.rep = 4;
    s.n_past = 300;
    s.n_tokens = 70;
    check(s, "heads of 256");
    s.window = 77;
    check(s, "heads of 256 and a sliding window");
    s.window = 0;
    s.permute = true;
    s.n_past = 100;
    s.n_seq = 3;
    s.n_tokens = 20;
    check(s, "heads of 256, holes and three sequences");
    s = {};
    s.head_dim = 256;
    s.n_tokens = 140;
    s.k_formats = s.v_formats = {Format::f16, Format::f16, Format::f16};
    check(s, "heads of 256 and three regions");

    for (const auto& [full, latents] : lkv::test::shapes_beside()) {
        if (latents.n_past == 0 || latents.n_tokens < 9) continue;
        const lkv::test::Beside c{AttnCase(full), AttnCase(latents)};
        DeviceCase of_full(c.full.params);
        DeviceCase of_latents(c.latents.params);
        if (of_latents.args.chunk == 0) continue;
        of_latents.args.chunk = lkv::cuda::chunk_step;
        const double error = relative_error(of_latents.run_beside(of_full), c.oracle());
        CHECK_MSG(error <= tolerance_of(latents), full.name + ", in chunks: relative error " + std::to_string(error));
    }
}

// Many rows of several sequences, by the flash kernel and by the prefill kernel.
void many_sequences() {
    AttnShape s;
    s.head_dim = 64;
    s.rep = 6;
    s.n_seq = 6;
    s.n_tokens = 5;
    s.n_past = 150;
    for (const Format format : {Format::f16, Format::q8_0}) {
        for (const bool warpgroups : {true, false}) {
            for (const bool permute : {false, true}) {
                s.name = std::string("many sequences, ") + lkv::format_name(format) + (permute ? ", any order" : "");
                s.k_formats = s.v_formats = {format};
                s.uniform = true;
                s.permute = permute;
                lkv::cuda::Device limits = lkv::test::device_limits();
                limits.warpgroups = limits.warpgroups && warpgroups;
                const AttnCase c(s);
                DeviceCase device(c.params, limits);
                const std::string kernel = limits.warpgroups && format == Format::f16 ? "flash" : "prefill";
                CHECK_MSG(kernel_of(device) == kernel, s.name + ": planned for " + kernel_of(device));
                device.args.n_split = 2;
                device.args.least_tiles = 1;
                const double error = relative_error(device.run(), c.oracle());
                CHECK_MSG(error <= tolerance_of(s),
                          s.name + ", " + kernel + ": relative error " + std::to_string(error));
            }
        }
    }
}

// The heads of a vector turned by a position, in double.
std::vector<double> turned(const std::vector<float>& x, const std::vector<float>& freqs, int head_dim, bool neox,
                           int pos, double mscale) {
    std::vector<double> out(x.begin(), x.end());
    const size_t n = freqs.size();
    for (size_t head = 0; head < x.size(); head += static_cast<size_t>(head_dim)) {
        for (size_t i = 0; i < n; i++) {
            const size_t a = head + (neox ? i : 2 * i);
            const size_t b = head + (neox ? i + n : 2 * i + 1);
            const double angle = pos * double{freqs[i]};
            out[a] = mscale * (x[a] * std::cos(angle) - x[b] * std::sin(angle));
            out[b] = mscale * (x[b] * std::cos(angle) + x[a] * std::sin(angle));
        }
    }
    return out;
}

// RoPE frequencies of base 10000.
std::vector<float> freqs_of(int n_rot) {
    std::vector<float> freqs;
    for (int i = 0; i < n_rot / 2; i++) freqs.push_back(std::pow(10000.0F, -2.0F * i / n_rot));
    return freqs;
}

// RoPE of a token's heads and a Hadamard rotation behind it, in place too.
void turned_heads() {
    struct Shape {
        int head_dim, n_rot, n_heads;
        int hadamard = 0;
    };
    constexpr int pos = 70001;
    constexpr float mscale = 1.25F;
    for (const Shape& of :
         {Shape{128, 128, 32}, Shape{128, 64, 8}, Shape{64, 64, 3}, Shape{80, 20, 7}, Shape{96, 38, 6},
          Shape{256, 256, 2}, Shape{512, 256, 1}, Shape{128, 128, 9, 128}, Shape{128, 64, 2, 64}, Shape{96, 38, 6, 32},
          Shape{80, 20, 7, 16}, Shape{256, 256, 3, 256}, Shape{512, 256, 1, 512}, Shape{64, 64, 3, 64}}) {
        for (const bool neox : {false, true}) {
            std::mt19937 random(5);
            std::normal_distribution<float> normal;
            std::vector<float> x(static_cast<size_t>(of.head_dim * of.n_heads));
            for (float& v : x) v = normal(random);
            const std::vector<float> freqs = freqs_of(of.n_rot);
            const DeviceBuffer phases(lkv::cuda::pack_phases(freqs.data(), of.n_rot / 2));
            const DeviceBuffer device_pos(std::vector<int32_t>{pos});
            std::vector<double> want = turned(x, freqs, of.head_dim, neox, pos, mscale);
            if (of.hadamard != 0) want = times_hadamard(want, of.hadamard);
            for (const bool in_place : {false, true}) {
                const DeviceBuffer from(x);
                const DeviceBuffer to(x.size() * sizeof(float));
                cuda_check(cudaMemset(to.as<void>(), 0xff, to.bytes()), "a memset");
                const DeviceBuffer& result = in_place ? from : to;
                const lkv::cuda::TurnArgs args{
                    {phases.as<uint64_t>(), device_pos.as<int32_t>(), of.head_dim, of.n_rot, neox ? 1 : 0, mscale},
                    from.as<float>(),
                    result.as<float>(),
                    of.n_heads,
                    of.hadamard};
                cuda_check(lkv::cuda::turn_heads(args, nullptr), "turn_heads");
                cuda_check(cudaDeviceSynchronize(), "turning heads");
                const double error = relative_error(result.download<float>(), want);
                CHECK_MSG(error < 1e-5, std::to_string(of.n_heads) + " heads of " + std::to_string(of.head_dim) +
                                            " dimensions, " + std::to_string(of.n_rot) + " turned" +
                                            (of.hadamard != 0 ? ", times a Hadamard matrix" : "") +
                                            (neox ? ", by halves: " : ": ") + std::to_string(error));
            }
        }
    }
}

// y = W x for many small matrices, in double; heads of x may be turned first.
void products() {
    struct Shape {
        int n_in, n_out, n_matrices, n_columns;
        int head_dim = 0, n_rot = 0;  // n_rot > 0: turned
        bool neox = true;
    };
    for (const Shape& of : {Shape{128, 512, 8, 4},
                            Shape{1024, 512, 1, 1},
                            Shape{64, 48, 8, 1},
                            Shape{96, 33, 2, 3},
                            Shape{80, 16, 5, 8},
                            Shape{4096, 1000, 1, 2},
                            Shape{128, 2048, 32, 1},
                            Shape{128, 512, 8, 4, 128, 128},
                            Shape{1024, 512, 1, 1, 128, 128},
                            Shape{128, 512, 8, 4, 128, 128, false},
                            Shape{96, 33, 2, 3, 96, 38},
                            Shape{96, 33, 2, 3, 96, 38, false},
                            Shape{160, 24, 3, 2, 80, 20},
                            Shape{512, 64, 2, 1, 256, 256},
                            Shape{3072, 64, 1, 4},
                            Shape{1536, 64, 1, 8},
                            Shape{64, 1024, 8, 8},
                            Shape{64, 1024, 8, 4},
                            Shape{128, 512, 8, 8},
                            Shape{256, 2048, 2, 2},
                            Shape{256, 2048, 2, 8},
                            Shape{4096, 512, 1, 1}}) {
        const int n_vectors = of.n_matrices * of.n_columns;
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        std::vector<uint16_t> w(static_cast<size_t>(of.n_matrices) * static_cast<size_t>(of.n_out * of.n_in));
        std::vector<float> x(static_cast<size_t>(n_vectors * of.n_in));
        for (uint16_t& v : w) v = lkv::half_from_float(normal(random));
        for (float& v : x) v = normal(random);
        const DeviceBuffer device_w(w);
        const DeviceBuffer device_x(x);
        const DeviceBuffer y(static_cast<size_t>(n_vectors * of.n_out) * sizeof(float));
        cuda_check(cudaMemset(y.as<void>(), 0xff, y.bytes()), "a memset");
        lkv::cuda::ProductArgs args{};
        args.w = device_w.as<uint16_t>();
        args.x = device_x.as<float>();
        args.y = y.as<float>();
        args.w_row = of.n_in;
        args.w_matrix = int64_t{of.n_in} * of.n_out;
        args.n_in = of.n_in;
        args.n_out = of.n_out;
        args.n_matrices = of.n_matrices;
        args.n_columns = of.n_columns;
        constexpr int pos = 70001;
        constexpr float mscale = 1.25F;
        const std::vector<float> freqs = freqs_of(of.n_rot);
        const DeviceBuffer phases(lkv::cuda::pack_phases(freqs.data(), of.n_rot / 2));
        const DeviceBuffer device_pos(std::vector<int32_t>{pos});
        std::vector<double> vectors(x.begin(), x.end());
        if (of.n_rot > 0) {
            args.turn = {
                phases.as<uint64_t>(), device_pos.as<int32_t>(), of.head_dim, of.n_rot, of.neox ? 1 : 0, mscale};
            vectors = turned(x, freqs, of.head_dim, of.neox, pos, mscale);
        }
        cuda_check(lkv::cuda::multiply(args, nullptr), "multiply");
        cuda_check(cudaDeviceSynchronize(), "products");
        std::vector<double> want;
        for (int i = 0; i < n_vectors; i++) {
            const uint16_t* const matrix = w.data() + args.w_matrix * (i / of.n_columns);
            for (int r = 0; r < of.n_out; r++) {
                double sum = 0;
                for (int d = 0; d < of.n_in; d++) {
                    sum += double{lkv::half_to_float(matrix[r * of.n_in + d])} *
                           vectors[static_cast<size_t>(i * of.n_in + d)];
                }
                want.push_back(sum);
            }
        }
        const double error = relative_error(y.download<float>(), want);
        CHECK_MSG(error < 1e-5, "products of " + std::to_string(of.n_in) + " channels" +
                                    (of.n_rot > 0 ? ", turned: " : ": ") + std::to_string(error));
    }
}

// Heads of several tokens times their groups' matrices: rows and vectors that fill no thread block, channels of several turns.
void products_of_heads() {
    struct Shape {
        int n_in, n_out, n_matrices, heads_of_matrix, n_tokens;
    };
    for (const Shape& of : {Shape{128, 192, 2, 6, 9}, Shape{64, 40, 4, 1, 2}, Shape{96, 65, 3, 2, 3},
                            Shape{32, 16, 1, 5, 64}, Shape{512, 70, 2, 1, 7}, Shape{288, 33, 2, 3, 5}}) {
        std::mt19937 random(8);
        std::normal_distribution<float> normal;
        const int n_heads = of.n_matrices * of.heads_of_matrix;
        std::vector<uint16_t> w(static_cast<size_t>(of.n_matrices) * static_cast<size_t>(of.n_out * of.n_in));
        std::vector<float> x(static_cast<size_t>(of.n_tokens * n_heads) * static_cast<size_t>(of.n_in));
        for (uint16_t& v : w) v = lkv::half_from_float(normal(random));
        for (float& v : x) v = normal(random);
        const DeviceBuffer device_w(w);
        const DeviceBuffer device_x(x);
        const DeviceBuffer y(static_cast<size_t>(of.n_tokens * n_heads) * static_cast<size_t>(of.n_out) *
                             sizeof(float));
        cuda_check(cudaMemset(y.as<void>(), 0xff, y.bytes()), "a memset");
        cuda_check(lkv::cuda::multiply_heads(
                       {device_w.as<uint16_t>(), device_x.as<float>(), y.as<float>(), of.n_in,
                        int64_t{of.n_in} * of.n_out, of.n_in, of.n_out, of.n_matrices, of.heads_of_matrix, of.n_tokens},
                       nullptr),
                   "multiply_heads");
        cuda_check(cudaDeviceSynchronize(), "products of heads");
        std::vector<double> want;
        for (int i = 0; i < of.n_tokens * n_heads; i++) {
            const uint16_t* const matrix =
                w.data() + static_cast<ptrdiff_t>(of.n_in) * of.n_out * (i % n_heads / of.heads_of_matrix);
            for (int r = 0; r < of.n_out; r++) {
                double sum = 0;
                for (int d = 0; d < of.n_in; d++) {
                    sum += double{lkv::half_to_float(matrix[r * of.n_in + d])} *
                           double{x[static_cast<size_t>(i) * static_cast<size_t>(of.n_in) + static_cast<size_t>(d)]};
                }
                want.push_back(sum);
            }
        }
        const double error = relative_error(y.download<float>(), want);
        CHECK_MSG(error < 1e-5, "heads of " + std::to_string(of.n_in) + " channels: " + std::to_string(error));
    }
}

#if CUDART_VERSION >= 12030
// Which of a recording's products, by their results, depends on which, and how.
std::map<std::pair<int, int>, cudaGraphEdgeData> dependencies(cudaGraph_t graph, const std::vector<DeviceBuffer>& y) {
    lkv::cuda::Edges edges;
    cuda_check(lkv::cuda::edges_of(graph, edges), "dependencies");
    const auto product_of = [&](cudaGraphNode_t node) {
        cudaKernelNodeParams kernel{};
        cuda_check(cudaGraphKernelNodeGetParams(node, &kernel), "a kernel's arguments");
        const float* const to_y = static_cast<const lkv::cuda::ProductArgs*>(kernel.kernelParams[0])->y;
        const auto found =
            std::find_if(y.begin(), y.end(), [&](const auto& of) { return of.template as<float>() == to_y; });
        return static_cast<int>(found - y.begin());
    };
    std::map<std::pair<int, int>, cudaGraphEdgeData> of;
    for (size_t i = 0; i < edges.from.size(); i++) {
        of[{product_of(edges.from[i]), product_of(edges.to[i])}] = edges.data[i];
    }
    return of;
}
#endif

// Products on two streams, recorded: what depends on what is the same with and without what start_early leaves out.
//
//   0 -> 1 -> 2 on one stream, 0 -> 3 -> 4 on the other; 5 takes 4's result, waits for both and, needlessly, for 1
void recorded_steps() {
    constexpr int n = 256;
    constexpr int n_products = 6;
    constexpr int input_of[n_products] = {-1, 0, 1, 0, 3, 4};
    std::mt19937 random(11);
    std::normal_distribution<float> normal(0.0F, 1.0F / 16);
    std::vector<uint16_t> w(size_t{n} * n);
    std::vector<float> x(n);
    for (uint16_t& v : w) v = lkv::half_from_float(normal(random));
    for (float& v : x) v = 16 * normal(random);
    const DeviceBuffer device_w(w);
    const DeviceBuffer device_x(x);
    std::vector<DeviceBuffer> y;
    for (int i = 0; i < n_products; i++) y.emplace_back(n * sizeof(float));
    const auto product = [&](int i, cudaStream_t stream) {
        lkv::cuda::ProductArgs args{};
        args.w = device_w.as<uint16_t>();
        args.x = input_of[i] < 0 ? device_x.as<float>() : y[static_cast<size_t>(input_of[i])].as<float>();
        args.y = y[static_cast<size_t>(i)].as<float>();
        args.w_row = args.n_in = args.n_out = n;
        args.n_matrices = args.n_columns = 1;
        cuda_check(lkv::cuda::multiply(args, stream), "multiply");
    };
    for (int i = 0; i < n_products; i++) product(i, nullptr);
    cuda_check(cudaDeviceSynchronize(), "products in order");
    std::vector<std::vector<float>> want;
    for (const DeviceBuffer& of : y) {
        want.push_back(of.download<float>());
        cuda_check(cudaMemset(of.as<void>(), 0xff, of.bytes()), "a memset");
    }
    cuda_check(cudaDeviceSynchronize(), "memsets");

    cudaStream_t streams[2];
    cudaEvent_t events[3];
    int lowest = 0;
    int highest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities");
    cuda_check(cudaStreamCreateWithPriority(&streams[0], cudaStreamNonBlocking, highest), "a stream");
    cuda_check(cudaStreamCreateWithPriority(&streams[1], cudaStreamNonBlocking, lowest), "a stream");
    for (cudaEvent_t& event : events) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    const auto wait = [&](int from, int to, cudaEvent_t event) {
        cuda_check(cudaEventRecord(event, streams[from]), "an event");
        cuda_check(cudaStreamWaitEvent(streams[to], event, 0), "a wait");
    };
    cuda_check(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed), "recording");
    product(0, streams[0]);
    wait(0, 1, events[0]);
    product(1, streams[0]);
    cuda_check(cudaEventRecord(events[1], streams[0]), "an event");
    product(2, streams[0]);
    product(3, streams[1]);
    product(4, streams[1]);
    wait(1, 0, events[2]);
    cuda_check(cudaStreamWaitEvent(streams[0], events[1], 0), "a needless wait");
    product(5, streams[0]);
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamEndCapture(streams[0], &graph), "a recording");
    cuda_check(lkv::cuda::start_early(graph), "start_early");
    cudaGraphExec_t step = nullptr;
    cuda_check(cudaGraphInstantiate(&step, graph, cudaGraphInstantiateFlagUseNodePriority), "an instance");
    for (int again = 0; again < 3; again++) {
        for (const DeviceBuffer& of : y) cuda_check(cudaMemset(of.as<void>(), 0xff, of.bytes()), "a memset");
        cuda_check(cudaDeviceSynchronize(), "memsets");
        cuda_check(cudaGraphLaunch(step, streams[0]), "a step");
        cuda_check(cudaStreamSynchronize(streams[0]), "a step");
        for (size_t i = 0; i < y.size(); i++) {
            CHECK_MSG(y[i].download<float>() == want[i], "recorded product " + std::to_string(i) + " differs");
        }
    }
#if CUDART_VERSION >= 12030
    const std::set<std::pair<int, int>> expected = {{0, 1}, {1, 2}, {0, 3}, {3, 4}, {2, 5}, {4, 5}};
    std::set<std::pair<int, int>> left;
    for (const auto& [products, edge] : dependencies(graph, y)) {
        left.insert(products);
        if (!lkv::cuda::device_chains()) continue;
        CHECK(edge.type == cudaGraphDependencyTypeProgrammatic);
        // the last product, of a higher priority than the other stream's, waits for what that lets start
        CHECK(edge.from_port == (products == std::pair(4, 5) ? cudaGraphKernelNodePortProgrammatic
                                                             : cudaGraphKernelNodePortLaunchCompletion));
    }
    CHECK(left == expected);
#endif
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

// Positions that no span of the angle table covers: a K that is rebuilt takes several passes over a tile.
void scattered_positions() {
    for (const int stride : {2, 7, 1000, -2, -7, -1000}) {
        const bool shared = stride < 0;  // a wide latent of both heads
        AttnShape s;
        s.name = "rebuild, positions " + std::to_string(std::abs(stride)) + " apart" + (shared ? ", shared" : "");
        s.k_rebuild = true;
        s.head_dim = 64;
        s.n_kv = 2;
        s.rep = 2;
        if (shared) s.k_group = 2;
        s.k_ranks.assign(shared ? 1 : 2, shared ? 112 : 48);
        s.n_past = 90;
        s.n_tokens = 1;
        AttnCase c(s);
        // slots far apart swap places with their neighbours too
        const auto moved = move_tokens(c, [&](int32_t pos) { return (pos ^ 5) * std::abs(stride); });
        const std::vector<int32_t> q_pos(1, 100 * std::abs(stride));
        c.params.q_pos = q_pos.data();
        const std::vector<double> want = c.oracle();
        DeviceCase device(c.params);
        CHECK(kernel_of(device) == "decode");
        const double error = relative_error(device.run(), want);
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
    }
}

void nothing_visible() {
    for (const bool rebuild : {false, true}) {
        for (const int n_tokens : {1, 140}) {
            AttnShape s;
            s.n_tokens = n_tokens;
            s.k_rebuild = s.v_latent = rebuild;
            if (rebuild) s.k_ranks = s.v_ranks = {48, 64};
            AttnCase c(s);
            if (rebuild && n_tokens == 1) {
                // parts without a tile
                DeviceCase empty(c.params);
                empty.args.n_slots = empty.keep(std::vector<int32_t>(static_cast<size_t>(c.params.n_regions), 0));
                for (const float x : empty.run()) CHECK(x == 0.0f);
            }
            std::vector<int32_t> other(static_cast<size_t>(c.params.n_tokens), 5);
            c.params.q_seq = other.data();
            DeviceCase device(c.params);
            for (const float x : device.run()) CHECK(x == 0.0f);
        }
    }
}

// A deeper cache than the plan was shown: the number of slots is read on the device.
void grows() {
    AttnShape s;
    s.name = "growing cache";
    s.n_past = 1000;
    AttnCase c(s);
    DeviceCase device(c.params);
    CHECK_MSG(device.args.n_split > 1, "a long cache is split");
    CHECK_MSG(relative_error(device.run(), c.oracle()) <= exact_tolerance, s.name);
    const int32_t fewer = 37;
    device.args.n_slots = device.keep(std::vector<int32_t>{fewer});
    c.params.regions[0].n_slots = fewer;
    CHECK_MSG(relative_error(device.run(), c.oracle()) <= exact_tolerance, s.name + ", seen early");
}

struct DevicePlan {
    DeviceBuffer segments;
    int n = 0;

    explicit DevicePlan(const RowLayout& row) {
        for (int g = 0; g < row.n_groups; g++) n += row.groups[g].n_segments;
        segments = DeviceBuffer(std::vector<lkv::SegmentLayout>(row.segments, row.segments + n));
    }
};

lkv::cuda::RowTarget target(const RowLayout& row, const DevicePlan& plan, const DeviceBuffer& k,
                            const DeviceBuffer& v) {
    const auto* segments = plan.segments.as<lkv::SegmentLayout>();
    return {0, k.as<uint8_t>(), v.as<uint8_t>(), segments, segments, row.row_bytes, row.row_bytes, plan.n, plan.n};
}

// Values as caches hold them: channels of different spread, outliers, offsets, an all-zero and a constant row.
std::vector<float> rows_of_values(int n, int width, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n * width));
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < width; d++) {
            const float spread = std::exp(1.5f * std::sin(static_cast<float>(d)));
            float v = normal(random) * spread * (d % 37 == 5 ? 20.0f : 1.0f) + (d % 64 == 3 ? 4.0f : 0.0f);
            if (i == 0) v = 0.0f;
            if (i == 1) v = -2.75f;
            if (i == 2) v *= 1e-7f;
            if (i == 3) v *= 1e5f;
            x[static_cast<size_t>(i * width + d)] = v;
        }
    }
    return x;
}

// Latents of `values`, K's and V's alike, go to slots of the only region. region: zeros.
lkv::cuda::StoreArgs store_args(const DeviceBuffer& values, const RowLayout& row, const lkv::cuda::RowTarget& to,
                                const DeviceBuffer& slot, const DeviceBuffer& region) {
    lkv::cuda::StoreArgs args{};
    args.latents = {values.as<float>(), values.as<float>(), row.width, row.width};
    args.with_k = args.with_v = 1;
    args.region = region.as<int32_t>();
    args.slot = slot.as<int32_t>();
    args.targets[0] = to;
    return args;
}

// Rows become rows of another layout, as wide, in these slots.
lkv::cuda::MoveArgs move_args(const lkv::cuda::RowTarget& from, const DeviceBuffer& from_slot,
                              const lkv::cuda::RowTarget& to, const DeviceBuffer& to_slot, const RowLayout& row) {
    lkv::cuda::MoveArgs move{};
    move.from = from;
    move.to = to;
    move.from_slot = from_slot.as<int32_t>();
    move.to_slot = to_slot.as<int32_t>();
    move.k_width = move.v_width = row.width;
    return move;
}

void rows() {
    std::mt19937 random(11);
    constexpr int n = 64;
    int64_t differing = 0;
    int64_t total = 0;
    for (const Format format : lkv::all_formats) {
        if (lkv::format_in_token_blocks(format)) continue;  // see block_rows
        const Format first = lkv::format_scaled_by_group(format) ? Format::n8 : Format::q8;
        const RowPlan plan({{{first, 64}, {format, 96}, {Format::none, 32}}, {{format, 64}}, {{format, 256}}});
        const RowLayout row = plan.view();
        const std::vector<float> x = rows_of_values(n, row.width, random);
        const auto row_bytes = static_cast<size_t>(row.row_bytes);
        std::vector<uint8_t> want(n * row_bytes, 0xee);
        for (int i = 0; i < n; i++) {
            lkv::write_row(row, &x[static_cast<size_t>(i * row.width)],
                           &want[static_cast<size_t>(n - 1 - i) * row_bytes]);
        }
        const DevicePlan device_plan(row);
        const DeviceBuffer values(x);
        const DeviceBuffer k(n * row_bytes);
        const DeviceBuffer v(n * row_bytes);
        std::vector<int32_t> slots;
        for (int i = 0; i < n; i++) slots.push_back(n - 1 - i);
        const DeviceBuffer slot(slots);
        const DeviceBuffer region(std::vector<int32_t>(n, 0));
        const auto args = store_args(values, row, target(row, device_plan, k, v), slot, region);
        if (static_cast<int>(format) % 2 == 0) {
            cuda_check(lkv::cuda::store_rows(args, n, nullptr), "store_rows");
        } else {
            lkv::cuda::StoreArgs alone = args;
            alone.with_v = 0;
            cuda_check(lkv::cuda::store_rows(alone, n, nullptr), "store_rows of K");
            alone = args;
            alone.with_k = 0;
            cuda_check(lkv::cuda::store_rows(alone, n, nullptr), "store_rows of V");
        }
        cuda_check(cudaDeviceSynchronize(), "storing");
        for (const DeviceBuffer* side : {&k, &v}) {
            const auto got = side->download<uint8_t>();
            int64_t wrong = 0;
            for (size_t i = 0; i < want.size(); i++) {
                if (got[i] != want[i] && wrong < 3) {
                    std::printf("%s: row %zu byte %zu: %02x instead of %02x\n", lkv::format_name(format),
                                n - 1 - i / row_bytes, i % row_bytes, got[i], want[i]);
                }
                wrong += got[i] != want[i];
            }
            differing += wrong;
            total += static_cast<int64_t>(want.size());
            CHECK_MSG(wrong == 0, std::string("rows of ") + lkv::format_name(format) + ": " + std::to_string(wrong) +
                                      " bytes of " + std::to_string(want.size()) + " differ from the CPU's");
        }

        // requantized from an exact region
        const RowPlan exact({{{Format::f16, 160}, {Format::f16, 32}}, {{Format::f16, 64}}, {{Format::f16, 256}}});
        const RowLayout from = exact.view();
        std::vector<uint8_t> source(n * static_cast<size_t>(from.row_bytes));
        for (int i = 0; i < n; i++) {
            lkv::write_row(from, &x[static_cast<size_t>(i * row.width)],
                           &source[static_cast<size_t>(i * from.row_bytes)]);
        }
        lkv::move_rows(from, source.data(), row, want.data(), n);
        const DevicePlan from_plan(from);
        const DeviceBuffer source_rows(source);
        std::vector<int32_t> same(n);
        std::iota(same.begin(), same.end(), 0);
        const DeviceBuffer index(same);
        const auto move = move_args(target(from, from_plan, source_rows, source_rows), index,
                                    target(row, device_plan, k, v), index, row);
        cuda_check(lkv::cuda::move_rows(move, n, nullptr), "move_rows");
        cuda_check(cudaDeviceSynchronize(), "moving");
        const auto moved = v.download<uint8_t>();
        CHECK_MSG(moved == want, std::string("moved rows of ") + lkv::format_name(format) + " differ from the CPU's");
    }
    std::printf("row bytes that differ from the CPU's: %lld of %lld\n", static_cast<long long>(differing),
                static_cast<long long>(total));
}

// V that is stored times a Hadamard matrix, beside K that is not.
void rotated_rows() {
    struct Heads {
        int n_kv, head_dim, hadamard;
    };
    for (const Heads& h : {Heads{8, 128, 64}, Heads{3, 96, 32}, Heads{3, 80, 16}, Heads{40, 128, 64}}) {
        constexpr int n = 3;
        const RowPlan plan = RowPlan::uniform(h.n_kv, h.head_dim, Format::f32);
        const RowLayout row = plan.view();
        std::mt19937 random(12);
        const std::vector<float> x = rows_of_values(n, row.width, random);
        const DevicePlan device_plan(row);
        const DeviceBuffer values(x);
        const DeviceBuffer k(n * static_cast<size_t>(row.row_bytes));
        const DeviceBuffer v(n * static_cast<size_t>(row.row_bytes));
        const DeviceBuffer slot(std::vector<int32_t>{0, 1, 2});
        const DeviceBuffer region(std::vector<int32_t>(n, 0));
        auto args = store_args(values, row, target(row, device_plan, k, v), slot, region);
        args.latents.v_hadamard = h.hadamard;
        cuda_check(lkv::cuda::store_rows(args, n, nullptr), "store_rows");
        cuda_check(cudaDeviceSynchronize(), "storing");
        const std::vector<double> whole(x.begin(), x.end());
        for (const DeviceBuffer* side : {&k, &v}) {
            const auto bytes = side->download<uint8_t>();
            std::vector<float> got(x.size());
            for (int i = 0; i < n; i++) {
                lkv::read_row(row, bytes.data() + static_cast<ptrdiff_t>(i) * row.row_bytes,
                              got.data() + static_cast<ptrdiff_t>(i) * row.width);
            }
            const double error = relative_error(got, side == &v ? times_hadamard(whole, h.hadamard) : whole);
            CHECK_MSG(error < 1e-6, "rows of heads of " + std::to_string(h.head_dim) + ": " + std::to_string(error));
        }
    }
}

// Rows that begin with their scales, of more segments than a thread block has warps: stored, moved from exact ones, moved as they are.
void rows_with_scales() {
    std::mt19937 random(14);
    constexpr int n = 24;
    std::vector<std::vector<lkv::SegmentSpec>> groups;
    for (int g = 0; g < 9; g++) {
        groups.push_back(
            {{Format::n8, 16}, {Format::n4, 16 * (1 + g % 3)}, {Format::n3, 16}, {Format::n2, 32}, {Format::n1, 16}});
    }
    const RowPlan plan(groups);
    for (auto& group : groups) {
        for (auto& segment : group) segment.format = Format::f16;
    }
    const RowPlan exact(groups);
    const RowLayout row = plan.view();
    const RowLayout from = exact.view();
    const auto row_bytes = static_cast<size_t>(row.row_bytes);
    const std::vector<float> x = rows_of_values(n, row.width, random);
    std::vector<uint8_t> want(n * row_bytes);
    std::vector<uint8_t> source(n * static_cast<size_t>(from.row_bytes));
    for (int i = 0; i < n; i++) {
        lkv::write_row(row, &x[static_cast<size_t>(i * row.width)], &want[static_cast<size_t>(i) * row_bytes]);
        lkv::write_row(from, &x[static_cast<size_t>(i * row.width)],
                       &source[static_cast<size_t>(i) * static_cast<size_t>(from.row_bytes)]);
    }
    const DevicePlan device_plan(row);
    const DevicePlan from_plan(from);
    const DeviceBuffer values(x);
    const DeviceBuffer k(want.size());
    const DeviceBuffer v(want.size());
    std::vector<int32_t> slots(n);
    std::iota(slots.begin(), slots.end(), 0);
    const DeviceBuffer slot(slots);
    const DeviceBuffer region(std::vector<int32_t>(n, 0));
    const auto stored = target(row, device_plan, k, v);
    const auto args = store_args(values, row, stored, slot, region);
    cuda_check(lkv::cuda::store_rows(args, n, nullptr), "store_rows");
    cuda_check(cudaDeviceSynchronize(), "storing");
    CHECK(k.download<uint8_t>() == want && v.download<uint8_t>() == want);

    const DeviceBuffer source_rows(source);
    auto move = move_args(target(from, from_plan, source_rows, source_rows), slot, stored, slot, row);
    cuda_check(lkv::cuda::move_rows(move, n, nullptr), "move_rows");
    cuda_check(cudaDeviceSynchronize(), "moving");
    lkv::move_rows(from, source.data(), row, want.data(), n);
    CHECK(k.download<uint8_t>() == want && v.download<uint8_t>() == want);

    const DeviceBuffer to(want.size());
    move = move_args(stored, slot, target(row, device_plan, to, to), slot, row);
    cuda_check(lkv::cuda::move_rows(move, n, nullptr), "move_rows of one layout");
    cuda_check(cudaDeviceSynchronize(), "moving");
    CHECK(to.download<uint8_t>() == want);
}

// K in blocks of tokens, beside segments of single rows: from an exact region, and from latents as they are made.
void block_rows() {
    std::mt19937 random(13);
    constexpr int n = 3 * lkv::token_block_slots;
    constexpr int blocks[] = {2, 0, 1};  // where they go
    std::vector<int32_t> from_slots;
    std::vector<int32_t> to_slots;
    for (int i = 0; i < n; i++) {
        from_slots.push_back(n - 1 - i);
        to_slots.push_back(blocks[i / lkv::token_block_slots] * lkv::token_block_slots + i % lkv::token_block_slots);
    }
    for (const Format format : {Format::c8, Format::c4, Format::c3, Format::c2}) {
        const RowPlan plan({{{Format::q4, 64}, {format, 96}, {Format::none, 32}}, {{format, 64}}, {{format, 272}}});
        const RowPlan exact({{{Format::f16, 160}, {Format::f16, 32}}, {{Format::f16, 64}}, {{Format::f16, 272}}});
        const RowLayout row = plan.view();
        const RowLayout from = exact.view();
        const auto width = static_cast<size_t>(row.width);
        std::vector<float> x = rows_of_values(n, row.width, random);
        std::vector<uint8_t> source(n * static_cast<size_t>(from.row_bytes));
        for (size_t i = 0; i < n; i++)
            lkv::write_row(from, &x[i * width], &source[i * static_cast<size_t>(from.row_bytes)]);
        std::vector<uint8_t> moved(n * static_cast<size_t>(row.row_bytes), 0xee);
        std::vector<uint8_t> written = moved;
        for (size_t b = 0; b < std::size(blocks); b++) {
            const uint8_t* rows[lkv::token_block_slots];
            for (size_t i = 0; i < lkv::token_block_slots; i++) {
                rows[i] = &source[static_cast<size_t>(from_slots[b * lkv::token_block_slots + i] * from.row_bytes)];
            }
            const auto at = static_cast<size_t>(blocks[b] * lkv::token_block_slots * row.row_bytes);
            lkv::move_token_block(from, rows, row, &moved[at]);
            lkv::write_token_block(row, &x[b * lkv::token_block_slots * width], &written[at]);
        }
        const DevicePlan to_plan(row);
        const DevicePlan from_plan(from);
        const DeviceBuffer values(x);
        const DeviceBuffer source_rows(source);
        const DeviceBuffer k(moved.size());
        const DeviceBuffer v(moved.size());
        const DeviceBuffer from_slot(from_slots);
        const DeviceBuffer to_slot(to_slots);
        const auto check = [&](const std::vector<uint8_t>& want, const char* what) {
            cuda_check(cudaDeviceSynchronize(), "blocks");
            const auto got = k.download<uint8_t>();
            size_t wrong = 0;
            for (size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i] ? 1 : 0;
            CHECK_MSG(wrong == 0, std::string("blocks of ") + lkv::format_name(format) + ", " + what + ": " +
                                      std::to_string(wrong) + " bytes differ from the CPU's");
        };
        const auto move = move_args(target(from, from_plan, source_rows, source_rows), from_slot,
                                    target(row, to_plan, k, v), to_slot, row);
        lkv::cuda::BlockArgs args{};
        args.rows = source_rows.as<uint8_t>();
        args.row_bytes = from.row_bytes;
        args.segments = move.from.k_segments;
        args.n_segments = move.from.n_k_segments;
        args.from_slot = move.from_slot;
        args.to = move.to;
        args.to_slot = move.to_slot;
        cuda_check(lkv::cuda::move_rows(move, n, nullptr), "move_rows");
        cuda_check(lkv::cuda::store_blocks(args, n, nullptr), "store_blocks");
        check(moved, "moved");

        const DeviceBuffer region(std::vector<int32_t>(n, 0));
        auto store = store_args(values, row, args.to, to_slot, region);
        store.with_v = 0;
        args.rows = values.as<uint8_t>();
        args.row_bytes = static_cast<int64_t>(width * sizeof(float));
        args.segments = nullptr;
        args.from_slot = nullptr;
        cuda_check(lkv::cuda::store_rows(store, n, nullptr), "store_rows");
        cuda_check(lkv::cuda::store_blocks(args, n, nullptr), "store_blocks");
        check(written, "stored");
    }
}

// A case of every format, each on another path.
void blocks_in_short() {
    int i = 0;
    lkv::test::blocks([&](const AttnShape& shape) {
        if (shape.n_tokens == 5 && i++ % 6 == 0) compare(shape);
    });
}

// K in blocks of tokens beside f16 windows, as --kv small, smaller and smallest have it: the decode and the prefill kernel's own code.
void block_kernels() {
    struct Blocks {
        Format k, v;
        int head_dim, n_kv, rep;
        int n_tokens = 1, n_past = 420;
        int n_seq = 1, window = 0;
        bool permute = false, alibi = false, exact = true;  // exact: with windows
    };
    using enum Format;
    constexpr Blocks cases[] = {
        {c4, q4, 128, 2, 4},
        {c4, q6, 64, 3, 2, 1, 420, 3, 0, true},
        {c3, q3, 64, 4, 2, 2, 700, 2, 100, true},
        {c3, q8, 128, 1, 6, 1, 330, 1, 0, false, true},
        {c2, q2, 128, 2, 7, 1, 95, 1, 0, true},
        {c2, q3, 256, 1, 8},
        {c4, q4, 64, 1, 1, 8, 130, 1, 0, false, false, false},
        {c3, q3, 128, 2, 4, 5, 300, 1, 0, true},  // rows of three thread blocks
        {c4, q4, 128, 2, 4, 40, 200},
        {c3, q3, 64, 3, 3, 70, 300, 3, 90, true},
        {c2, q2, 256, 1, 4, 40, 150, 1, 0, true},
        {c4, f16, 64, 2, 3, 1, 300, 2, 0, true},
    };
    for (const Blocks& of : cases) {
        AttnShape s;
        s.head_dim = of.head_dim;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_formats = {f16, f16, of.k};
        s.v_formats = {f16, f16, of.v};
        if (!of.exact) {
            s.k_formats = {of.k};
            s.v_formats = {of.v};
        }
        s.region_tokens = {4, 60};
        s.n_tokens = of.n_tokens;
        s.n_past = of.n_past;
        s.n_seq = of.n_seq;
        s.window = of.window;
        s.permute = of.permute;
        s.alibi = of.alibi;
        s.seed = static_cast<unsigned>(of.head_dim + of.n_past + of.rep);
        s.name = std::string("blocks of ") + lkv::format_name(of.k) + " beside " + lkv::format_name(of.v) +
                 ", heads of " + std::to_string(of.head_dim) + ", " + std::to_string(of.n_tokens) + " tokens";
        const AttnCase c(s);
        lkv::cuda::Device limits = lkv::test::device_limits();
        const auto check = [&](const char* kernel) {
            DeviceCase device(c.params, limits);
            CHECK_MSG(kernel_of(device) == kernel, s.name + ": planned for " + kernel_of(device));
            const double error = relative_error(device.run(), c.oracle());
            CHECK_MSG(error <= tolerance_of(s), s.name + ", " + kernel + ": relative error " + std::to_string(error));
        };
        const bool few = of.n_tokens * of.n_seq * of.rep <= 32;
        if (limits.warpgroups && !few) check(of.head_dim <= 128 || of.head_dim == 256 ? "expand" : "prefill");
        limits.warpgroups = false;
        check(few ? "decode" : "prefill");
        compare(s);
    }
}

// One wide segment a row, as a latent of all heads has it.
void rows_of_one_segment() {
    std::mt19937 random(12);
    constexpr int n = 40;
    for (const Format format : lkv::all_formats) {
        if (lkv::format_in_token_blocks(format)) continue;
        for (const int width : {240, 256, 272, 512, 1040, 2048, 2064}) {
            if (width % lkv::format_width_multiple(format) != 0) continue;
            const RowPlan plan({{{format, width}}});
            const RowLayout row = plan.view();
            const std::vector<float> x = rows_of_values(n, width, random);
            const auto row_bytes = static_cast<size_t>(row.row_bytes);
            std::vector<uint8_t> want(n * row_bytes);
            for (size_t i = 0; i < n; i++) {
                lkv::write_row(row, &x[i * static_cast<size_t>(width)], &want[i * row_bytes]);
            }
            const DevicePlan device_plan(row);
            const DeviceBuffer values(x);
            const DeviceBuffer k(want.size());
            const DeviceBuffer v(want.size());
            std::vector<int32_t> slots(n);
            std::iota(slots.begin(), slots.end(), 0);
            const DeviceBuffer slot(slots);
            const DeviceBuffer region(std::vector<int32_t>(n, 0));
            lkv::cuda::StoreArgs args{};
            args.latents = {values.as<float>(), values.as<float>(), width, width};
            args.with_k = args.with_v = 1;
            args.region = region.as<int32_t>();
            args.slot = slot.as<int32_t>();
            args.targets[0] = target(row, device_plan, k, v);
            cuda_check(lkv::cuda::store_rows(args, n, nullptr), "store_rows");
            cuda_check(cudaDeviceSynchronize(), "storing");
            CHECK_MSG(k.download<uint8_t>() == want && v.download<uint8_t>() == want,
                      std::string("rows of ") + std::to_string(width) + " channels of " + lkv::format_name(format) +
                          " differ from the CPU's");
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::printf("cuda_attn: skipped: no CUDA device\n");
        return 77;
    }
    // "small" leaves out what takes compute-sanitizer minutes; other arguments name the tests to run
    const std::set<std::string> named(argv + 1, argv + argc);
    const bool small = named.contains("small");
    const auto run = [&](const char* name, bool in_small, const auto& test) {
        if (small ? in_small : named.empty() || named.contains(name)) test();
    };
    run("samples", true, samples);
    run("uneven_chunks", true, uneven_chunks);
    run("beside", true, beside);
    run("late_parts", true, late_parts);
    run("mla", true, mla);
    run("mla_scales", true, mla_scales);
    run("apart", true, apart);
    run("rows_apart", true, rows_apart);
    run("apart_beside", true, apart_beside);
    run("one_row", true, one_row);
    run("random_regions", true, [] { random_regions(1, 60); });
    run("rows", true, rows);
    run("rows_of_one_segment", true, rows_of_one_segment);
    run("rows_with_scales", true, rows_with_scales);
    run("block_rows", true, block_rows);
    run("block_kernels", true, block_kernels);
    run("blocks_in_short", true, blocks_in_short);
    run("blocks", false, [] { lkv::test::blocks(compare); });
    run("turned_heads", true, turned_heads);
    run("rotated_results", true, rotated_results);
    run("rotated_rows", true, rotated_rows);
    run("products", true, products);
    run("products_of_heads", true, products_of_heads);
    run("delta_nets", true, lkv::test::delta_nets);
    run("recorded_steps", true, recorded_steps);
    run("shared_latents", true, shared_latents);
    run("long_parts", false, long_parts);
    run("scattered_positions", true, scattered_positions);
    run("nothing_visible", true, nothing_visible);
    run("expanded", true, expanded);
    run("flash", true, flash);
    run("many_sequences", true, many_sequences);
    run("grows", true, grows);
    run("wide_heads", true, [] { lkv::test::wide_heads(compare); });
    run("formats", true, [] { lkv::test::formats(compare); });
    run("scaled_rows", true, [] { lkv::test::scaled_rows(compare); });
    run("regions", false, [] { lkv::test::regions(compare); });
    run("masks", false, [] { lkv::test::masks(compare); });
    run("paths_and_shapes", false, [] { lkv::test::paths_and_shapes(compare); });
    run("wide", true, wide);
    run("wide_regions", true, wide_regions);
    run("warm_ups", true, warm_ups);
    run("wide_latents", true, wide_latents);
    for (const auto& [name, error] : largest) std::printf("largest relative error, %s: %.2e\n", name.c_str(), error);
    return lkv::test::report("cuda_attn");
}
