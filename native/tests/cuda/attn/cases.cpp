#include "cuda/attn/cases.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <map>

namespace lkv::test {

namespace {

std::map<std::string, double> largest;

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

bool has_kernel(const std::string& name) {
    const auto& all = cuda::all_kernels();
    return std::any_of(all.begin(), all.end(), [&](const cuda::Kernel* kernel) { return kernel->name == name; });
}

// The least shared memory with which the same kernel takes the problem.
int least_memory(const LatentAttnParams& p, cuda::Device device) {
    int capacity = 0;
    for (int r = 0; r < p.n_regions; r++) capacity += p.regions[r].n_slots;
    const auto kernel = [&](int bytes) -> const cuda::Kernel* {
        device.shared_bytes = bytes;
        try {
            return cuda::plan_attention({p, capacity, device}, {}).kernel;
        } catch (const std::invalid_argument&) {
            return nullptr;
        }
    };
    int enough = device.shared_bytes;
    const cuda::Kernel* const wanted = kernel(enough);
    for (int step = 1 << 17; step >= 1 << 10; step /= 2) {
        if (enough > step && kernel(enough - step) == wanted) enough -= step;
    }
    return enough;
}

AttnShape shape_of(const Sample& of) {
    AttnShape s;
    s.name = std::string(of.kernel) + ", " + format_name(of.format) + ", ranks " + std::to_string(of.k_rank) + " and " +
             std::to_string(of.v_rank) + " of " + std::to_string(of.group) + " heads";
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
    return s;
}

// What takes chunks of the context has other code for GPUs without products by warpgroups, and for ranks that are no whole units of 32
// channels.
void compare_other_chunks(const AttnShape& s, const std::string& kernel) {
    cuda::Device limits = device_limits();
    limits.warpgroups = false;
    const auto check = [&](const AttnShape& of, const char* how) {
        const AttnCase c(of);
        DeviceCase device(c.params, limits);
        if (device.args.chunk == 0) return;
        CHECK_MSG(kernel_of(device) == kernel, s.name + how + ": planned for " + kernel_of(device));
        const double error = relative_error(device.run(), c.oracle());
        CHECK_MSG(error <= tolerance_of(s), s.name + how + ": relative error " + std::to_string(error));
    };
    if (!s.k_rebuild) return;
    if (device_limits().warpgroups) check(s, ", without warpgroups");
    AttnShape ragged = s;
    for (int& rank : ragged.k_ranks) rank -= rank % 32 == 0 ? 16 : 0;
    check(ragged, ", of no whole units");
}

void compare_sample(const Sample& of) {
    const AttnShape s = shape_of(of);
    const AttnCase c(s);
    const cuda::Device limits = device_limits();
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
    if (device.args.chunk == 0) return;
    compare_other_chunks(s, kernel_of(device));
    if (device.args.chunk <= cuda::chunk_step) return;
    device.args.chunk = cuda::chunk_step;  // several chunks
    CHECK_MSG(relative_error(device.run(), c.oracle()) <= tolerance, s.name + ": in several chunks");
}

}  // namespace

double tolerance_of(const AttnShape& s) {
    if (format_scaled_by_group(s.k_formats.back()) || format_scaled_by_group(s.v_formats.back())) {
        return scaled_tolerance;
    }
    bool f16 = !s.k_rebuild && !s.v_latent;
    for (const Format f : s.k_formats) f16 = f16 && f == Format::f16;
    for (const Format f : s.v_formats) f16 = f16 && f == Format::f16;
    return f16 ? exact_tolerance : rounded_tolerance;
}

void compare(const AttnShape& shape) {
    AttnCase c(shape);
    const cuda::Device device_of = device_limits();
    const int least = least_memory(c.params, device_of);
    const std::vector<double> want = c.oracle();
    const double tolerance = tolerance_of(shape);
    for (const Cut& cut : cuts) {
        cuda::Device limits = device_of;
        limits.shared_bytes = least + (device_of.shared_bytes - least) * cut.memory / 100;
        DeviceCase device(c.params, limits);
        if (cut.n_split > 0) {
            // several chunks of the context
            if (device.args.chunk != 0) device.args.chunk = cuda::chunk_step * cut.n_split;
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

void print_largest() {
    for (const auto& [name, error] : largest) std::printf("largest relative error, %s: %.2e\n", name.c_str(), error);
}

void compare_samples(const std::vector<Sample>& samples) {
    for (const Sample& of : samples) compare_sample(of);
}

Segments whole(Format format) { return {{format, 64}, {format, 128}, {format, 128}, {format, 128}, {format, 128}}; }

Segments falling_bits() {
    using enum Format;
    return {{q8, 64}, {q8, 64}, {q4, 192}, {q2, 96}, {q1, 64}, {none, 96}};
}

void compare_one_rows(const std::vector<OneRow>& rows, unsigned seed) {
    for (const OneRow& of : rows) {
        AttnShape s;
        s.name = std::string("one row, ") + of.name;
        int width = 0;
        for (const SegmentSpec& segment : of.rows.back()) width += segment.width;
        s.n_kv = 1;
        s.rep = of.heads;
        s.key_only = of.turned;
        s.head_dim = width - of.turned;
        s.k_ranks = {width};
        for (const Segments& row : of.rows) s.k_rows.push_back({row});
        s.k_formats = s.v_formats = std::vector(of.rows.size(), Format::q8);
        s.n_tokens = of.n_tokens;
        s.n_past = of.n_past;
        s.n_seq = of.n_seq;
        s.permute = of.n_split != 0;
        s.seed = seed++;
        const AttnCase c(s);
        cuda::Device limits = device_limits();
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

}  // namespace lkv::test
