// Regions of any rows, and the matrix of every implementation: for whatever kernel takes them.
#include <map>
#include <optional>
#include <random>

#include "attn/attn_matrix.h"
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

// A random row: bits that do not rise along a group, of 8, 4, 2 and 1, or scaled by the row; dropped segments last; windows keep every
// segment.
std::vector<std::vector<SegmentSpec>> random_row(std::mt19937& random, int n_groups, int rank, bool latent,
                                                 std::optional<Format> whole) {
    using enum Format;
    constexpr Format with_scales[] = {f16, q8, q4, q2, q1, none};
    constexpr Format by_row[] = {n8, n6, n4, n3, n1, none};
    const auto& falling = random() % 3 == 0 ? by_row : with_scales;
    std::vector<std::vector<SegmentSpec>> groups;
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

}  // namespace

Cases regions_cases() {
    return {{"random_regions", [] { random_regions(1, 60); }},
            {"wide_heads", [] { wide_heads(compare); }},
            {"formats", [] { formats(compare); }},
            {"scaled_rows", [] { scaled_rows(compare); }},
            {"regions", [] { regions(compare); }, true},
            {"masks", [] { masks(compare); }, true},
            {"paths_and_shapes", [] { paths_and_shapes(compare); }, true}};
}

}  // namespace lkv::test
