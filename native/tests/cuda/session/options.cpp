#include "cuda/session/options.h"

#include <algorithm>
#include <sstream>
#include <vector>

namespace lkv::test {

namespace {

template <class T>
T one_of(std::mt19937& random, const std::vector<T>& of) {
    return of[random() % of.size()];
}

// A plan for the segments of one side: bits that do not rise along a group, dropped segments last; as a master file's budget chooses.
std::vector<std::string> plan(std::mt19937& random, const Shape& shape, const char* path, bool value_side) {
    const std::vector<std::string> formats = {"f16", "q8", "q4", "q2", "q1", "none"};
    const bool full = is_full(path);
    const bool whole_mla = shape.turned > 0 && is_full(shape.v_path);
    int n_groups = 0;
    for (int il = 0; il < shape.n_layer; il++) n_groups += shape.n_groups(path, value_side, il);
    std::vector<std::string> all;
    for (int g = 0; g < n_groups; g++) {
        size_t at = random() % 3;
        for (int s = 0; s < (whole_mla ? 2 : full ? 1 : shape.n_segments); s++) {
            all.push_back(formats[at]);
            at = std::min(formats.size() - 1, at + random() % 3);
        }
    }
    return all;
}

}  // namespace

Combination combination(std::mt19937& random, const Shape& shape) {
    Combination c;
    lkv::SessionOptions& o = c.options;
    o.n_ctx = 256;
    o.n_threads = 1;
    o.n_seq_max = one_of(random, std::vector{2, 2, 3});
    o.n_ubatch = one_of(random, std::vector{7, 64, 512});
    o.sink = one_of(random, std::vector{-1, 0, 0, 1, 5});
    o.recent = one_of(random, std::vector{-1, 0, 0, 1, 20});
    o.fixed_window =
        true;  // of which a CPU and a GPU have other ubatches, and else other exact tokens in so small a context
    if (random() % 4 == 0) o.recent_ratio = one_of(random, std::vector{0.0, 0.3, 1.0});
    const std::vector<std::string> formats = {"", "", "f16", "q8", "q6", "q4", "q2", "q5", "q8_0", "q4_0"};
    if (random() % 2 == 0) {
        o.k_plan = plan(random, shape, shape.k_path, false);
        o.v_plan = plan(random, shape, shape.v_path, true);
    } else {
        o.kv = one_of(random, formats);
    }
    o.kv_sink = one_of(random, formats);
    o.kv_recent = one_of(random, formats);
    std::ostringstream name;
    name << shape.k_path << "/" << shape.v_path << " " << shape.rank << " of " << shape.group << ", sink " << o.sink
         << ", recent " << o.recent << ", ratio " << o.recent_ratio << ", kv '" << o.kv << "', kv_sink '" << o.kv_sink
         << "', kv_recent '" << o.kv_recent << "', " << o.n_seq_max << " sequences, ubatch " << o.n_ubatch << ", plan";
    for (const auto& format : o.k_plan) name << " " << format;
    name << " /";
    for (const auto& format : o.v_plan) name << " " << format;
    c.name = name.str();
    return c;
}

}  // namespace lkv::test
