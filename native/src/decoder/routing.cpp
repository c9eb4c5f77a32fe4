#include "decoder/routing.h"

#include <string>

#include "base/error.h"
#include "decoder/hparams.h"

namespace lkv {
namespace {

enum Gating : uint32_t { softmax = 1, sigmoid = 2, softmax_of_chosen = 3 };  // llama.cpp's numbers

}  // namespace

ExpertRouting read_routing(const GgufFile& file, const std::string& architecture, int n_expert, bool has_bias) {
    const std::string dot = architecture + ".expert_";
    ExpertRouting routing;
    const uint32_t absent = has_bias ? sigmoid : softmax;
    const uint32_t named = file.find_u32(dot + "gating_func").value_or(absent);
    const uint32_t gating = named == 0 ? absent : named;
    if (gating > softmax_of_chosen) {
        fail(dot + "gating_func", "expected 1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen experts); got ",
             gating);
    }
    using Scores = ExpertRouting::Scores;
    routing.scores = gating == sigmoid   ? Scores::sigmoid
                     : gating == softmax ? Scores::softmax
                                         : Scores::softmax_of_chosen;
    const auto count = [&](const char* name, uint32_t high) {
        const uint32_t n = file.find_u32(dot + name).value_or(1);
        if (n > high) fail(dot + name, "expected a number up to ", high, "; got ", n);
        return n < 1 ? 1 : static_cast<int>(n);
    };
    routing.n_groups = count("group_count", static_cast<uint32_t>(n_expert));
    const int least = gating == sigmoid && routing.n_groups > 1 ? 2 : 1;
    if (n_expert % routing.n_groups != 0 || n_expert < least * routing.n_groups) {
        fail(dot + "group_count", "expected groups of as many of the ", n_expert, " experts each, ", least,
             " or more; got ", routing.n_groups);
    }
    routing.n_groups_used = count("group_used_count", static_cast<uint32_t>(routing.n_groups));
    const float scale = read_float(file, dot + "weights_scale", 0.0F, 1e6F, 1.0F);
    routing.scale = scale > 0.0F ? scale : 1.0F;  // 0: none
    return routing;
}

}  // namespace lkv
